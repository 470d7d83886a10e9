"""The same training under several recoveries, each with the same two kills: what happened, was it right, what it cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.verdicts import Finding, audit_run
from holdfast.cost.breakdown import Spent, spent
from holdfast.faults.schedule import at
from holdfast.history.log import read_history
from holdfast.runs.config import RunConfig
from holdfast.supervise.preload import warm
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import RunVerdict

SCRIPT = Path(__file__).with_name("train.py")
WORKERS, KILLED_AT, KILLED_RANK = 4, (50, 110), 2
POINT = "backward=0.5"  # once half of the gradients are summed
RUNS = {  # by name: how it recovers, and how its saves reach the disk
    "blocking": ("restart", "blocking"),
    "restart": ("restart", "overlapped"),
    "replay": ("replay", "overlapped"),
    "forward": ("forward", "overlapped"),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One run of the demo: how it ended, what the audit found, and what it cost."""

    name: str
    folder: Path
    verdict: RunVerdict
    findings: tuple[Finding, ...]
    spent: Spent


def folders(out: Path) -> dict[str, Path]:
    """Where each run of a demo lies."""
    return {name: out / name for name in RUNS}


def run(out: Path) -> Iterator[Shown]:
    """Train once with each recovery; every run has a folder of its own below `out`."""
    warm()  # now, or the first run would pay for the others
    for name, folder in folders(out).items():
        recovery, writer = RUNS[name]
        config = RunConfig(
            script=str(SCRIPT),
            workers=WORKERS,
            recovery=recovery,
            writer=writer,
            save_every=20,
            failures=at(KILLED_AT, kind="kill", point=POINT, targets=(KILLED_RANK,)),
        )
        verdict = supervise(config, folder)
        yield Shown(name, folder, verdict, audit_run(folder), spent(read_history(folder).events))
