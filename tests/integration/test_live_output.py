"""Rank 0 is lost and another process is rank 0: what it prints is shown, and found again in the logs."""

import re

import pytest

from holdfast.runs.logs import logs
from holdfast.runs.status import foreign_files
from supervisor_process import SUPPORT, Start

STEPS = 42
LOG = "logs/attempt-0001"


def printed_steps(text: str) -> list[int]:
    return sorted(int(step) for step in re.findall(r"^step (\d+) by", text, flags=re.M))


@pytest.mark.parametrize(
    ("recovery", "were_rank_0"),
    [
        ("replay", ["rank-0.out", "worker-3.out", "worker-4.out"]),
        ("forward", ["rank-0.out", "rank-1.out", "worker-3.out", "worker-4.out"]),
        ("skip", ["rank-0.out", "rank-1.out", "worker-3.out", "worker-4.out"]),
    ],
)
def test_the_output_of_the_present_rank_0_is_shown_and_in_the_logs(
    start: Start, recovery: str, were_rank_0: list[str]
) -> None:
    failures = [{"step": step, "kind": "kill", "targets": [0]} for step in (9, 24)]
    job = start(script=SUPPORT / "printing_script.py", workers=3, recovery=recovery, failures=failures)
    assert job.result().get("verdict") == "completed", job.stderr
    # A survivor is rank 0 from the next boundary on: of a step that rank 0 does not end nobody speaks for it.
    silent = [] if recovery == "replay" else [9, 24]
    assert printed_steps(job.stdout) == [step for step in range(STEPS) if step not in silent], job.stderr
    assert [log.path.name for log in logs(job.out, rank=0)[1] if log.stream == "out"] == were_rank_0
    printed = [(job.out / LOG / name).read_text() for name in were_rank_0]
    assert sorted("".join(printed).splitlines()) == sorted(job.stdout.splitlines())
    assert foreign_files(job.out) == []
    lines = job.stderr.splitlines()
    for worker in ("worker-3", "worker-4"):
        place = lines.index(f"holdfast: rank 0 is now {worker}, {LOG}/{worker}.out")
        assert "holdfast: all 3 workers train again" in lines[place:]
    between = f"holdfast: rank 0 is now the worker that began as rank 1, {LOG}/rank-1.out"
    assert lines.count(between) == len(silent), job.stderr
