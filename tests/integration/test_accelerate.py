"""A loop on Hugging Face's Accelerate is protected by the way that docs/training.md describes."""

from pathlib import Path
from typing import Any

import pytest

from finished_run import different, events, failed_checks
from supervisor_process import SUPPORT, Start

SCRIPT = SUPPORT / "accelerate_script.py"


def trains(start: Start, **how: Any) -> Path:
    job = start(script=SCRIPT, workers=2, save_every=4, **how)
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert "trained 2" in job.stdout
    return job.out


@pytest.mark.parametrize("recovery", ["restart", "replay"])
def test_a_killed_accelerate_loop_ends_with_the_bits_of_one_that_never_failed(
    start: Start, start_reference: Start, recovery: str
) -> None:
    kills = [{"step": 6, "kind": "kill", "targets": [1]}, {"step": 11, "kind": "kill", "targets": [0]}]
    reference = trains(start_reference)
    out = trains(start, failures=kills, recovery=recovery)
    assert bool(events(out, "restart")) == (recovery == "restart")
    assert different(reference, out) == []
    assert failed_checks(out) == []
