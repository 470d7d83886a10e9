"""The data of one run that a report shows: its cost, activity, audit findings, settings and losses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.verdicts import Finding, audit_run, worst
from holdfast.cost.breakdown import CostBreakdown, cost_breakdown
from holdfast.cost.timeline import leading
from holdfast.events import Event, Launch, Plan, Step
from holdfast.finding import counted
from holdfast.history.log import read_history
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
        history = read_history(run.files).events
        settings = _settings(history)
        if run.config is not None:
            script = " ".join([Path(run.config.script).name, *run.config.args])
            settings |= {"recovery": run.config.recovery, "script": script}
        findings = audit_run(run.files, run.facts) if audited else None
        return run_from_history(history, name, settings=settings, findings=findings)


def run_from_history(
    history: Sequence[Event],
    name: str,
    *,
    settings: Mapping[str, Cell] | None = None,
    findings: Sequence[Finding] | None = None,
) -> ReportedRun:
    """Return the report data of a run, computed from its events `history`.

    If `settings` is None, the settings are also taken from the events. `findings` are the results of an audit, if
    any."""
    steps = (event.what for event in leading(history) if isinstance(event.what, Step))
    last: dict[float, float] = {step.step: step.loss for step in steps if step.loss is not None}
    return ReportedRun(
        name=name,
        cost=cost_breakdown(history),
        activity=activity(history),
        settings=_settings(history) if settings is None else settings,
        losses=sorted(last.items()),
        began=min(event.time for event in history),
        findings=findings,
    )


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


def _settings(history: Sequence[Event]) -> dict[str, Cell]:
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
