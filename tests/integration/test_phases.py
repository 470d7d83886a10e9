"""A script with two loops is one run with two phases: killed in each, it ends with the same bits and passes the audit."""

from pathlib import Path
from typing import Any

import pytest

from finished_run import different, events, failed_checks
from supervisor_process import SUPPORT, Start, Supervisor

SCRIPT = SUPPORT / "phases_script.py"
# In each phase, at the last step of the first, and at the first step of the second.
KILLS = [(3, 1), (9, 0), (10, 1), (11, 0), (17, 1)]


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    return job.out


def trains(start: Start, **how: Any) -> Path:
    return completed(start(script=SCRIPT, **{"workers": 2, "save_every": 4, **how}))


@pytest.mark.parametrize("recovery", ["restart", "replay"])
def test_killed_in_every_phase_and_between_them_the_run_ends_with_the_bits_of_one_that_never_failed(
    start: Start, start_reference: Start, recovery: str
) -> None:
    reference = trains(start_reference)
    failures = [{"step": step, "kind": "kill", "targets": [rank]} for step, rank in KILLS]
    out = trains(start, failures=failures, recovery=recovery, max_restarts=9)
    assert bool(events(out, "restart")) == (recovery == "restart")
    assert different(reference, out) == []
    assert failed_checks(reference) == []
    assert failed_checks(out) == []
    assert {event.what.step for event in events(out, "done")} == {22}


@pytest.mark.parametrize("save_every", [1, 10])
def test_code_between_two_phases_has_its_effect_once_wherever_the_run_resumes(
    start: Start, start_reference: Start, save_every: int
) -> None:
    reference = trains(start_reference)
    failures = [{"step": step, "kind": "kill"} for step in (10, 11)]
    out = trains(start, failures=failures, save_every=save_every)
    assert different(reference, out) == []
    assert failed_checks(out) == []


def test_a_worker_lost_inside_a_later_phase_is_replaced_without_a_restart(start: Start) -> None:
    failures = [{"step": 15, "kind": "kill", "targets": [1], "point": "backward=0.5"}]
    reference = trains(start, out="reference", recovery="replay", workers=3)
    out = trains(start, failures=failures, recovery="replay", workers=3, spares=1)
    assert not events(out, "restart")
    assert different(reference, out) == []
    assert failed_checks(out) == []


def test_with_another_number_of_workers_both_phases_train_the_same_samples(start: Start) -> None:
    failures = [{"step": 6, "kind": "kill"}, {"step": 14, "kind": "kill"}]
    out = trains(start, failures=failures, workers_after=[3, 1])
    assert failed_checks(out) == []
