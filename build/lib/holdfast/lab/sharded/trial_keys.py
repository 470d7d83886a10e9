"""The names of the measured numbers of sharded-tradeoff in the log of trials, and which of them an experiment needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.lab.sharded.shard_failures import (
    REPEATED,
    REPEATED_SPACING,
    ShardTrial,
    TradeoffSize,
    failures,
    measured_steps,
    trials,
)


def loss_key(trial: ShardTrial, step: int) -> str:
    return f"{trial.key}/loss/{step}"


def lag_key(trial: ShardTrial) -> str:
    return f"{trial.key}/lag"


def curve_key(seed: int, step: int) -> str:
    return f"{seed}/undisturbed/{step}"


def rate_key(seed: int) -> str:
    return f"{seed}/undisturbed/c"


def distance_key(seed: int) -> str:
    return f"{seed}/undisturbed/distance"


def repeated_key(seed: int, rate: float, strategy: str, step: int) -> str:
    return f"{seed}/repeated/{rate}/{strategy}/{step}"


def curve_steps(size: TradeoffSize) -> list[int]:
    """Return the steps of an undisturbed run at which its loss is measured."""
    return [*range(0, size.steps + 1, size.spacing)]


def repeated_steps(size: TradeoffSize) -> list[int]:
    """Return the steps of a long run at which its loss is measured."""
    return [*range(0, size.repeated_steps, REPEATED_SPACING * size.spacing), size.repeated_steps]


@dataclass(frozen=True, slots=True)
class LongRun:
    """A run of the model of `seed` that loses ranks again and again, each with the chance `rate` in each step."""

    seed: int
    rate: float
    strategy: str


def long_runs(size: TradeoffSize) -> Iterator[LongRun]:
    for seed in range(size.repeated_seeds):
        for rate in size.rates:
            yield from (LongRun(seed, rate, strategy.name) for strategy in REPEATED)


def last_key(size: TradeoffSize, run: LongRun) -> str:
    """Return the key of the number that is measured last in `run`."""
    return repeated_key(run.seed, run.rate, run.strategy, size.repeated_steps)


def planned_steps(size: TradeoffSize, experiment_seed: int) -> dict[str, int]:
    """Return the steps to train for each trial, undisturbed run and long run, by the key that is measured last in it."""
    planned = {rate_key(seed): size.steps for seed in range(size.seeds)}
    for seed in range(size.seeds):
        for failure in failures(size, experiment_seed, seed):
            last = measured_steps(size, failure.step)[-1]
            planned |= {loss_key(trial, last): last - failure.step for trial in trials(size, failure)}
    return planned | {last_key(size, run): size.repeated_steps for run in long_runs(size)}
