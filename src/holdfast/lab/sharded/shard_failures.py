"""The failures that sharded-tradeoff simulates, the strategies that recover from them, and the sizes of its full and quick run."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

WORLD_SIZE = 8
LOST = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))  # of the ranks
NOTHING = (Fraction(0),)
HALF = LOST[-1:]  # a larger loss contains the smaller ones
EARLY, LATE = "early", "late"
REPEATED_SPACING = 4  # long runs are measured less often, by this factor


@dataclass(frozen=True, slots=True)
class ShardStrategy:
    """A way to recover from the loss of shards. `needs_snapshot`: the result depends on the newest snapshot.

    `losses` are the parts of the ranks that are lost in its trials; only 0 if what is lost makes no difference."""

    name: str
    words: str
    needs_snapshot: bool = False
    losses: tuple[Fraction, ...] = LOST


ROLLBACK = ShardStrategy("rollback", "all ranks return to the snapshot", needs_snapshot=True, losses=NOTHING)
WHOLE = ShardStrategy("whole", "the whole lost shard from the snapshot (SCAR)", needs_snapshot=True)
FRESH = ShardStrategy("fresh", "gathered weights, moments from the snapshot", needs_snapshot=True)
AVERAGED = ShardStrategy("fresh-averaged", "gathered weights, first moments 0, second the mean of surviving rows")
ZEROED = ShardStrategy("fresh-zeroed", "gathered weights, both moments 0")
ZERO_WEIGHTS = ShardStrategy("zero-weights", "weights 0, moments as in fresh-averaged")
NEIGHBOURS = ShardStrategy("neighbours", "the mean of the neighbours' rows (CheckFree)")
SHADOW = ShardStrategy("shadow", "a copy that made the owner's optimizer steps", losses=HALF)
NOISE = ShardStrategy("noise", "nothing is lost, all weights are rounded to bfloat16", losses=NOTHING)
STRATEGIES = (ROLLBACK, WHOLE, FRESH, AVERAGED, ZEROED, ZERO_WEIGHTS, NEIGHBOURS, SHADOW, NOISE)
REPEATED = (WHOLE, FRESH, AVERAGED, NEIGHBOURS)  # those that long runs with many failures train
COMPUTED = (ROLLBACK, SHADOW)  # those whose long runs follow from the undisturbed run: exact, some steps later or not


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSize:
    """The size of the model and of its batches, and its learning rate after `warm_up` steps."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    rate: float
    warm_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffSize:
    """The size of the experiment: the model, its text, the failures, and for how long they are followed."""

    model: GptSize
    text: int  # bytes at most
    seeds: int  # independent runs
    early: int  # failures of a run before its warm-up ends
    late: int  # failures of a run after that
    intervals: tuple[int, ...]  # steps between two snapshots
    steps: int  # of the undisturbed run
    settle: int  # steps after a failure whose weights are not measured
    averaged: int  # steps; a loss is that of the mean of the weights after each of them
    spacing: int  # steps between two losses
    losses: int  # measured after a failure
    rates: tuple[float, ...]  # repeated failures: the chance of a rank to fail in a step
    repeated_seeds: int  # runs with repeated failures
    repeated_steps: int
    repeated_interval: int  # steps between two of their snapshots


FULL = TradeoffSize(
    model=GptSize(width=1024, layers=8, heads=16, context=256, batch=16, rate=6e-4, warm_up=200),
    text=64_000_000,
    seeds=2,
    early=1,
    late=3,
    intervals=(50, 200, 1000),
    steps=2192,
    settle=48,
    averaged=16,
    spacing=16,
    losses=3,
    rates=(0.0006, 0.0025, 0.01),
    repeated_seeds=1,
    repeated_steps=832,
    repeated_interval=200,
)
QUICK = TradeoffSize(
    model=GptSize(width=48, layers=2, heads=4, context=32, batch=16, rate=4e-3, warm_up=60),
    text=4_000_000,
    seeds=4,
    early=1,
    late=1,
    intervals=(16, 64, 256),
    steps=480,
    settle=16,
    averaged=8,
    spacing=8,
    losses=3,
    rates=(0.0006, 0.01),
    repeated_seeds=1,
    repeated_steps=320,
    repeated_interval=64,
)


@dataclass(frozen=True, slots=True)
class ShardFailure:
    """A failure before step `step` of run `seed`; `order` lists the ranks in the order in which they are lost."""

    seed: int
    phase: str
    step: int
    order: tuple[int, ...]

    def lost(self, fraction: Fraction) -> frozenset[int]:
        """Return the lost ranks if `fraction` of them are lost."""
        return frozenset(self.order[: int(fraction * len(self.order))])


@dataclass(frozen=True, slots=True)
class ShardTrial:
    """A failure and a strategy that recovers from it, followed for some steps.

    `lost` is 0 for a strategy that does not depend on what was lost, and `interval` is 0 if none is needed."""

    failure: ShardFailure
    strategy: ShardStrategy
    lost: Fraction
    interval: int

    @property
    def key(self) -> str:
        """The name of this trial in the log of trials; trials that restore the same snapshot have the same name."""
        return f"{self.failure.seed}/{self.failure.step}/{self.strategy.name}/{self.lost}/{self.saved_at}"

    @property
    def saved_at(self) -> int:
        """The step of the newest snapshot; the first one is at step 0. The step of the failure if none is needed."""
        return self.failure.step // self.interval * self.interval if self.interval else self.failure.step


def failures(size: TradeoffSize, experiment_seed: int, seed: int) -> list[ShardFailure]:
    """Return the failures of run `seed`: early ones in the warm-up, late ones after the longest snapshot interval."""
    rng = np.random.default_rng((experiment_seed, seed))
    warm_up, last = size.model.warm_up, size.steps - measured_steps(size, 0)[-1] - size.spacing
    early = rng.integers(warm_up // 3, warm_up, size.early).tolist()
    late = _spread(rng, max(warm_up, *size.intervals), last, size.late)
    phases = [EARLY] * size.early + [LATE] * size.late
    return [
        ShardFailure(seed, phase, step, tuple(rng.permutation(WORLD_SIZE).tolist()))
        for phase, step in zip(phases, early + late, strict=True)
    ]


def _spread(rng: np.random.Generator, first: int, last: int, count: int) -> list[int]:
    """Return `count` random steps from `first` to before `last`, one in each of as many equal parts."""
    part = (last - first) // count
    return [first + number * part + int(rng.integers(part)) for number in range(count)]


def measured_steps(size: TradeoffSize, step: int) -> list[int]:
    """Return the steps after which losses are measured in a trial whose failure is before `step`."""
    first = -(-(step + size.settle + size.averaged) // size.spacing) * size.spacing
    return [first + number * size.spacing for number in range(size.losses)]


def trials(size: TradeoffSize, failure: ShardFailure) -> Iterator[ShardTrial]:
    """Yield every trial of a failure: all strategies, lost parts and snapshot intervals that make a difference."""
    for strategy in STRATEGIES:
        for lost in strategy.losses:
            for interval in size.intervals if strategy.needs_snapshot else (0,):
                yield ShardTrial(failure, strategy, lost, interval)


def repeated_failures(size: TradeoffSize, experiment_seed: int, seed: int, rate: float) -> list[frozenset[int]]:
    """Return for each step of a long run the ranks that are lost before it, each with the chance `rate`."""
    rng = np.random.default_rng((experiment_seed, seed, round(rate * 1e9)))
    struck = rng.random((size.repeated_steps, WORLD_SIZE)) < rate
    lost = [frozenset(np.flatnonzero(ranks).tolist()) for ranks in struck]
    return [ranks if len(ranks) < WORLD_SIZE else frozenset() for ranks in lost]  # a survivor is needed
