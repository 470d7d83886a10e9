"""Rank 0 is lost and another process is rank 0: what it prints is shown, and found again in the logs."""

import re

import pytest

from holdfast.runs.logs import find_logs
from holdfast.runs.status import foreign_files
from supervisor_process import SUPPORT, Start

STEPS = 42
LOG = "logs/attempt-0001"


def printed_steps(text: str) -> list[int]:
    return sorted(int(step) for step in re.findall(r"^step (\d+) by", text, flags=re.M))


WERE_RANK_0 = ["rank-0.out", "worker-3.out", "worker-4.out"]


@pytest.mark.parametrize("recovery", ["replay", "forward", "skip"])
def test_the_output_of_the_present_rank_0_is_shown_and_in_the_logs(start: Start, recovery: str) -> None:
    failures = [{"step": step, "kind": "kill", "targets": [0]} for step in (9, 24)]
    job = start(script=SUPPORT / "printing_script.py", workers=3, recovery=recovery, failures=failures)
    assert job.result().get("verdict") == "completed", job.stderr
    printed = printed_steps(job.stdout)
    assert len(printed) == len({*printed})
    missing = {*range(STEPS)} - {*printed}
    if recovery == "replay":
        assert missing == set(), job.stderr
    else:  # no worker is rank 0 until the replacement has joined
        assert {9, 24} <= missing <= {*range(9, 24), *range(24, STEPS - 1)}, job.stderr
    assert [log.path.name for log in find_logs(job.out, rank=0) if log.stream == "out"] == WERE_RANK_0
    lines = "".join((job.out / LOG / name).read_text() for name in WERE_RANK_0)
    assert sorted(lines.splitlines()) == sorted(job.stdout.splitlines())
    assert foreign_files(job.out) == []
    said = job.stderr.splitlines()
    for worker in ("worker-3", "worker-4"):
        place = said.index(f"holdfast: rank 0 is now {worker}, {LOG}/{worker}.out")
        assert "holdfast: all 3 workers train again" in said[place:]
    without = "holdfast: rank 0 is lost: until its replacement joins, run.is_main is true on no worker"
    assert said.count(without) == (0 if recovery == "replay" else 2), job.stderr
