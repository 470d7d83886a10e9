"""The data of one run that a report shows: its cost, activity, audit findings, settings and losses."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.audit.verdicts import Finding, audit_run, worst
from holdfast.cost.breakdown import CostBreakdown, cost_of
from holdfast.cost.run_events import RunEvents, of_history, read_events
from holdfast.cost.step_block import Item, StepBlock
from holdfast.cost.timeline import leading
from holdfast.events import Event, Launch, Plan, Step
from holdfast.finding import counted
from holdfast.memory import no_collection
from holdfast.printable import printable
from holdfast.report.activity import Activity, activity
from holdfast.report.page import Cell, Point, Statement
from holdfast.runs.histories import open_history


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """The data of one run in a report; `findings` are the results of its audit, or None while the run trains."""

    name: str
    cost: CostBreakdown
    activity: Activity
    settings: Mapping[str, Cell]
    losses: Sequence[Point]
    began: float
    findings: Sequence[Finding] | None

    @property
    def verdict(self) -> str:
        """The worst verdict of all audit checks, or "unknown" without an audit."""
        return worst(self.findings or ())

    @property
    def writer(self) -> str:
        return str(self.settings["writer"] or "")

    @property
    def stall_share(self) -> float:
        return self.cost.stall.waited / (self.cost.wall or 1.0)


def load_run(path: Path, name: str, *, audited: bool = True) -> ReportedRun:
    """Read the run in the folder `path`, and audit it unless `audited` is False."""
    with no_collection(), open_history(path) as run:
        events = read_events(run.files)
        settings = _settings(events.items)
        if run.config is not None:
            script = " ".join([Path(run.config.script).name, *run.config.args])
            settings |= {"recovery": run.config.recovery, "script": script}
        findings = audit_run(run.files, run.facts) if audited else None
        return _reported(events, name, settings, findings)


def run_from_history(history: Sequence[Event], name: str, *, findings: Sequence[Finding] | None = None) -> ReportedRun:
    """Return the report data of a run, computed from its events `history`; `findings` are those of an audit, if any."""
    return _reported(of_history(history), name, _settings(history), findings)


def _reported(
    run: RunEvents, name: str, settings: Mapping[str, Cell], findings: Sequence[Finding] | None
) -> ReportedRun:
    return ReportedRun(
        name=name,
        cost=cost_of(run),
        activity=activity(run),
        settings=settings,
        losses=_losses(leading(run.items)),
        began=min(item.time for item in run.items),
        findings=findings,
    )


def _losses(path: Iterable[Item]) -> list[Point]:
    """Return (step, loss) of the steps of `path`; of a block, only of its first and last step and the extremes.

    When a step is trained again, the losses from it on are those of the new attempt."""
    losses: dict[float, float] = {}
    newest = 0
    for item in path:
        what = item.what
        if not isinstance(what, Step | StepBlock):
            continue
        first = what.first if isinstance(what, StepBlock) else what.step
        if what.attempt > newest:
            newest = what.attempt
            losses = {step: loss for step, loss in losses.items() if step < first}
        if isinstance(what, StepBlock):
            rows = np.flatnonzero(what.column("has_loss"))
            values = what.column("loss")[rows]
            kept = {0, int(values.argmin()), int(values.argmax()), len(rows) - 1} if len(rows) else set()
            losses |= {int(first + rows[place]): float(values[place]) for place in kept}
        elif what.loss is not None:
            losses[what.step] = what.loss
    return sorted(losses.items())


def audit_statements(audits: Mapping[str, Sequence[Finding] | None]) -> list[Statement]:
    """Return one statement for each check if there is one audit, or one statement for each audit if there are several.

    `audits` maps a claim about a run to the findings of its audit, or to None if the run was not audited."""
    statements = []
    for claim, findings in audits.items():
        texts = [(finding, finding.check.replace("_", " ")) for finding in findings or ()]
        if len(audits) == 1:
            statements += [
                Statement(verdict=f.verdict, claim=text, source="audit", measured=f.because) for f, text in texts
            ]
        elif findings is not None:
            verdict = worst(findings)
            bad = [f"{text}: {finding.because}" for finding, text in texts if finding.verdict == verdict != "pass"]
            why = bad[0] if bad else f"{counted(len(findings), 'check')} pass"
            statements.append(Statement(verdict=verdict, claim=claim, source="audit", measured=why))
    return statements


def names(paths: Sequence[Path]) -> list[str]:
    """Return a unique printable name for each folder: its own name, with parent folders where needed."""
    absolute = [path.absolute() for path in paths]
    for parts in range(1, max(len(path.parts) for path in absolute) + 1):
        candidates = [printable("/".join(path.parts[-parts:])) for path in absolute]
        if max(Counter(candidates).values()) == 1:
            return candidates
    return [printable(str(path)) for path in paths]  # a folder was given twice


def _settings(history: Sequence[Item]) -> dict[str, Cell]:
    plan = next((event.what for event in reversed(history) if isinstance(event.what, Plan)), None)
    launch = next((event.what for event in reversed(history) if isinstance(event.what, Launch)), None)
    return {
        "recovery": None,
        "writer": plan.writer if plan else None,
        "save every": plan.save_every if plan else None,
        "workers": launch.workers * launch.nodes if launch else None,
        "seed": plan.seed if plan else None,
        "script": Path(launch.argv[0]).name if launch and launch.argv else None,
    }
