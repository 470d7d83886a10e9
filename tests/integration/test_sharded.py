"""Models sharded with FSDP2 and HSDP end with the bits of a run in which nothing failed, whatever was killed and when."""

from pathlib import Path
from typing import Any

import pytest

from finished_run import different, distance, events, failed_checks
from holdfast.compare.saved_run import open_run
from holdfast.compare.state_differences import StateComparison, compare
from supervisor_process import SUPPORT, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "fsdp_script.py", "save_every": 5, "workers": 4}
POINTS = ("boundary", "forward=0.5", "backward=0.5", "optimizer", "save")  # test_sharded_live has more of them
REPLICAS = {"replicas": 2}


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job.out


def compared(one: Path, other: Path) -> StateComparison:
    """Compare the newest states of two runs, with the values that each rank has for itself."""
    return compare(*(open_run(str(out), None).state(of_all_ranks=True) for out in (one, other)))


@pytest.mark.parametrize(
    ("task", "points"),
    [({}, POINTS), (REPLICAS, ("forward=0.5", "backward=0.5", "save"))],
    ids=["fsdp", "hsdp"],
)
def test_killed_at_every_point_of_a_step_it_ends_with_the_bits_of_a_run_that_never_failed(
    start: Start, start_reference: Start, task: dict[str, int], points: tuple[str, ...]
) -> None:
    failures = [
        {"step": 4 + 2 * number, "kind": "kill", "targets": [number % 4], "point": point}
        for number, point in enumerate(points)
    ]
    reference = start_reference(task, **HOW)
    job = start(task, failures=failures, max_restarts=9, **HOW)
    out = completed(job)
    assert len(events(out, "restart", "supervisor")) == len(failures)
    assert different(completed(reference), out) == []
    assert compared(reference.out, out).is_equal


def test_a_strike_within_a_step_counts_only_collectives_of_models_that_are_trained(start: Start) -> None:
    failures = [
        {"step": 6, "kind": "kill", "targets": [1], "point": "backward=1"},  # never comes if averages count, too
        {"step": 9, "kind": "kill", "targets": [2], "point": "forward=1"},
    ]
    out = completed(start({"averaged": True}, failures=failures, **HOW))
    assert len(events(out, "restart", "supervisor")) == 2


def test_every_rank_saves_its_own_part(start: Start) -> None:
    out = completed(start({"epochs": 1}, **HOW))
    files = sorted((out / "checkpoints" / "step-00000008").glob("shard-*-of-00004.safetensors"))
    assert [file.name[6:11] for file in files] == ["00000", "00001", "00002", "00003"]


def test_with_another_number_of_ranks_it_agrees_to_rounding_and_the_audit_passes(
    start: Start, start_reference: Start
) -> None:
    failures = [{"step": step, "kind": "kill", "targets": [1]} for step in (4, 8, 12)]
    task = {"batch": 10, "dropout": 0.0}  # uneven, and even on two ranks
    reference = start_reference(task, **HOW)
    job = start(task, failures=failures, workers_after=[2, 3, 4], **HOW)
    out = completed(job)
    assert [event.what.world for event in events(out, "attempt", "rank-0")] == [4, 2, 3, 4]
    assert 0 < (most := distance(completed(reference), out)) < 1e-4
    changed = compared(reference.out, out).changed_tensors
    found = [tensor.bits.largest for tensor in changed if tensor.bits and tensor.one.name.startswith("model/")]
    assert max(found) == pytest.approx(most)


def test_equal_weights_that_other_numbers_of_ranks_have_saved_are_equal(start: Start) -> None:
    how = {"script": HOW["script"], "keep_last": 9}
    jobs = [start({"epochs": 1}, workers=workers, out=f"of-{workers}", **how) for workers in (2, 3)]
    one, other = (open_run(str(completed(job)), 0) for job in jobs)
    assert (one.world_size, other.world_size) == (2, 3)
    assert compare(one.state(of_all_ranks=False), other.state(of_all_ranks=False)).is_equal


def test_a_snapshot_with_one_damaged_shard_is_passed_over_by_all_ranks(start: Start, start_reference: Start) -> None:
    failures = [{"step": 10, "kind": "bit-flip", "targets": [2]}, {"step": 12, "kind": "kill", "targets": [3]}]
    reference = start_reference({}, **HOW)
    out = completed(start({}, failures=failures, **HOW))
    assert {event.what.restored for event in events(out, "recover")} == {None, 5}
    assert different(completed(reference), out) == []


def test_if_all_snapshots_are_damaged_the_run_starts_again_with_its_first_weights(
    start: Start, start_reference: Start
) -> None:
    failures = [{"step": step, "kind": "bit-flip", "targets": [1]} for step in (0, 5)]
    failures += [{"step": 7, "kind": "kill", "targets": [3]}]
    reference = start_reference({}, **HOW)
    out = completed(start({}, failures=failures, max_restarts=1, **HOW))
    # The first restart finds no weights. The second one, which is not counted, makes them.
    assert [event.what.left for event in events(out, "restart", "supervisor")] == [0, 0]
    assert different(completed(reference), out) == []


def test_each_rank_gets_its_own_statistics_of_batch_norm_back(start: Start, start_reference: Start) -> None:
    task = {"batch_norm": True, "batch": 16}
    failures = [{"step": 7, "kind": "kill", "targets": [1]}]
    reference = start_reference(task, **HOW)
    out = completed(start(task, failures=failures, **HOW))
    assert different(completed(reference), out) == []


def test_an_evaluation_in_which_one_rank_has_a_batch_more_is_refused_and_does_not_hang(start: Start) -> None:
    how: dict[str, Any] = {"script": SUPPORT / "sharded_evaluation_script.py", "workers": 2, "max_restarts": 0}
    job = start({"samples": 5, "batch": 1}, out="uneven", **how)
    result = job.result()
    assert result["verdict"] != "completed"
    assert "this rank has 3 of 5 samples and others have 2" in result["because"], job.stderr
    completed(start({"samples": 5, "batch": 3}, out="even", **how))
