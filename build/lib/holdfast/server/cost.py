"""The cost of a run on the parameter server, from its history: the seconds of its iterations and of each failure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.events import Chosen, Commit, Dropped, Event, Iterate, Lost, Restored, Serve, Struck, What
from holdfast.theory.bounds import iteration_cost_bound
from holdfast.theory.rate import Rate, fitted_rate

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
    ages: list[int] = field(default_factory=list)  # for each restored block, how many iterations it went back
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
        rate = None if (fitted := contraction(self)) is None else asdict(fitted)
        derived = {"iterations": self.iterations, "checkpoint_share": self.checkpoint_share, "rate": rate}
        return {**asdict(self), **derived, "predicted_cost": prediction(self)}


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
    return Served(
        workload=plan.workload,
        blocks=plan.blocks,
        criterion=plan.criterion,
        losses=[iteration.loss for iteration in iterations],
        wall=lines[-1].time - lines[0].time,
        seconds=seconds,
        saves=sum(isinstance(event.what, Commit) and not event.what.found for event in lines),
        bytes=sum(choice.bytes for choice in choices),
        failures=_outages(lines),
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
        outage.ages += [max(0, what.iteration - saved_at) for saved_at in what.saved_at]
        known = [size for size in (outage.size, what.size) if size is not None]
        outage.size = max(known, default=None)  # every node records the size for all nodes together
    elif isinstance(what, Dropped):
        outage.dropped = True


def contraction(run: Served) -> Rate | None:
    """Estimate the convergence rate from the losses before the first failure; None if they do not fall steadily.

    The final loss is unknown, but the decrease of the loss per iteration shrinks by a constant factor. The loss
    falls as the square of the distance to the optimum, so the rate is the square root of that factor.
    """
    first = min((outage.iteration for outage in run.failures), default=run.iterations)
    losses = [loss for loss in run.losses[:first] if loss is not None]
    if len(losses) < FEWEST:
        return None
    gains = -np.diff(losses)
    if not (gains > 0).all():
        return None
    c = float(np.sqrt(fitted_rate(gains).c))
    return Rate(c, _distance(run, c)) if 0 < c < 1 else None


def _distance(run: Served, convergence_rate: float) -> float:
    """Estimate how far the initial model was from the optimum; infinite if unknown.

    The estimate follows from how far each restore moved the model, at the given rate of convergence."""
    sizes = units = 0.0  # squares, summed
    for outage in run.failures:
        if outage.size is not None and outage.ages:
            back: Floats = convergence_rate ** -np.asarray(outage.ages, np.float64) - 1
            sizes += outage.size**2
            units += float(np.sum((convergence_rate**outage.iteration * back) ** 2)) / run.blocks
    return float(np.sqrt(sizes / units)) if units else float("inf")


def prediction(run: Served) -> float | None:
    """Return an upper bound on the iterations lost by failures (Qiao et al., Theorem 3.2); None if unknown."""
    perturbed = [outage for outage in run.failures if outage.restored]
    if not perturbed:
        return 0.0
    rate = contraction(run)
    if rate is None or any(outage.size is None for outage in perturbed) or not np.isfinite(rate.distance):
        return None
    sizes = [float(outage.size or 0.0) for outage in perturbed]
    return float(iteration_cost_bound(rate.c, rate.distance, sizes, [outage.iteration for outage in perturbed]))


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
