"""Trainers that own their loop, with one line changed: killed at random, they end with the bits of a run that never failed."""

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finished_run import different, events, failed_checks, last
from repository import EXAMPLES
from supervisor_process import Start, Supervisor, driving

ARGUMENTS = {
    "trainer": ["--steps", "5", "--samples", "96"],
    "lightning_trainer": ["--epochs", "3", "--points", "200", "--devices", "2"],
    "fabric": ["--epochs", "3", "--points", "200", "--devices", "2", "--batch", "64"],
}
STEPS = {"trainer": 5, "lightning_trainer": 9, "fabric": 9}
NEW_LINES = {"trainer": 2, "lightning_trainer": 2, "fabric": 4}


@pytest.fixture(scope="module")
def driver() -> Iterator[subprocess.Popen[str]]:
    """One process imports the trainers for all runs."""
    with driving("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "lightning") as process:
        yield process


def lines(name: str) -> list[str]:
    return [stripped for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if (stripped := line.strip())]


@pytest.mark.parametrize("name", NEW_LINES)
def test_few_lines_of_the_plain_script_are_changed(name: str) -> None:
    ours, plain = lines(name), lines(f"{name}_plain")
    new = [line for line in ours if line not in plain]
    gone = [line for line in plain if line not in ours]
    assert len(new) == NEW_LINES[name], new
    assert len(gone) <= NEW_LINES[name], gone
    assert [line for line in ours if line not in new] == [line for line in plain if line not in gone]


def test_killed_twice_at_random_they_end_with_the_bits_of_a_run_that_never_failed(start: Start, tmp_path: Path) -> None:
    seed = time.time_ns() % 2**32
    print(f"kills of seed {seed}")  # noqa: T201 - shown when the test fails
    draw = random.Random(seed)

    def begin(name: str, out: str, **config: Any) -> Supervisor:
        args = ARGUMENTS[name] + (["--folder", str(tmp_path / "files")] if name == "trainer" else [])
        return start(out=f"{name}-{out}", script=EXAMPLES / f"{name}.py", args=args, workers=2, save_every=2, **config)

    def kills(name: str) -> list[dict[str, Any]]:
        return [
            {"step": step, "kind": "kill", "targets": [draw.randrange(2)]}
            for step in sorted(draw.sample(range(STEPS[name]), 2))
        ]

    jobs = {name: (begin(name, "reference"), begin(name, "killed", failures=kills(name))) for name in ARGUMENTS}
    for name, (reference, killed) in jobs.items():
        for job in (reference, killed):
            assert job.result().get("verdict") == "completed", (name, job.stderr)
        assert len(events(killed.out, "restart", "supervisor")) == 2, name
        assert last(killed.out).step == STEPS[name]
        assert different(reference.out, killed.out) == [], name
        assert failed_checks(killed.out) == [], name
