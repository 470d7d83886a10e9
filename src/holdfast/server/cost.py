"""What a run of the parameter server cost, from its history: where an iteration's time went, and what each failure took."""

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
FEWEST = 6  # losses from which a rate is read


@dataclass(slots=True)
class Outage:
    """Members that were lost together, what came back, and how long it took until an iteration was done again."""

    iteration: int
    members: list[str]
    blocks: int = 0
    restored: int = 0
    size: float | None = None
    ages: list[int] = field(default_factory=list)  # for each block that came back, how many iterations it went back
    dropped: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What a served run took."""

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
        """Of the seconds of all iterations, those in which training waited for checkpoints."""
        return self.seconds["checkpoint"] / (sum(self.seconds.values()) or 1.0)

    def to_json(self) -> dict[str, Any]:
        """Every number, and what follows from them."""
        predicted = prediction(self)
        return {
            **asdict(self),
            "iterations": self.iterations,
            "checkpoint_share": self.checkpoint_share,
            "rate": None if (rate := contraction(self)) is None else asdict(rate),
            "predicted_cost": predicted,
        }


def is_served(history: Sequence[Event]) -> bool:
    """Whether this is the history of a served run."""
    return any(isinstance(event.what, Serve) for event in history)


def served_cost(history: Iterable[Event]) -> Served:
    """What the run with this history cost."""
    told = [event for event in history if event.who == "controller"]
    plan = next((event.what for event in told if isinstance(event.what, Serve)), None)
    if plan is None:
        raise BadInput("this is no history of a served run: its controller says nothing of what it serves")
    done = [event.what for event in told if isinstance(event.what, Iterate)]
    seconds = {part: float(sum(getattr(each, part) for each in done)) for part in PARTS}
    seconds["other"] = max(0.0, float(sum(each.seconds for each in done)) - sum(seconds.values()))
    saves = [event.what for event in told if isinstance(event.what, Chosen)]
    return Served(
        workload=plan.workload,
        blocks=plan.blocks,
        criterion=plan.criterion,
        losses=[each.loss for each in done],
        wall=told[-1].time - told[0].time,
        seconds=seconds,
        saves=sum(isinstance(event.what, Commit) and not event.what.found for event in told),
        bytes=sum(each.bytes for each in saves),
        failures=_outages(told),
    )


def _outages(told: Sequence[Event]) -> list[Outage]:
    """Losses between two finished iterations, each with the first iteration that was done after it."""
    outages: list[Outage] = []
    gone: set[tuple[str, int]] = set()
    began: float | None = None
    current: Outage | None = None
    for event in told:
        what = event.what
        if isinstance(what, Struck):
            began = event.time if began is None else began
        elif isinstance(what, Lost):
            if _is_told_again(what, gone):
                continue
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


def _is_told_again(what: Lost, gone: set[tuple[str, int]]) -> bool:
    """Whether a controller that began anew tells of a member that was lost long before."""
    return (what.kind, what.number) in gone and not what.blocks and what.kind != "controller"


def _add(outage: Outage, what: What) -> None:
    if isinstance(what, Lost):
        name = what.kind if what.kind == "controller" else f"{what.kind}-{what.number}"
        outage.members += [name] if name not in outage.members else []
        outage.blocks += len(what.blocks)
    elif isinstance(what, Restored):
        outage.restored += len(what.blocks)
        outage.ages += [max(0, what.iteration - saved_at) for saved_at in what.saved_at]
        known = [size for size in (outage.size, what.size) if size is not None]
        outage.size = max(known, default=None)  # every node tells that of all of them
    elif isinstance(what, Dropped):
        outage.dropped = True


def contraction(run: Served) -> Rate | None:
    """How fast the run converges, from its losses before the first failure; None if they do not tell.

    The optimum is not known, so the loss that an iteration gains stands for what is left of it: both fall by the same
    factor. The loss falls as the square of the distance, so c is the root of that factor.
    """
    first = min((each.iteration for each in run.failures), default=run.iterations)
    losses = [loss for loss in run.losses[:first] if loss is not None]
    if len(losses) < FEWEST:
        return None
    gains = -np.diff(losses)
    if not (gains > 0).all():
        return None
    c = float(np.sqrt(fitted_rate(gains).c))
    return Rate(c, _distance(run, c)) if 0 < c < 1 else None


def _distance(run: Served, c: float) -> float:
    """The distance to the optimum at the start, as the blocks that were lost tell it by how far they had moved.

    In a contraction by c a distance D at the start is D c^k in iteration k: who goes back a iterations from there moves
    by D c^k (c^-a - 1). If all blocks have the same part in D, those that came back have moved by the root of the mean
    square of that, and how far they did move is on record.
    """
    moved = [
        (float(each.size or 0.0), c**each.iteration * _moved(c, each.ages, run.blocks))
        for each in run.failures
        if each.size is not None and each.ages
    ]
    size, unit = (float(np.sqrt(sum(pair[at] ** 2 for pair in moved))) for at in (0, 1))
    return size / unit if unit else float("inf")


def _moved(c: float, ages: Sequence[int], blocks: int) -> float:
    back: Floats = c ** -np.asarray(ages, np.float64) - 1
    return float(np.sqrt(np.sum(back**2) / blocks))


def prediction(run: Served) -> float | None:
    """The iteration cost that Theorem 3.2 allows for all perturbations of a run; None if their sizes or c are not known."""
    perturbed = [each for each in run.failures if each.restored]
    if not perturbed:
        return 0.0
    rate = contraction(run)
    if rate is None or any(each.size is None for each in perturbed) or not np.isfinite(rate.distance):
        return None
    sizes = [float(each.size or 0.0) for each in perturbed]
    return float(iteration_cost_bound(rate.c, rate.distance, sizes, [each.iteration for each in perturbed]))


def measured_cost(run: Served, reference: Served) -> float | None:
    """How many iterations later a run came to the criterion than another without failures; None if the loss tells nothing.

    Where they did not reach the criterion, it is the lowest loss that both reached.
    """
    lows = [min((loss for loss in each.losses if loss is not None), default=None) for each in (run, reference)]
    if run.workload != reference.workload:
        raise BadInput(f"{reference.workload} is no reference for {run.workload}: give a run of the same workload")
    if None in lows:
        return None
    level = max(run.criterion, *(low for low in lows if low is not None))
    return _crossing(run.losses, level) - _crossing(reference.losses, level)


def _crossing(losses: Sequence[float | None], level: float) -> float:
    """After how many iterations the loss came down to a level, on a straight line within the last of them."""
    for index, loss in enumerate(losses):
        if loss is not None and loss <= level:
            before = losses[index - 1] if index else None
            within = 1.0 if before is None or before <= loss else (before - level) / (before - loss)
            return index + within
    return float(len(losses))
