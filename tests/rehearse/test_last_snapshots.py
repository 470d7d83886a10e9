"""A rehearsal names the values that differ between the last snapshots of two runs."""

from pathlib import Path
from typing import Any

import torch

from holdfast.rehearse.rehearsal import last_difference
from saved_runs import saved_by_ranks


def state(**changes: Any) -> dict[str, Any]:
    return {"model": {f"w{number}": torch.zeros(4) for number in range(6)}, "progress": {"best": 1.0}, **changes}


def test_equal_snapshots_have_no_difference(tmp_path: Path) -> None:
    for name in ("reference", "killed"):
        saved_by_ranks(tmp_path / name, 10, state())
    assert last_difference(tmp_path / "reference", tmp_path / "killed") == ""


def test_the_values_that_differ_are_named(tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "reference", 10, state())
    saved_by_ranks(tmp_path / "killed", 10, state(progress={"best": 2.0}))
    assert last_difference(tmp_path / "reference", tmp_path / "killed") == (
        "the last snapshots differ in progress/best: something protected changed after the last step was recorded"
    )
    saved_by_ranks(tmp_path / "other", 10, state(model={f"w{number}": torch.ones(4) for number in range(6)}))
    why = last_difference(tmp_path / "reference", tmp_path / "other")
    assert "model/w0, model/w1, model/w2, model/w3 and 2 more" in why


def test_snapshots_of_other_steps_differ(tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "reference", 10, state())
    saved_by_ranks(tmp_path / "killed", 12, state())
    assert last_difference(tmp_path / "reference", tmp_path / "killed") == "the last snapshots are of steps 10 and 12"
