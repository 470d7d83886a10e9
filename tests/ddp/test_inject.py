"""Failures at every point of a step, in real runs: they strike where they were told to, and once."""

from pathlib import Path
from typing import Any

from final import complaints, different, events
from supervised import Start, Supervisor
from test_live import LOOP, WORKERS, fingerprints, lived_through

from holdfast.cost.spent import spent
from holdfast.history import read_history

INSIDE = [
    {"step": 8, "point": "forward", "targets": [1]},
    {"step": 22, "point": "backward=0.5", "targets": [1, 3]},
    {"step": 37, "point": "backward=1", "targets": [0]},
    {"step": 52, "point": "optimizer", "targets": [2]},
    {"step": 66, "point": "save", "targets": [0]},
    {"step": 81, "point": "backward=0", "targets": [3]},
    {"step": 96, "point": "save", "targets": [1]},
]
LATE = [{"step": 100, "point": "recovery", "targets": [2]}, {"step": 104, "point": "boundary", "targets": [0]}]
SEVERAL: dict[str, Any] = {"model": "wide", "bucket": 0.5, "epochs": 20}


def killed(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"kind": "kill", **failure} for failure in failures]


def struck(out: Path) -> set[tuple[int, str, int]]:
    return {(event.what.step, event.what.point, event.what.rank) for event in events(out, "failure")}


def planned(failures: list[dict[str, Any]]) -> set[tuple[int, str, int]]:
    return {(each["step"], each["point"], rank) for each in failures for rank in each["targets"]}


def is_accounted_for(job: Supervisor, failures: list[dict[str, Any]]) -> None:
    """Every failure struck as it was planned; the audit passes, and the cost knows all of them."""
    assert struck(job.out) == planned(failures)
    assert complaints(job.out) == []
    known = {(cost.rank, cost.kind) for cost in spent(read_history(job.out).events).failures}
    assert known == {(rank, "kill") for _, _, rank in planned(failures)}


def test_every_point_strikes_once_and_a_restart_is_exact_as_is_a_replay(start: Start) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": WORKERS, "save_every": 10}
    reference = start(SEVERAL, out="reference", **how)
    assert reference.result()["verdict"] == "completed", reference.said
    job = start(SEVERAL, out="restarted", failures=killed(INSIDE), **how)
    assert job.result()["verdict"] == "completed", job.said
    assert len(events(job.out, "restart")) == len(INSIDE)
    is_accounted_for(job, INSIDE)
    assert different(reference.out, job.out) == []
    within = [{"step": 30, "point": "backward=0.5", "targets": [0, 2]}]
    job = lived_through(start, "replay", killed(within), **SEVERAL)
    is_accounted_for(job, within)
    assert different(reference.out, job.out) == []


def test_survivors_go_forward_from_every_point(start: Start) -> None:
    job = lived_through(start, "forward", killed([*INSIDE, *LATE]), **{**SEVERAL, "patience": 0.3})
    is_accounted_for(job, [*INSIDE, *LATE])
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
