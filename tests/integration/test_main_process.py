"""What a script has read about its rank stays true for its process, also after rank 0 was lost."""

import re
from typing import Any

import pytest

from finished_run import different, events, failed_checks, last
from supervisor_process import SUPPORT, Start, Supervisor

STEPS, EVERY = 32, 5
HOW: dict[str, Any] = {
    "script": SUPPORT / "main_once_script.py",
    "args": [str(STEPS // 8)],
    "workers": 3,
    "save_every": 10,
}
KILLS = [
    {"step": 12, "kind": "kill", "targets": [0], "point": "backward=0"},
    {"step": 18, "kind": "kill", "targets": [1], "point": "forward"},
    {"step": 22, "kind": "kill", "targets": [0], "point": "forward"},
]


def evaluated_steps(job: Supervisor) -> set[int]:
    return {int(step) for step in re.findall(r"^evaluated (\d+)$", job.stdout, flags=re.M)}


@pytest.mark.parametrize(("recovery", "spares"), [("replay", 0), ("replay", 1), ("restart", 0)])
def test_a_script_that_asked_once_for_the_main_process_evaluates_every_time_with_the_same_bits(
    start: Start, start_reference: Start, recovery: str, spares: int
) -> None:
    reference = start_reference(**HOW)
    job = start(recovery=recovery, spares=spares, failures=KILLS, **HOW)
    for run in (reference, job):
        assert run.result().get("verdict") == "completed", run.stderr
        assert evaluated_steps(run) == set(range(0, STEPS, EVERY))
    assert different(reference.out, job.out) == []
    assert last(reference.out).extra["own"] == last(job.out).extra["own"]
    assert failed_checks(job.out) == []
    assert bool(events(job.out, "restart")) == (recovery == "restart"), job.stderr


@pytest.mark.parametrize("spares", [0, 1])
def test_evaluations_continue_once_rank_0_is_replaced(start: Start, spares: int) -> None:
    job = start(recovery="forward", spares=spares, failures=KILLS[:1], **HOW)
    assert job.result().get("verdict") == "completed", job.stderr
    evaluated = evaluated_steps(job)
    assert evaluated >= {0, 5, 10, 30}, job.stderr
    assert "holdfast: rank 0 is lost: until its replacement joins, run.is_main is true on no worker" in job.stderr
    assert not events(job.out, "restart"), job.stderr
    assert failed_checks(job.out) == []
