"""A rank of a sharded run is lost under `--recovery partial`: only its shard comes back with older values, as declared."""

from collections.abc import Sequence
from typing import Any

from finished_run import distance, events, failed_checks
from holdfast.audit.verdicts import audit_run
from supervisor_process import SUPPORT, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "fsdp_script.py", "save_every": 5, "workers": 4, "max_restarts": 9}


def kill(step: int, *ranks: int, point: str = "boundary") -> dict[str, Any]:
    return {"step": step, "kind": "kill", "targets": list(ranks), "point": point}


def completed(start: Start, *failures: dict[str, Any], **how: Any) -> Supervisor:
    job = start(how.pop("task", {}), failures=list(failures), **{"recovery": "partial", **HOW, **how})
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job


def restarts(job: Supervisor) -> int:
    return len(events(job.out, "restart", "supervisor"))


def sources(job: Supervisor) -> list[tuple[list[tuple[str, int]], set[str]]]:
    """Return for each replacement the origins of its weights relative to its step, and those of its moments."""
    declared = [event.what for event in sorted(events(job.out, "reassembled"), key=lambda event: event.time)]
    return [
        ([(source["origin"], source["step"] - what.step) for source in what.parameters], origins(what.moments))
        for what in declared
    ]


def origins(found: Sequence[Any]) -> set[str]:
    return {source["origin"] for source in found}


def test_a_lost_shard_has_the_weights_of_the_last_gather_and_the_moments_of_the_newest_snapshot(start: Start) -> None:
    points = ("boundary", "forward=0.5", "backward=0.5", "save")
    task = {"epochs": 3}
    reference = completed(start, out="reference", recovery="restart", task=task)
    kills = [kill(6 + 4 * number, number % 3, point=point) for number, point in enumerate(points)]
    job = completed(start, *kills, task=task)
    assert restarts(job) == 0, job.stderr
    before, now = ("gathered", -1), ("gathered", 0)
    *within_steps, (after_save, _) = sources(job)
    assert within_steps == [([before], {"snapshot"}), ([before, now], {"snapshot"}), ([now], {"snapshot"})]
    assert set(after_save) <= {before, now}  # the others may have begun the next forward
    assert 0 < distance(reference.out, job.out) < 0.1
    (audited,) = [found.because for found in audit_run(job.out) if found.check == "lost_workers_are_declared"]
    assert "its shard from weights gathered in step 5 and the snapshot of step 5" in audited


def test_without_a_snapshot_the_moments_are_those_of_the_surviving_rows(start: Start) -> None:
    job = completed(start, kill(4, 1, point="backward=0.5"), save_every=100)
    assert (restarts(job), sources(job)) == (0, [([("gathered", 0)], {"survivors"})])


def test_of_two_lost_neighbours_one_returns_whole_to_the_snapshot(start: Start) -> None:
    job = completed(start, kill(8, 1, 2))
    assert restarts(job) == 0, job.stderr
    gathered, saved = ([("gathered", -1)], {"snapshot"}), ([("snapshot", -3)], {"snapshot"})
    assert sorted(sources(job)) == [gathered, saved]


def test_reduced_gradients_that_no_rank_has_any_more_restart_the_run_and_it_says_so(start: Start) -> None:
    job = completed(start, kill(8, 1, 2, point="backward=0.7"))
    assert restarts(job) == 1
    assert "with them the reduced gradients of one of them" in job.stderr


def test_a_model_that_is_not_sharded_is_refused(start: Start) -> None:
    result = start(1, script=SUPPORT / "main_once_script.py", recovery="partial", workers=2).result()
    assert result["verdict"] == "refused"
    assert "nothing is sharded here: choose --recovery replay" in result["because"]
