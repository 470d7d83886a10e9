"""The costs of the failures of sharded-tradeoff, and its rows, computed from the measured numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab import confidence
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.result import Row
from holdfast.lab.sharded.lag import LossCurve, lag
from holdfast.lab.sharded.shard_failures import (
    COMPUTED,
    NOISE,
    REPEATED,
    ROLLBACK,
    ShardStrategy,
    ShardTrial,
    TradeoffSize,
    failures,
    measured_steps,
    repeated_failures,
    trials,
)
from holdfast.lab.sharded.trial_keys import (
    curve_key,
    curve_steps,
    distance_key,
    lag_key,
    loss_key,
    rate_key,
    repeated_key,
    repeated_steps,
)
from holdfast.theory.bounds import iteration_cost_bound


def with_lags(size: TradeoffSize, seed: int, known: Mapping[str, float]) -> dict[str, float]:
    """Return the measured numbers `known`, and the lag of every trial computed from its losses."""
    lags = dict[str, float]()
    for run in range(size.seeds):
        reference = undisturbed(size, known, run)
        for failure in failures(size, seed, run):
            steps = measured_steps(size, failure.step)
            for trial in trials(size, failure):
                losses = LossCurve.of([(step, known[loss_key(trial, step)]) for step in steps])
                lags[lag_key(trial)] = lag(reference, losses)
    return {**known, **lags}


def undisturbed(size: TradeoffSize, known: Mapping[str, float], run: int) -> LossCurve:
    """Return the validation losses of run number `run` without failures."""
    return LossCurve.of([(step, known[curve_key(run, step)]) for step in curve_steps(size)])


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs of all failures of an experiment of a given size and seed, whose measured numbers are in `known`."""

    size: TradeoffSize
    seed: int
    known: Mapping[str, float]

    def trials(
        self, strategy: ShardStrategy, lost: Fraction = Fraction(0), interval: int = 0, phase: str = ""
    ) -> list[ShardTrial]:
        """Return the trials of `strategy`, one for each failure, or for each failure of `phase`."""
        planned = [failure for seed in range(self.size.seeds) for failure in failures(self.size, self.seed, seed)]
        return [
            ShardTrial(failure, strategy, lost, interval if strategy.needs_snapshot else 0)
            for failure in planned
            if phase in ("", failure.phase)
        ]

    def lags(self, strategy: ShardStrategy, lost: Fraction = Fraction(0), interval: int = 0, phase: str = "") -> Floats:
        """Return the lag in steps of each failure under `strategy`."""
        return np.array([self.known[lag_key(trial)] for trial in self.trials(strategy, lost, interval, phase)])

    def ages(self, interval: int, phase: str = "") -> Floats:
        """Return the age in steps of the newest snapshot at each failure, which is what a rollback costs."""
        rolled_back = self.trials(ROLLBACK, interval=interval, phase=phase)
        return np.array([float(trial.failure.step - trial.saved_at) for trial in rolled_back])

    def ratio(self, strategy: ShardStrategy, lost: Fraction, interval: int, phase: str = "") -> ConfidenceInterval:
        """Return the mean lag under `strategy` divided by the mean cost of a rollback, over the same failures."""
        lags, ages = self.lags(strategy, lost, interval, phase), self.ages(interval, phase)
        value, low, high = confidence.reduction(lags, ages)
        return ConfidenceInterval(1 - value, 1 - high, 1 - low)

    @property
    def noise_floor(self) -> float:
        """The root mean square of the lags of runs in which nothing was lost and weights were only rounded."""
        return float(np.sqrt(np.mean(np.square(self.lags(NOISE)))))

    def rollback_errors(self) -> Floats:
        """Return for each measured rollback its lag minus the age of its snapshot: errors of the estimate."""
        return np.concatenate(
            [self.lags(ROLLBACK, interval=interval) - self.ages(interval) for interval in self.size.intervals]
        )

    def curve(self, seed: int) -> LossCurve:
        """Return the validation losses of run `seed` without failures."""
        return undisturbed(self.size, self.known, seed)

    def bound(self, trial: ShardTrial) -> float:
        """Return the cost that Theorem 3.2 allows for the perturbation of the weights; NaN if the run did not converge."""
        c, distance = self.known[rate_key(trial.failure.seed)], self.known[distance_key(trial.failure.seed)]
        if not 0 < c < 1:
            return float("nan")
        return float(iteration_cost_bound(c, distance, [self.known[f"{trial.key}/distance"]], [trial.failure.step]))

    def rows(self) -> Iterator[Row]:
        """Yield a row for every trial, for every point of a long run, and for the undisturbed runs."""
        for seed in range(self.size.seeds):
            for failure in failures(self.size, self.seed, seed):
                yield from (self._trial_row(trial) for trial in trials(self.size, failure))
        for seed in range(self.size.seeds):
            points = self.curve(seed).points()
            yield from ({"kind": "undisturbed", "run": seed, "step": step, "loss": loss} for step, loss in points)
        for seed in range(self.size.repeated_seeds):
            for rate in self.size.rates:
                yield from self._repeated_rows(seed, rate)

    def repeated(self, seed: int, rate: float, strategy: ShardStrategy) -> LossCurve:
        """Return the losses of a long run with failures at `rate`; those of exact strategies are computed."""
        steps = repeated_steps(self.size)
        if strategy not in COMPUTED:
            return LossCurve.of([(step, self.known[repeated_key(seed, rate, strategy.name, step)]) for step in steps])
        lost = [bool(ranks) for ranks in repeated_failures(self.size, self.seed, seed, rate)]
        done = (
            progress_under_rollback(lost, self.size.repeated_interval) if strategy == ROLLBACK else range(len(lost) + 1)
        )
        reached = self.curve(seed).at(np.array([done[step] for step in steps]))
        return LossCurve(np.array(steps), reached)

    def _trial_row(self, trial: ShardTrial) -> Row:
        failure = trial.failure
        return {
            "kind": "trial",
            "run": failure.seed,
            "step": failure.step,
            "phase": failure.phase,
            "strategy": trial.strategy.name,
            "lost": str(trial.lost) if trial.lost else "",
            "interval": trial.interval or None,
            "age": failure.step - trial.saved_at if trial.interval else None,
            "lag": self.known[lag_key(trial)],
            "jump": self.known[f"{trial.key}/jump"],
            "distance": self.known[f"{trial.key}/distance"],
            "bound": self.bound(trial),
        }

    def _repeated_rows(self, seed: int, rate: float) -> Iterator[Row]:
        for strategy in (*COMPUTED, *REPEATED):
            for step, loss in self.repeated(seed, rate, strategy).points():
                yield {
                    "kind": "repeated", "run": seed, "rate": rate, "strategy": strategy.name, "step": step, "loss": loss
                }  # fmt: skip


def progress_under_rollback(lost: list[bool], interval: int) -> list[int]:
    """Return how many steps of progress a run has after each number of trained steps, if it rolls back at each loss.

    A snapshot is saved after every `interval` steps of progress; `lost` says for each step if ranks are lost before it."""
    progress = [0]
    for failed in lost:
        reached = progress[-1] // interval * interval if failed else progress[-1]
        progress.append(reached + 1)
    return progress
