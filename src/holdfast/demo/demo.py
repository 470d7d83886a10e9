"""The same training under both writers, each with the same two kills: what happened, was it right, what did it cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.verdicts import Finding, audit_run
from holdfast.cost.spent import Spent, spent
from holdfast.ddp.config import RunConfig
from holdfast.failure import at
from holdfast.history import read_history
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import Verdict
from holdfast.supervise.warm import warm

PRELOAD = ("sklearn.datasets",)
SCRIPT = Path(__file__).with_name("train.py")
WORKERS, KILLED_AT, KILLED_RANK = 4, (50, 110), 2


@dataclass(frozen=True, slots=True)
class Shown:
    """One run of the demo: how it ended, what the audit found, and what it cost."""

    name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    spent: Spent


def run(out: Path) -> Iterator[Shown]:
    """Train once with each writer; every run has a folder of its own below `out`."""
    warm(PRELOAD)  # now, or the first run would pay for the second
    for writer in ("blocking", "overlapped"):
        config = RunConfig(
            script=str(SCRIPT),
            workers=WORKERS,
            writer=writer,
            save_every=20,
            failures=at(KILLED_AT, kind="kill", targets=(KILLED_RANK,)),
        )
        verdict = supervise(config, out / writer, preload=PRELOAD)
        yield Shown(writer, verdict, audit_run(out / writer), spent(read_history(out / writer).events))
