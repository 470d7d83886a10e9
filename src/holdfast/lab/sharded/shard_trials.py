"""The trials of one run: train without failures, recover from each failure in every way, and follow the loss."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.lab.sharded import measured_costs as keys
from holdfast.lab.sharded.gpt_training import GptState, GptTraining, weight_distance
from holdfast.lab.sharded.lag import LossCurve, lag
from holdfast.lab.sharded.shard_failures import (
    AVERAGED,
    FRESH,
    NEIGHBOURS,
    NOISE,
    REPEATED,
    REPEATED_SPACING,
    ROLLBACK,
    SHADOW,
    WHOLE,
    WORLD_SIZE,
    ZERO_WEIGHTS,
    ZEROED,
    ShardFailure,
    ShardStrategy,
    ShardTrial,
    TradeoffSize,
    failures,
    repeated_failures,
    trials,
)
from holdfast.lab.sharded.simulated_shards import SimulatedShadow, restore_lost
from holdfast.lab.sharded.training_text import load_text
from holdfast.lab.simulate.pools import Report
from holdfast.lab.simulate.strategy import trial_stream
from holdfast.live.sharded import lost_shards
from holdfast.live.sharded.lost_shards import RowState, Rule
from holdfast.theory.rate import Rate, fitted_rate

RULES: dict[ShardStrategy, Rule] = {
    WHOLE: lost_shards.whole,
    FRESH: lost_shards.fresh,
    AVERAGED: lost_shards.fresh_averaged,
    ZEROED: lost_shards.fresh_zeroed,
    ZERO_WEIGHTS: lost_shards.zero_weights,
    NEIGHBOURS: lost_shards.neighbours,
}
SHADOWED = 8  # steps that a shadow makes before its owner is lost
DISTANCES = 12  # points of the undisturbed run at which its distance from its end is measured
FITTED = slice(0, 8)  # those to which a rate is fitted: near the end, the distance from it says nothing


@dataclass(frozen=True, slots=True, eq=False)
class UndisturbedRun:
    """A run without failures: its losses and rate, and by step the states and losses that trials need.

    `shadows` has the states that shadows of all shards have computed, at the steps of failures."""

    curve: LossCurve
    rate: Rate
    losses: Mapping[int, float]
    states: Mapping[int, GptState]
    shadows: Mapping[int, GptState]


@dataclass(frozen=True, slots=True)
class SeedTrials:
    """The trials of a run; a call measures those that are not in `known`, and reports each number under its key."""

    size: TradeoffSize
    data: Path | None
    experiment_seed: int
    known: Mapping[str, float]

    def __call__(self, seed: int, report: Report) -> None:
        """Measure what is missing of run `seed`."""
        planned = failures(self.size, self.experiment_seed, seed)
        by_key = {keys.lag_key(trial): trial for failure in planned for trial in trials(self.size, failure)}
        todo = [trial for key, trial in by_key.items() if key not in self.known]
        stream = trial_stream(self.experiment_seed, seed)
        training = GptTraining(self.size.model, load_text(self.data, self.size.text), stream, prepared_device())
        first = training.state()
        if todo or keys.rate_key(seed) not in self.known:
            run = undisturbed_run(training, self.size, planned)
            for step, loss in run.curve.points():
                report(keys.curve_key(seed, step), loss)
            report(keys.distance_key(seed), run.rate.distance)
            report(keys.rate_key(seed), run.rate.c)
            for trial in todo:
                measure(training, self.size, run, trial, report)
        if seed < self.size.repeated_seeds:
            self._repeat(training, first, seed, report)

    def _repeat(self, training: GptTraining, first: GptState, seed: int, report: Report) -> None:
        """Train a long run with repeated failures for every rate and strategy that is not known."""
        for rate in self.size.rates:
            lost = repeated_failures(self.size, self.experiment_seed, seed, rate)
            for strategy in REPEATED:
                if keys.repeated_key(seed, rate, strategy.name, self.size.repeated_steps) in self.known:
                    continue
                training.load(first)
                for step, loss in repeated_run(training, self.size, RULES[strategy], lost).points():
                    report(keys.repeated_key(seed, rate, strategy.name, step), loss)


def prepared_device() -> torch.device:
    """Return the device on which trials run, after making its results repeatable where PyTorch can."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # so that no result depends on the number of processes that share the cores
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it matrix products may differ from run to run
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device("cuda", 0)


def undisturbed_run(training: GptTraining, size: TradeoffSize, planned: Sequence[ShardFailure]) -> UndisturbedRun:
    """Train all steps without a failure, from the first state."""
    needed = {trial.saved_at for failure in planned for trial in trials(size, failure)}
    struck = {failure.step for failure in planned}
    gap = size.steps // DISTANCES
    losses, spaced = dict[int, float](), list[list[torch.Tensor]]()
    states, shadows, shadowing = dict[int, GptState](), dict[int, GptState](), dict[int, SimulatedShadow]()
    for step in range(size.steps + 1):
        if step % size.measure_every == 0 or step in struck:
            losses[step] = training.validation_loss()
        if step % gap == 0:
            spaced.append(training.weights())
        if step in needed:
            states[step] = training.state()
        if step in shadowing:
            shadows[step] = shadowing.pop(step).state()
        for failing in struck & {step + SHADOWED}:
            shadowing[failing] = SimulatedShadow(training.state(), WORLD_SIZE)
        training.compute_gradients(step)
        for shadow in shadowing.values():
            shadow.step(training.gradients, training.rate)
        training.apply_gradients()
    curve = LossCurve.of([(step, loss) for step, loss in losses.items() if step % size.measure_every == 0])
    return UndisturbedRun(curve, convergence(spaced, gap), losses, states, shadows)


def convergence(spaced: Sequence[Sequence[torch.Tensor]], gap: int) -> Rate:
    """Return the rate at which weights, taken every `gap` steps, approach the last of them: c for one step, and D."""
    distances = [weight_distance(weights, spaced[-1]) for weights in spaced[:-1]]
    rate = fitted_rate(distances, FITTED)
    return Rate(rate.c ** (1 / gap), rate.distance)


def measure(training: GptTraining, size: TradeoffSize, run: UndisturbedRun, trial: ShardTrial, report: Report) -> None:
    """Recover from a failure as `trial` says, train on, and report the lag and the size of the perturbation."""
    recovered = recovered_state(trial, run, training.compute_dtype)
    training.load(recovered)
    jump = training.validation_loss() - run.losses[trial.failure.step]
    report(f"{trial.key}/jump", jump)
    report(f"{trial.key}/distance", weight_distance(recovered.weights(), run.states[trial.failure.step].weights()))
    report(keys.lag_key(trial), lag(run.curve, followed(training, size, trial.failure.step)))


def recovered_state(trial: ShardTrial, run: UndisturbedRun, gathered: torch.dtype) -> GptState:
    """Return the state from which training continues after the failure of `trial`."""
    live, saved = run.states[trial.failure.step], run.states[trial.saved_at]
    if trial.strategy == ROLLBACK:
        return saved
    if trial.strategy == NOISE:
        return rounded(live)
    rule = RULES.get(trial.strategy, lost_shards.whole)
    source = run.shadows[trial.failure.step] if trial.strategy == SHADOW else saved
    return restore_lost(rule, live, source, trial.failure.lost(trial.lost), WORLD_SIZE, gathered)


def rounded(state: GptState) -> GptState:
    """Return `state` with all weights rounded to bfloat16."""
    rows = [
        RowState(row.weight.to(torch.bfloat16).to(row.weight.dtype), row.first_moment, row.second_moment)
        for row in state.parameters
    ]
    return GptState(tuple(rows), state.step)


def followed(training: GptTraining, size: TradeoffSize, start: int) -> LossCurve:
    """Train from `start` on, and return the losses in the second half of the steps that are followed."""
    measured = list[tuple[int, float]]()
    for step in range(start, start + size.follow + 1):
        if step >= start + size.follow // 2 and step % size.measure_every == 0:
            measured.append((step, training.validation_loss()))
        training.train(step)
    return LossCurve.of(measured)


def repeated_run(training: GptTraining, size: TradeoffSize, rule: Rule, lost: Sequence[frozenset[int]]) -> LossCurve:
    """Train a run in which the ranks `lost[step]` are lost before each step and restored by `rule`."""
    measured, saved = list[tuple[int, float]](), training.state()
    for step, ranks in enumerate(lost):
        if step % size.repeated_interval == 0:
            saved = training.state()
        if ranks:
            training.load(restore_lost(rule, training.state(), saved, ranks, WORLD_SIZE, training.compute_dtype))
        if step % (REPEATED_SPACING * size.measure_every) == 0:
            measured.append((step, training.validation_loss()))
        training.train(step)
    return LossCurve.of([*measured, (len(lost), training.validation_loss())])
