"""`holdfast compare` says whether the saved states of two runs are equal, and refuses everything else in one line."""

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import cli
from holdfast.blocks.division import along
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.checkpoint.store import DirectoryStore
from holdfast.events import Commit
from holdfast.history.log import HistoryWriter
from holdfast.train.state import plain_values
from saved_runs import saved_by_ranks

Ran = tuple[int, list[str], str]
Command = Callable[..., Ran]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """A function that compares runs in `tmp_path` and returns the exit status, the lines on stdout, and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["holdfast", "compare", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), [" ".join(line.split()) for line in out.splitlines()], err

    return run


def states(seed: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    network = nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}


def test_equal_runs_are_equal_whatever_the_number_of_ranks_that_saved_them(compare: Command, tmp_path: Path) -> None:
    for name, ranks in (("a", 1), ("b", 3)):
        saved_by_ranks(tmp_path / name, 10, states(), ranks)
    assert compare("a", "b") == (
        0,
        [
            "a: step 10, 1 rank",
            "b: step 10, 3 ranks",
            "equal: 8 tensors, 368 bytes, the same bits; 15 plain values, the same",
            "note: settings that differ, which are not part of the state: ranks (1 and 3)",
        ],
        "",
    )


def test_a_run_and_its_store_are_equal(compare: Command, tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "a", 10, states())
    assert compare("a", "a")[0] == 0
    assert compare(tmp_path / "a", "a/checkpoints")[0] == 0


def test_a_compiled_model_is_compared_under_its_own_names(compare: Command, tmp_path: Path) -> None:
    plain = nn.Linear(4, 6).state_dict()
    compiled = OrderedDict((f"_orig_mod.{key}", value) for key, value in plain.items())
    versions = plain._metadata  # type: ignore[attr-defined]
    compiled._metadata = OrderedDict({"": {"version": 1}, "_orig_mod": versions[""]})  # type: ignore[attr-defined]
    saved_by_ranks(tmp_path / "a", 10, {"model": plain})
    saved_by_ranks(tmp_path / "b", 10, {"model": compiled})
    assert compare("a", "b")[0] == 0


def test_the_elements_that_differ_are_counted_over_all_ranks(compare: Command, tmp_path: Path) -> None:
    other = states()
    other["model"]["weight"][::5, 0] += 1.0
    other["model"]["bias"][2] = float("nan")
    other["optimizer"]["param_groups"][0]["lr"] = 0.5
    other["ema"] = {"decay": 0.9}
    saved_by_ranks(tmp_path / "a", 10, states(), 2)
    saved_by_ranks(tmp_path / "b", 10, other, 4)
    code, out, _ = compare("a", "b")
    assert code == 1
    assert out[2:-1] == [
        "different: 2 of 8 tensors, 1 of 15 plain values, 1 in one run only",
        "tensor dtype and shape differ largest difference",
        "model/weight float32 [6, 4] 2 of 24 1",
        "model/bias float32 [6] 1 of 6 nan",
        "optimizer/param_groups/0/lr: 0.001 and 0.5",
        "only in b: ema/decay, 0.9",
    ]


def test_runs_at_other_steps_are_different_and_the_newest_common_step_is_named(
    compare: Command, tmp_path: Path
) -> None:
    for name, steps in (("a", (10, 20, 30)), ("my run", (10, 20)), ("c", (15,))):
        for step in steps:
            saved_by_ranks(tmp_path / name, step, states())
    assert compare("a", "my run") == (
        1,
        [
            "a: step 30, 2 ranks",
            "my run: step 20, 2 ranks",
            "different: the snapshots are of steps 30 and 20",
            "next: holdfast compare a 'my run' --step 20",
        ],
        "",
    )
    assert compare("a", "my run", "--step", 20)[0] == 0
    assert compare("a", "c")[1][-1] == "no step has a snapshot in both: a has [10, 20, 30], c has [15]"


@pytest.mark.parametrize("file", ["shard-00001-of-00002.safetensors", "extra.json", "manifest.json"])
def test_a_damaged_newest_snapshot_is_passed_over_and_named(compare: Command, tmp_path: Path, file: str) -> None:
    for name in ("a", "b"):
        for step in (10, 20):
            saved_by_ranks(tmp_path / name, step, states())
    damaged = tmp_path / "b" / "checkpoints" / "step-00000020" / file
    damaged.write_bytes(damaged.read_bytes()[:-40] + b"x" * 40)
    code, out, _ = compare("a", "b")
    assert code == 1
    assert out[0] == "a: step 20, 2 ranks"
    assert out[1].startswith("b: passed over step-00000020/: ")
    assert out[2:] == [
        "b: step 10, 2 ranks",
        "different: the snapshots are of steps 20 and 10",
        "next: holdfast compare a b --step 10",
    ]
    assert compare("a", "b", "--step", 10)[0] == 0
    code, out, err = compare("a", "b", "--step", 20)
    assert (code, out[1:], err.count("\n")) == (2, [], 1)


def test_damage_in_a_tensor_that_only_one_run_has_is_found(compare: Command, tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "a", 10, states())
    saved_by_ranks(tmp_path / "b", 10, {**states(), "ema": {"weight": torch.zeros(1 << 20)}})
    shard = tmp_path / "b" / "checkpoints" / "step-00000010" / "shard-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    code, _, err = compare("a", "b", "--step", 10)
    assert (code, err.count("\n")) == (2, 1)
    assert "changed after its commit" in err


def test_a_newest_snapshot_that_is_gone_is_named(compare: Command, tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "a", 10, states())
    with HistoryWriter(tmp_path / "a" / "history", "rank-0") as history:
        history.append(Commit(1, 20, 1))
    code, _, err = compare("a", "a")
    assert code == 0
    assert "the snapshot of step 20 of a was committed but is gone" in err


def values_of_ranks(*values: float) -> dict[str, Any]:
    """Return the part of a snapshot with the plain value of each rank."""
    return {"own": [{"seen": plain_values.encode("seen", {"value": {"samples": value}})} for value in values]}


def test_values_of_single_ranks_are_compared_between_equal_numbers_of_ranks(compare: Command, tmp_path: Path) -> None:
    for name, values in (("a", (1.0, 2.0)), ("b", (1.0, -2.0)), ("c", (1.0, 2.0, 3.0))):
        saved_by_ranks(tmp_path / name, 10, states(), len(values), extra=values_of_ranks(*values))
    code, out, _ = compare("a", "b")
    assert code == 1
    assert out[2:] == ["different: 1 of 16 plain values", "(rank 1)/seen/value/samples: 2.0 and -2.0"]
    code, out, _ = compare("a", "c")
    assert code == 0
    assert out[3].startswith("note: the runs have other ranks: of the values that each rank has for itself")


@pytest.mark.parametrize(
    "extra",
    [
        {"generators": [{"torch": "1"}, {"torch": "2"}]},
        {"positions": [[0, "a"], [0, "b"]]},
        {"stopped": True},
        {"sharded": True},
        {"conditions": {"threads": 2}},
        {"config": {"epochs": 5}},
    ],
)
def test_what_is_not_part_of_the_state_does_not_count(compare: Command, tmp_path: Path, extra: dict[str, Any]) -> None:
    saved_by_ranks(tmp_path / "a", 10, states())
    saved_by_ranks(tmp_path / "b", 10, states(), extra=extra)
    assert compare("a", "b")[0] == 0


def test_settings_that_explain_a_difference_are_named(compare: Command, tmp_path: Path) -> None:
    for name, seed, threads in (("a", 1, 1), ("b", 2, 4)):
        extra = {"config": {"seed": seed, "batch": 8}, "conditions": {"threads": threads}}
        saved_by_ranks(tmp_path / name, 10, states(seed), extra=extra)
    code, out, _ = compare("a", "b")
    assert code == 1
    assert out[-1] == "note: settings that differ, which are not part of the state: seed (1 and 2), threads (1 and 4)"


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def served(folder: Path) -> None:
    """Make the folder of a run on the parameter server."""
    (folder / "history").mkdir(parents=True)
    state = {"w": torch.zeros(4, 2).numpy()}
    RunningCheckpoint.create(DirectoryStore(folder / "checkpoints"), along(state, "w"), state)


PREPARED: dict[str, Callable[[Path], Any]] = {
    "absent": lambda folder: None,
    "empty": lambda folder: folder.mkdir(),
    "file": lambda folder: folder.write_text("mine"),
    "pipe": os.mkfifo,
    "loop": lambda folder: folder.symlink_to(folder),
    "young": lambda folder: (folder / "history").mkdir(parents=True),
    "served": served,
    "damaged config": lambda folder: [folder.mkdir(), (folder / "run.json").write_text("{")],
    "other state": lambda folder: saved_by_ranks(folder, 10, states(), extra={"state": {"tensor": "x"}}),
    "no own values": lambda folder: saved_by_ranks(folder, 10, states(), extra={"own": [1, {"seen": "[]"}]}),
    "own values": lambda folder: saved_by_ranks(
        folder, 10, states(), extra={"own": [{}, {"seen": json.dumps([{"state": 1}, {}, {}, []])}]}
    ),
}
BAD = [
    ("absent", "does not exist"),
    ("empty", "has no verified snapshot"),
    ("file", "is a file, not a directory"),
    ("pipe", "is a file, not a directory"),
    ("loop", ""),
    ("young", "has no snapshot yet: train it first"),
    ("served", "is a run on the parameter server, which saves blocks of its model and no snapshots"),
    ("damaged config", "run.json"),
    ("other state", "does not hold the state of a run"),
    ("no own values", "has damaged plain values"),
    ("own values", "has damaged plain values"),
]


def test_a_run_whose_snapshots_are_all_damaged_is_not_told_to_train(compare: Command, tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved_by_ranks(tmp_path / name, 10, states(), extra=values_of_ranks(1.0, 2.0))
    (tmp_path / "b" / "checkpoints" / "step-00000010" / "manifest.json").write_text("{")
    code, _, err = compare("a", "b")
    assert code == 2
    assert "has only damaged snapshots" in err
    assert err.endswith("restore it from a copy, or name another run.\n")


@pytest.mark.parametrize(("name", "says"), BAD, ids=[name for name, _ in BAD])
def test_a_folder_that_cannot_be_compared_is_refused_in_one_line(
    compare: Command, tmp_path: Path, name: str, says: str
) -> None:
    saved_by_ranks(tmp_path / "good", 10, states(), extra=values_of_ranks(1.0, 2.0))
    PREPARED[name](tmp_path / name)
    for arguments in (("good", name), (name, "good")):
        code, _, err = compare(*arguments)
        assert (code, err.count("\n")) == (2, 1), err
        assert says in err


@pytest.mark.parametrize("file", ["shard-00001-of-00002.safetensors", "extra.json", "manifest.json"])
def test_a_pipe_in_place_of_a_file_of_a_snapshot_is_refused(compare: Command, tmp_path: Path, file: str) -> None:
    saved_by_ranks(tmp_path / "a", 10, states())
    make_pipe(tmp_path / "a" / "checkpoints" / "step-00000010" / file)
    code, _, err = compare("a", "a")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("arguments", [["a"], ["a", "a", "a"], ["a", "a", "--step", "x"], ["a", "a", "--step", "11"]])
def test_wrong_arguments_are_refused_in_one_line(compare: Command, tmp_path: Path, arguments: list[str]) -> None:
    saved_by_ranks(tmp_path / "a", 10, states())
    code, _, err = compare(*arguments)
    assert (code, err.count("\n")) == (2, 1)


def test_words_of_an_untrusted_run_are_printed_safely(compare: Command, tmp_path: Path) -> None:
    hostile = "\x1b[31m[bold]\u202e"
    saved_by_ranks(tmp_path / "a", 10, states())
    saved_by_ranks(
        tmp_path / "b",
        10,
        {**states(), hostile: {hostile: torch.zeros(1), "x": hostile}},
        extra={"config": {hostile: hostile}},
    )
    code, out, _ = compare("a", "b")
    assert code == 1
    assert all(line.isprintable() for line in out)
