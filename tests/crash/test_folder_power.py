"""A power cut while a supervisor makes a folder its run's leaves no run file, the old one or the new one, and never a part."""

from pathlib import Path

import pytest

import power_cut
from holdfast.runs.config import RunConfig, read_config
from holdfast.supervise.run_folder import claimed


@pytest.mark.parametrize("kept", power_cut.KEPT)
def test_a_power_cut_at_any_call_leaves_the_old_run_file_or_the_new_one(tmp_path: Path, kept: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before: RunConfig | None = None
    for save_every in (5, 7):
        after = RunConfig(script="train.py", save_every=save_every)
        calls: list[power_cut.Call] = []
        disk = power_cut.Disk.of(out)
        with power_cut.recorded(out, calls), claimed(out, after):
            pass
        assert len(calls) > 4
        for number, call in enumerate(calls):
            disk.apply(call)
            left = tmp_path / f"left-{save_every}-{number}"
            disk.left(kept, left)
            found = read_config(left) if (left / "run.json").exists() else None
            assert found in (before, after)
        assert found == after  # before any worker starts it is on the disk
        before = after
