"""A worker that dies in the last step of a run, after which no boundary comes: the others end with it all the same."""

from typing import Any

import pytest

from finished_run import different, events, failed_checks
from supervisor_process import SUPPORT, Start

HOW: dict[str, Any] = {"script": SUPPORT / "training_script.py", "workers": 2, "save_every": 10}
STEPS = 12  # of two epochs


@pytest.mark.parametrize("leaves_after", [0, 12, 9], ids=["to the end", "left at its end", "left before"])
@pytest.mark.parametrize("recovery", ["replay", "forward", "skip"])
def test_a_worker_lost_in_the_last_step_does_not_block_the_others(
    start: Start, recovery: str, leaves_after: int
) -> None:
    task = {"epochs": 2, "leaves_after": leaves_after}
    last = (leaves_after or STEPS) - 1
    failure = {"step": last, "kind": "kill", "targets": [1], "point": "backward=0.5"}
    job = start(task, recovery=recovery, failures=[failure], **HOW)
    assert job.result().get("verdict") == "completed", job.stderr
    assert not events(job.out, "restart"), job.stderr
    assert max(event.what.step for event in events(job.out, "commit")) == last + 1
    assert failed_checks(job.out) == []
    if recovery == "replay":
        reference = start(task, out="reference", **HOW)
        assert reference.result().get("verdict") == "completed", reference.stderr
        assert different(reference.out, job.out) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_lost_in_the_last_save_makes_the_run_restart_from_its_newest_snapshot(start: Start, lost: int) -> None:
    failure = {"step": 9, "kind": "kill", "targets": [lost], "point": "save"}
    job = start({"epochs": 2, "leaves_after": 9}, recovery="replay", failures=[failure], **HOW)
    assert job.result().get("verdict") == "completed", job.stderr
    assert max(event.what.step for event in events(job.out, "commit")) == 9
    assert failed_checks(job.out) == []
