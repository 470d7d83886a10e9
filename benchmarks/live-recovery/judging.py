"""Checks of a run that has ended: the bits of its state and its audit."""

import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from job import COMMAND, Job
from whole_states import whole_states

AUDITED_WITHIN = 300.0
THREADS, FILES = 30, 120  # a new worker has some 15 threads and 80 open files
SHARED = 16  # digits of a fingerprint that cover the state shared by all ranks


@dataclass(frozen=True)
class Reference:
    """The result of a run without failures."""

    trained: dict[tuple[int, int], str]  # by rank and step
    last: tuple[int, str]
    whole: dict[int, str]  # by step, if the script notes them

    @classmethod
    def of(cls, job: Job) -> "Reference":
        trained = {(step["rank"], step["step"]): step["state"] for step in of_kind(job, "step")}
        return cls(trained, last_commit(job), {step: state for (_, step), state in whole_states(job.notes).items()})


@dataclass(frozen=True)
class Use:
    """The resources that one process uses; `memory` in MiB."""

    threads: int
    files: int
    memory: float

    @classmethod
    def of(cls, pid: int) -> "Use":
        folder = Path(f"/proc/{pid}")
        resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(*(len(list((folder / name).iterdir())) for name in ("task", "fd")), resident / 2**20)


def of_kind(job: Job, kind: str) -> list[dict]:
    """Return the events of `kind` in the histories of all ranks."""
    return [event for tail in job.look() for event in tail.events if event["event"] == kind]


def last_commit(job: Job) -> tuple[int, str]:
    """Return the newest committed step, and the digest of its state."""
    return max(((event["step"], event.get("state") or "") for event in of_kind(job, "commit")), default=(-1, ""))


def wrong_bits(job: Job, reference: Reference, *, is_exact: bool) -> Iterator[str]:
    """Yield differences between ranks after a step; if the run `is_exact`, also from the failure-free run."""
    states: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for step in of_kind(job, "step"):
        states[step["attempt"], step["step"]].add(step["state"][:SHARED])
    if different := sorted(where for where, found in states.items() if len(found) > 1):
        yield f"ranks differ after {len(different)} steps, first (attempt, step) {different[0]}"
    if last_commit(job)[0] != reference.last[0]:
        yield f"the last commit is of step {last_commit(job)[0]}, not {reference.last[0]}"
    if is_exact:
        yield from _not_exact(job, reference)


def _not_exact(job: Job, reference: Reference) -> Iterator[str]:
    if last_commit(job) != reference.last:
        yield "the final state is not that of the failure-free run"
    for step in of_kind(job, "step"):
        if step["state"] != reference.trained[step["rank"], step["step"]]:
            yield f"attempt {step['attempt']}, rank {step['rank']}, step {step['step']} is not the failure-free run's"
            return


def fallbacks(job: Job) -> list[str]:
    """Return the reason that the command gave for each restart under a live recovery, if it gave one."""
    attempts = re.split(r"attempt \d+: \d+ workers started", job.log.read_text(errors="replace"))
    reasons = (re.search(r"cannot continue: ([^\n|]*): the run restarts from its newest", text) for text in attempts)
    return [reason[1].strip() for reason in reasons if reason]


def leaks(job: Job, settled: float) -> Iterator[str]:
    """Wait `settled` seconds, and yield the workers that have far more threads or open files than a new worker."""
    time.sleep(settled)
    for rank, pid in job.pids().items():
        with suppress(OSError):
            use = Use.of(pid)
            if use.threads > THREADS or use.files > FILES:
                yield f"rank {rank} has {use.threads} threads and {use.files} open files"


def wrong_audit(job: Job) -> Iterator[str]:
    """Yield the failed checks of `holdfast audit`, if it does not pass the run."""
    done = subprocess.run(
        [*COMMAND, "audit", str(job.out)], capture_output=True, text=True, timeout=AUDITED_WITHIN, check=False
    )
    if done.returncode:
        (job.folder / "audit.txt").write_text(done.stdout + done.stderr)
        yield f"the audit ended with {done.returncode}: {_failures(done.stdout + done.stderr)}"


def _failures(text: str) -> str:
    return "; ".join(" ".join(line.split()) for line in text.splitlines() if "fail" in line or "unknown" in line)[:500]
