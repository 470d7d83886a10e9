"""Two models that step one after the other, and an average of weights, when a worker is lost in a step."""

from typing import Any

import pytest

from finished_run import different, events, failed_checks
from supervisor_process import SUPPORT, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "two_models_script.py", "workers": 3, "save_every": 10}


def finished(job: Supervisor) -> Supervisor:
    assert job.result().get("verdict") == "completed", job.stderr
    return job


def test_a_dropped_step_changes_no_model_and_no_average_of_one(start: Start) -> None:
    job = finished(start(args=["first"], recovery="skip", **HOW))
    assert not events(job.out, "restart"), job.stderr
    assert any(event.what.missing for event in events(job.out, "regroup"))
    assert failed_checks(job.out) == []


@pytest.mark.parametrize(
    ("recovery", "why"),
    [
        ("skip", "a step cannot be dropped once an optimizer has stepped in it"),
        ("replay", "a worker that joins cannot repeat the backward passes of this step that are complete"),
    ],
)
def test_a_worker_lost_after_the_first_model_has_stepped_makes_the_run_restart_and_say_so(
    start: Start, start_reference: Start, recovery: str, why: str
) -> None:
    reference = start_reference(args=["nowhere"], **HOW)
    job = finished(start(args=["second"], recovery=recovery, **HOW))
    assert len(events(job.out, "restart")) == 1
    assert why in job.stderr
    assert different(finished(reference).out, job.out) == []
    assert failed_checks(job.out) == []


@pytest.mark.parametrize("recovery", ["replay", "forward"])
def test_a_worker_lost_in_a_backward_through_two_replicated_models_makes_the_run_restart_and_say_so(
    start: Start, start_reference: Start, recovery: str
) -> None:
    how = HOW | {"script": SUPPORT / "two_stages_script.py"}
    reference = start_reference(**how)
    failures = [
        {"step": 13, "kind": "kill", "targets": [1], "point": "backward=0"},
        {"step": 24, "kind": "kill", "targets": [0], "point": "forward"},
    ]
    job = finished(start(recovery=recovery, failures=failures, **how))
    assert len(events(job.out, "restart")) == 2, job.stderr
    assert "holdfast: a backward pass goes through 2 replicated models" in job.stderr
    assert different(finished(reference).out, job.out) == []
    assert failed_checks(job.out) == []
    assert "UserWarning" not in job.stderr  # run.log takes a loss with its graph
