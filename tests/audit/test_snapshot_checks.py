"""The audit of a run checks that its snapshots hold every row of every tensor in exactly one file."""

import shutil
from pathlib import Path

import pytest
import torch

from fake_histories import write_history
from fake_two_ranks import TwoRankRun
from holdfast.audit.snapshot_checks import snapshots_hold_every_row_once as check
from holdfast.audit.verdicts import audit_run, worst
from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.sharding import Box, ShardedTensor, Sharding, within
from holdfast.checkpoint.store import DirectoryStore
from snapshots import saved_by

TENSORS = {"weight": torch.arange(14.0).reshape(7, 2), "step": torch.tensor(3)}
ROWS = Sharding((3,), ((0, 0),))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "checkpoints")


def saved_as(store: DirectoryStore, step: int, boxes: list[Box]) -> None:
    """Save a tensor of which each rank writes one of `boxes`, and announce equal parts of the rows."""
    weight = TENSORS["weight"]
    whole = ((0, 7), (0, 2))
    parts = [payload.encode({"weight": weight[within(box, whole)]}, digests=True) for box in boxes]
    shards = [snapshot.write_shard(store, step, part, rank=rank, count=3) for rank, part in enumerate(parts)]
    layout = {"weight": ShardedTensor("F32", (7, 2), ROWS)}
    snapshot.commit(store, snapshot.draft(step, {}, layout, world=3), shards)


def test_whole_snapshots_pass(store: DirectoryStore) -> None:
    for step in (10, 20):
        saved_by(store, step, 3, TENSORS)
    assert check(str(store.path)) == ("pass", "2 snapshots, every row of every tensor in one file")


def test_without_snapshots_there_is_nothing_to_check(store: DirectoryStore) -> None:
    assert check(str(store.path)) is None
    store.put("notes.txt", [b"mine"])
    assert check(str(store.path)) is None


@pytest.mark.parametrize("name", ["shard-00001-of-00003.safetensors", "extra.json"])
def test_a_missing_file_fails(store: DirectoryStore, name: str) -> None:
    saved_by(store, 10, 3, TENSORS)
    store.remove(f"step-00000010/{name}")
    verdict, because = check(str(store.path)) or ("", "")
    assert verdict == "fail"
    assert because == f"the snapshot of step 10 does not hold every row once: step-00000010/{name} is missing."


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 3), (0, 2)), ((3, 5), (0, 2)), ((6, 7), (0, 2))],
        [((0, 3), (0, 2)), ((2, 6), (0, 2)), ((6, 7), (0, 2))],
    ],
    ids=["incomplete", "overlapping"],
)
def test_rows_that_are_missing_or_saved_twice_fail_in_one_line(store: DirectoryStore, boxes: list[Box]) -> None:
    saved_as(store, 10, boxes)
    verdict, because = check(str(store.path)) or ("", "")
    assert verdict == "fail"
    assert "shard-00001-of-00003.safetensors does not hold the part of 'weight' that rank 1 was to save" in because
    assert "\n" not in because


def test_a_snapshot_that_was_damaged_later_is_named_and_does_not_fail_because_a_run_passes_it_over(
    store: DirectoryStore,
) -> None:
    for step in (10, 20):
        saved_by(store, step, 3, TENSORS)
    path = store.path / "step-00000020" / "shard-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    says = "damaged: step 20 (holdfast verify says where)"
    assert check(str(store.path)) == ("pass", f"1 snapshot, every row of every tensor in one file; {says}")
    shutil.rmtree(store.path / "step-00000010")
    assert check(str(store.path)) == ("unknown", f"no snapshot can be read; {says}")


def test_the_audit_of_a_run_includes_its_snapshots(tmp_path: Path, store: DirectoryStore) -> None:
    run = TwoRankRun().trains(1, None, 17).stops(1, 17)
    write_history(tmp_path / "history", {who: [e for e in run.events if e.who == who] for who in ("rank-0", "rank-1")})
    before = audit_run(tmp_path)
    saved_by(store, 10, 3, TENSORS)
    findings = audit_run(tmp_path)
    assert findings[:-1] == before
    assert findings[-1].verdict == "pass"
    store.remove("step-00000010/shard-00000-of-00003.safetensors")
    assert worst(audit_run(tmp_path)) == "fail"
