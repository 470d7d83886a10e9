"""A run as a page needs it: what it cost, what its ranks did, what the audit found, and how it was to be done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.verdicts import Finding, audit_run, no_collection, recovery_of, worst
from holdfast.cost.breakdown import Spent, spent
from holdfast.cost.timeline import leading
from holdfast.events import Event, Launch, Plan, Step
from holdfast.history.log import read_history
from holdfast.report.activity import Activity, activity
from holdfast.report.page import Cell
from holdfast.report.thinning import Point
from holdfast.runs.histories import command_of, config_of, histories, weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run. There are no `findings` while it goes on: the audit judges what has ended."""

    name: str
    spent: Spent
    activity: Activity
    settings: Mapping[str, Cell]
    losses: Sequence[Point]
    began: float
    findings: Sequence[Finding] | None

    @property
    def verdict(self) -> str:
        """The audit's, on the whole run."""
        return worst(self.findings or ())

    @property
    def writer(self) -> str:
        """How its saves reached the store."""
        return str(self.settings["writer"] or "")

    @property
    def stall_share(self) -> float:
        """The part of its wall clock in which training waited for saves."""
        return self.spent.stall.waited / (self.spent.wall or 1.0)


def ran(path: Path, name: str, *, audited: bool = True) -> Ran:
    """The run in this folder."""
    with no_collection(), histories([path]) as files:
        told = read_history(files).events
        findings = _findings(path, files) if audited else None
        return told_run(told, name, settings={**_settings(told), **_configured(path)}, findings=findings)


def _findings(path: Path, files: Sequence[Path]) -> tuple[Finding, ...]:
    return audit_run(files, command_of([path]), recovery_of([path]), weights_of([path]))


def told_run(
    history: Sequence[Event],
    name: str,
    *,
    settings: Mapping[str, Cell] | None = None,
    findings: Sequence[Finding] | None = None,
) -> Ran:
    """The run that this history tells of."""
    return Ran(
        name=name,
        spent=spent(history),
        activity=activity(history),
        settings=_settings(history) if settings is None else settings,
        losses=_losses(history),
        began=min(event.time for event in history),
        findings=findings,
    )


def names(paths: Sequence[Path]) -> list[str]:
    """What each of these folders is called on a page: its own name, with as many parents as it takes to tell them apart."""
    absolute = [path.absolute() for path in paths]
    for parts in range(1, max(len(path.parts) for path in absolute) + 1):
        found = ["/".join(path.parts[-parts:]) for path in absolute]
        if max(Counter(found).values()) == 1:
            return found
    return [str(path) for path in paths]  # one of them is named twice


def _losses(history: Sequence[Event]) -> list[Point]:
    """The loss of every step that told one, as whoever trained it last told."""
    steps = (event.what for event in leading(history) if isinstance(event.what, Step))
    last = {step.step: step.loss for step in steps if step.loss is not None}
    return [(step, last[step]) for step in sorted(last)]


def _settings(history: Sequence[Event]) -> dict[str, Cell]:
    """How the run was to be done, as its history tells; of a run that was changed, as it was at last."""
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


def _configured(path: Path) -> dict[str, Cell]:
    config = config_of(path)
    if config is None:
        return {}
    return {"recovery": config.recovery, "script": " ".join([Path(config.script).name, *config.args])}
