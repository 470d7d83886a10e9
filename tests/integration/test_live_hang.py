"""Workers hang, with the deadlines that a run has by itself, and the others go on; whoever is slow is left alone."""

from typing import Any

import pytest

from finished_run import different, events, failed_checks
from supervisor_process import SUPPORT, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "training_script.py", "workers": 4, "save_every": 12}
STOP = {"step": 12, "kind": "hang", "targets": [2]}
KILL = {"step": 12, "kind": "kill", "targets": [1]}


def completed(start: Start, failures: list[dict[str, Any]], recovery: str = "forward", **task: Any) -> Supervisor:
    """A run that completed in one attempt, and whose audit passes."""
    job = start({"epochs": 5, **task}, recovery=recovery, failures=failures, **HOW)
    assert job.result().get("verdict") == "completed", job.stderr
    assert not events(job.out, "restart"), job.stderr
    assert failed_checks(job.out) == []
    return job


def found(job: Supervisor) -> list[tuple[str, int]]:
    return [(event.what.kind, event.what.rank) for event in job.events("detect")]


def test_a_stopped_worker_is_replaced_like_a_dead_one(start: Start) -> None:
    job = completed(start, [STOP])
    assert found(job)[0] == ("hang", 2), job.stderr
    assert "(limit 1.5 s; change it with --hang-timeout)" in job.stderr


@pytest.mark.parametrize(("rank", "model"), [(0, "normed"), (2, "small")])
def test_a_deadlocked_worker_is_replaced_like_a_dead_one_and_its_stack_kept(
    start: Start, rank: int, model: str
) -> None:
    job = completed(start, [], model=model, trouble="deadlock", troubled=[rank])
    assert found(job)[0] == ("hang", rank), job.stderr
    assert "while others waited for it (deadline" in job.stderr
    assert "in struggle" in (job.out / f"logs/attempt-0001/rank-{rank}.err").read_text()
    assert "Fatal Python error" not in job.stderr


def test_a_worker_that_hangs_before_the_recovery_is_found(start: Start) -> None:
    job = completed(start, [KILL], trouble="deadlock", troubled=[2])
    assert ("hang", 2) in found(job), job.stderr


def test_a_replayed_step_is_the_exact_step_though_a_worker_hung(start: Start) -> None:
    reference = start({"epochs": 5}, out="reference", recovery="replay", **HOW)
    job = completed(start, [STOP], "replay")
    assert reference.result()["verdict"] == "completed", reference.stderr
    assert different(reference.out, job.out) == []


@pytest.mark.parametrize(("trouble", "troubled"), [("compute", [1]), ("sleep", [0, 1, 2, 3])])
def test_a_computing_worker_and_workers_that_all_wait_are_not_killed(
    start: Start, trouble: str, troubled: list[int]
) -> None:
    assert found(completed(start, [], trouble=trouble, troubled=troubled)) == []
