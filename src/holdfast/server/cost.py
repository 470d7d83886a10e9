"""The cost of a run on the parameter server, from its history: the seconds of its iterations and of each failure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.errors import BadInput
from holdfast.events import Chosen, Commit, Dropped, Event, Iterate, Lost, Restored, Serve, Struck, What
from holdfast.theory.rate import fitted_rate

PARTS = ("pull", "compute", "push", "apply", "checkpoint")
FEWEST = 6  # losses needed to measure a rate


@dataclass(slots=True)
class Outage:
    """Nodes and workers lost together, the blocks restored for them, and the seconds until training continued."""

    iteration: int
    members: list[str]
    blocks: int = 0
    restored: int = 0
    size: float | None = None
    regained: int | None = None  # iterations until the loss was again as low as before; None if unknown or never
    dropped: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """The costs of a run on the parameter server: loss per iteration, seconds per phase, number of saves, failures."""

    workload: str
    blocks: int
    criterion: float
    losses: list[float | None]
    wall: float
    seconds: dict[str, float]
    saves: int
    bytes: int
    failures: list[Outage]

    @property
    def iterations(self) -> int:
        return len(self.losses)

    @property
    def checkpoint_share(self) -> float:
        """The fraction of the training time in which training waited for checkpoints."""
        return self.seconds["checkpoint"] / (sum(self.seconds.values()) or 1.0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "iterations": self.iterations, "checkpoint_share": self.checkpoint_share}


def is_served(history: Sequence[Event]) -> bool:
    return any(isinstance(event.what, Serve) for event in history)


def served_cost(history: Iterable[Event]) -> Served:
    """Measure the costs of the run with the events `history`; raise BadInput if it had no parameter server."""
    lines = [event for event in history if event.who == "controller"]
    plan = next((event.what for event in lines if isinstance(event.what, Serve)), None)
    if plan is None:
        raise BadInput("This is not the history of a parameter server run: it has no serve event.")
    iterations = [event.what for event in lines if isinstance(event.what, Iterate)]
    seconds = {part: float(sum(getattr(iteration, part) for iteration in iterations)) for part in PARTS}
    seconds["other"] = max(0.0, float(sum(iteration.seconds for iteration in iterations)) - sum(seconds.values()))
    choices = [event.what for event in lines if isinstance(event.what, Chosen)]
    losses = [iteration.loss for iteration in iterations]
    failures = _outages(lines)
    for outage in failures:
        outage.regained = _regained(losses, outage) if outage.restored else None
    return Served(
        workload=plan.workload,
        blocks=plan.blocks,
        criterion=plan.criterion,
        losses=losses,
        wall=lines[-1].time - lines[0].time,
        seconds=seconds,
        saves=sum(isinstance(event.what, Commit) and event.what.is_new for event in lines),
        bytes=sum(choice.bytes for choice in choices),
        failures=failures,
    )


def _outages(lines: Sequence[Event]) -> list[Outage]:
    outages: list[Outage] = []
    gone: set[tuple[str, int]] = set()
    began: float | None = None
    current: Outage | None = None
    for event in lines:
        what = event.what
        if isinstance(what, Struck):
            began = event.time if began is None else began
        elif isinstance(what, Lost):
            if (what.kind, what.number) in gone and not what.blocks and what.kind != "controller":
                continue  # a later controller repeats a loss that was recorded before
            gone.add((what.kind, what.number))
            began = event.time if began is None else began
            if current is None:
                outages.append(current := Outage(what.iteration, []))
        elif isinstance(what, Iterate):
            if current is not None and began is not None:
                current.seconds = event.time - began
            current = began = None
        if current is not None:
            _add(current, what)
    return outages


def _add(outage: Outage, what: What) -> None:
    if isinstance(what, Lost):
        name = what.kind if what.kind == "controller" else f"{what.kind}-{what.number}"
        outage.members += [name] if name not in outage.members else []
        outage.blocks += len(what.blocks)
    elif isinstance(what, Restored):
        outage.restored += len(what.blocks)
        known = [size for size in (outage.size, what.size) if size is not None]
        outage.size = max(known, default=None)  # every node records the size for all nodes together
    elif isinstance(what, Dropped):
        outage.dropped = True


def _regained(losses: Sequence[float | None], outage: Outage) -> int | None:
    """Return how many iterations after the failure the loss was again as low as before it; None if it never was."""
    level = next((loss for loss in reversed(losses[: outage.iteration]) if loss is not None), None)
    if level is None:
        return None
    after = enumerate(losses[outage.iteration :], 1)
    return next((count for count, loss in after if loss is not None and loss <= level), None)


def convergence_rate(run: Served) -> float | None:
    """Estimate the factor by which the distance to the optimum shrinks per iteration, from the losses before a failure.

    The final loss is unknown, but the decrease of the loss per iteration shrinks by a constant factor. The loss falls
    as the square of the distance to the optimum, so the rate is the square root of that factor. Return None if the
    losses do not fall steadily."""
    first = min((outage.iteration for outage in run.failures), default=run.iterations)
    losses = [loss for loss in run.losses[:first] if loss is not None]
    if len(losses) < FEWEST:
        return None
    gains = -np.diff(losses)
    if not (gains > 0).all():
        return None
    c = float(np.sqrt(fitted_rate(gains).c))
    return c if 0 < c < 1 else None


def measured_cost(run: Served, reference: Served) -> float | None:
    """Return how many iterations later `run` converged than `reference`; None if one of these runs measured no loss."""
    lows = [min((loss for loss in served.losses if loss is not None), default=None) for served in (run, reference)]
    if run.workload != reference.workload:
        other = f"--reference is a run of {reference.workload}, not of {run.workload}"
        raise BadInput(f"{other}. Give a run of the same workload.")
    if None in lows:
        return None
    level = max(run.criterion, *(low for low in lows if low is not None))
    return _crossing(run.losses, level) - _crossing(reference.losses, level)


def _crossing(losses: Sequence[float | None], level: float) -> float:
    for index, loss in enumerate(losses):
        if loss is not None and loss <= level:
            before = losses[index - 1] if index else None
            within = 1.0 if before is None or before <= loss else (before - level) / (before - loss)
            return index + within
    return float(len(losses))
