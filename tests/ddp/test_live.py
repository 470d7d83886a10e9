"""Workers die, and the others go on in their own processes: the world shrinks and grows back, and the audit agrees."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from final import complaints, different, events
from supervised import HERE, Start, Supervisor

from holdfast.ddp.config import RunConfig
from holdfast.errors import BadInput

LOOP = HERE / "loop.py"
WORKERS = 4
KILLS = [[1], [0], [1, 3]]


def lived_through(start: Start, recovery: str, failures: list[dict[str, Any]], **task: Any) -> Supervisor:
    job = start(
        {"epochs": 20, "patience": 0.1, **task},
        script=LOOP,
        workers=WORKERS,
        recovery=recovery,
        save_every=10,
        failures=failures,
    )
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.said)
    assert not events(job.out, "restart"), job.said
    return job


def fingerprints(out: Path) -> dict[int, set[str]]:
    """What every rank says of the parameters after each step."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for event in events(out, "step"):
        found[event.what.step].add(event.what.state[:16])
    return found


@pytest.mark.parametrize("lost", KILLS, ids=str)
@pytest.mark.parametrize("recovery", ["forward", "skip"])
def test_survivors_go_on_in_their_processes_and_declare_exactly_what_is_lost(
    start: Start, recovery: str, lost: list[int]
) -> None:
    job = lived_through(start, recovery, [{"step": 12, "kind": "kill", "targets": lost}])
    pids = {rank: {event.what.pid for event in events(job.out, "attempt", f"rank-{rank}")} for rank in range(WORKERS)}
    assert all(len(each) == 1 + (rank in lost) for rank, each in pids.items())
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
    declared = {event.what.missing for event in events(job.out, "regroup") if event.what.lost}
    assert all(0 < len(each) <= 16 for each in declared)
    worlds = [event.what.world for event in events(job.out, "step", "rank-2")]
    assert worlds[0] == worlds[-1] == WORKERS
    assert min(worlds) < WORKERS
    assert complaints(job.out) == []


@pytest.mark.parametrize("lost", KILLS, ids=str)
def test_a_replayed_step_is_the_exact_step(start: Start, lost: list[int]) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": WORKERS, "recovery": "replay", "save_every": 10}
    model = "wide" if 0 in lost else "normed"
    reference = start({"model": model, "epochs": 20}, out="reference", **how)
    job = lived_through(start, "replay", [{"step": 12, "kind": "kill", "targets": lost}], model=model)
    assert reference.result()["verdict"] == "completed", reference.said
    assert different(reference.out, job.out) == []
    assert not any(event.what.missing for event in events(job.out, "regroup"))
    assert complaints(job.out) == []


def test_buffers_that_only_a_lost_rank_had_are_restored_from_a_snapshot(start: Start) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": 3, "recovery": "replay", "save_every": 10}
    task = {"model": "normed", "epochs": 5}
    reference = start(task, out="reference", **how)
    job = start(task, failures=[{"step": 12, "kind": "kill", "targets": [0]}], **how)
    assert job.result().get("verdict") == "completed", job.said
    assert len(events(job.out, "restart")) == 1
    assert reference.result()["verdict"] == "completed", reference.said
    assert different(reference.out, job.out) == []
    assert complaints(job.out) == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"workers": 1, "recovery": "forward"}, "one worker has nobody who goes on without it"),
        ({"workers": 2, "recovery": "backward"}, "there is no recovery 'backward'"),
    ],
)
def test_what_cannot_recover_live_is_refused_in_one_line(how: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        RunConfig(script="train.py", **how)
