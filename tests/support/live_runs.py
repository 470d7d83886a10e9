"""Runs of four workers that lose some of them and recover live."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from finished_run import events
from supervisor_process import SUPPORT, Start, Supervisor

LOOP = SUPPORT / "training_script.py"
WORKERS = 4
EPOCHS = 5  # of 6 steps
PATIENCE = 0.6  # seconds per step while workers are missing, so that replacements arrive before the last step


def run_with_live_recovery(start: Start, recovery: str, failures: list[dict[str, Any]], **task: Any) -> Supervisor:
    job = start(
        {"epochs": EPOCHS, "patience": PATIENCE, **task},
        script=LOOP,
        workers=WORKERS,
        recovery=recovery,
        save_every=10,
        failures=failures,
    )
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert not events(job.out, "restart"), job.stderr
    return job


def fingerprints(out: Path) -> dict[int, set[str]]:
    """Return the parameter fingerprints that the ranks recorded, by step."""
    found: defaultdict[int, set[str]] = defaultdict(set)
    for event in events(out, "step"):
        found[event.what.step].add(event.what.state[:16])
    return found
