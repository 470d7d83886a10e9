"""Run one training script under several recovery methods, each with the same two kills, and measure each run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.verdicts import Finding, audit_run
from holdfast.cost.breakdown import CostBreakdown, cost_breakdown
from holdfast.faults.schedule import at
from holdfast.history.log import read_history
from holdfast.runs.config import RunConfig
from holdfast.supervise.preload import warm
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import RunVerdict

SCRIPT = Path(__file__).with_name("train.py")
WORKERS, KILLED_AT, KILLED_RANK = 4, (50, 110), 2
POINT = "backward=0.5"  # once half of the gradients are summed
RUNS = {  # by name: the recovery and the writer
    "blocking": ("restart", "blocking"),
    "restart": ("restart", "overlapped"),
    "replay": ("replay", "overlapped"),
    "forward": ("forward", "overlapped"),
}


@dataclass(frozen=True, slots=True)
class DemoRun:
    name: str
    folder: Path
    verdict: RunVerdict
    findings: tuple[Finding, ...]
    spent: CostBreakdown


def folders(out: Path) -> dict[str, Path]:
    return {name: out / name for name in RUNS}


def run(out: Path) -> Iterator[DemoRun]:
    """Run the demo script once for each entry of `RUNS`, in its own folder below `out`, and yield each finished run."""
    warm()  # imports torch now, so that the first run is not slower than the others
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
        yield DemoRun(name, folder, verdict, audit_run(folder), cost_breakdown(read_history(folder).events))
