"""A rank of a sharded run is lost, and the others continue in the same step: no restart, no step undone, the same bits."""

from typing import Any

import pytest

from finished_run import different, events, failed_checks
from holdfast.errors import BadInput
from holdfast.supervise.scale_request import scale
from supervisor_process import SUPPORT, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "fsdp_script.py", "save_every": 5, "workers": 4, "max_restarts": 9}
POINTS = ("boundary", "forward=0.5", "backward=0", "backward=0.5", "backward=1", "optimizer", "save")


def kill(step: int, *ranks: int, point: str = "boundary") -> dict[str, Any]:
    return {"step": step, "kind": "kill", "targets": list(ranks), "point": point}


def completed(job: Supervisor) -> Supervisor:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job


def assert_same_without_restart(
    start: Start, start_reference: Start, task: dict[str, Any], failures: list[dict[str, Any]]
) -> Supervisor:
    reference = start_reference(task, **HOW)
    job = completed(start(task, recovery="replay", failures=failures, **HOW))
    assert events(job.out, "restart", "supervisor") == [], job.stderr
    assert different(completed(reference).out, job.out) == []
    return job


def test_killed_at_every_point_of_a_step_the_run_continues_without_a_restart(
    start: Start, start_reference: Start
) -> None:
    failures = [kill(2 + 2 * number, number % 4, point=point) for number, point in enumerate(POINTS)]
    job = assert_same_without_restart(start, start_reference, {}, failures)
    regroups = events(job.out, "regroup", "rank-1")
    assert [list(event.what.lost) for event in regroups if event.what.lost] == [[n % 4] for n in range(len(POINTS))]


def test_averages_values_of_a_rank_and_statistics_of_batch_norm_come_back_as_the_lost_worker_had_them(
    start: Start,
    start_reference: Start,
) -> None:
    task = {"averaged": True, "batch_norm": True, "batch": 16}
    failures = [kill(3, 1), kill(6, 3, point="backward=0.5"), kill(9, 0, point="optimizer")]
    assert_same_without_restart(start, start_reference, task, failures)


@pytest.mark.parametrize("task", [{"micro_batches": 2}, {"batch": 10}], ids=["micro-batches", "uneven shares"])
def test_gradients_are_accumulated_and_weighted_as_in_a_run_without_a_failure(
    start: Start, start_reference: Start, task: dict[str, Any]
) -> None:
    assert_same_without_restart(
        start, start_reference, task, [kill(4, 2, point="forward=0.5"), kill(9, 1, point="backward=0.5")]
    )


def test_two_ranks_that_are_no_neighbours_are_replaced_together(start: Start, start_reference: Start) -> None:
    job = assert_same_without_restart(start, start_reference, {}, [kill(8, 0, 2, point="backward=0.5"), kill(12, 1, 3)])
    assert {tuple(event.what.lost) for event in events(job.out, "regroup")} >= {(0, 2), (1, 3)}


def test_a_survivor_that_is_lost_while_the_others_recover_is_replaced_too(start: Start, start_reference: Start) -> None:
    assert_same_without_restart(
        start, start_reference, {}, [kill(9, 1, point="backward=0.5"), kill(9, 3, point="recovery")]
    )


def test_neighbours_that_are_lost_together_restart_the_run_and_it_says_so(start: Start, start_reference: Start) -> None:
    reference = start_reference({}, **HOW)
    job = completed(start({}, recovery="replay", failures=[kill(8, 1, 2, point="backward=0.5")], **HOW))
    assert len(events(job.out, "restart", "supervisor")) == 1
    assert different(completed(reference).out, job.out) == []
    assert "with them all copies of a shard" in job.stderr


def test_a_suspended_worker_is_replaced(start: Start, start_reference: Start) -> None:
    failures = [{"step": 13, "kind": "hang", "targets": [2], "point": "backward=0.5"}]
    assert_same_without_restart(start, start_reference, {}, failures)


def test_a_worker_that_waits_in_reserve_takes_the_rank_of_the_lost_one(start: Start) -> None:
    job = completed(start({}, recovery="replay", spares=1, failures=[kill(13, 2, point="backward=0.5")], **HOW))
    assert events(job.out, "restart", "supervisor") == []
    assert [event.what.rank for event in events(job.out, "attempt", "rank-2")] == [2, 2]


def test_workers_of_a_sharded_run_cannot_be_put_to_sleep(start: Start) -> None:
    job = completed(start({"epochs": 1}, recovery="replay", **HOW))
    with pytest.raises(BadInput, match="is sharded, and each worker holds a part of it"):
        scale(job.out, 3)


@pytest.mark.parametrize("recovery", ["forward", "skip"])
def test_recoveries_that_leave_out_samples_are_refused(start: Start, recovery: str) -> None:
    result = start({}, recovery=recovery, **HOW).result()
    assert result["verdict"] == "refused"
    assert f"supports --recovery restart, replay and partial, not {recovery}" in result["because"]


HYBRID: dict[str, Any] = {"replicas": 2}


def test_with_hybrid_sharding_a_rank_killed_at_any_point_gets_its_shard_from_the_other_replica(
    start: Start, start_reference: Start
) -> None:
    failures = [kill(2 + 2 * number, number % 4, point=point) for number, point in enumerate(POINTS)]
    assert_same_without_restart(start, start_reference, HYBRID, failures)


def test_with_hybrid_sharding_a_whole_replica_comes_back(start: Start, start_reference: Start) -> None:
    failures = [kill(4, 2, 3, point="backward=0.5"), kill(8, 0, 1, point="forward=0.5"), kill(12, 0, 3)]
    assert_same_without_restart(start, start_reference, {**HYBRID, "averaged": True}, failures)


def test_all_replicas_of_a_shard_lost_together_restart_the_run_and_it_says_so(
    start: Start, start_reference: Start
) -> None:
    reference = start_reference(HYBRID, **HOW)
    job = completed(start(HYBRID, recovery="replay", failures=[kill(8, 1, 3, point="backward=0.5")], **HOW))
    assert len(events(job.out, "restart", "supervisor")) == 1
    assert different(completed(reference).out, job.out) == []
    assert "ranks 1 and 3 are lost, and with them all copies of a shard" in job.stderr
