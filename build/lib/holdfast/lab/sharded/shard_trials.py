"""The trials of one run: train without failures, recover from each failure in every way, and follow the loss."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from holdfast.lab.sharded import trial_keys as keys
from holdfast.lab.sharded.cuda_graphs import recorded
from holdfast.lab.sharded.gpt_training import GptState, GptTraining, weight_distance
from holdfast.lab.sharded.shard_failures import (
    AVERAGED,
    FRESH,
    NEIGHBOURS,
    NOISE,
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
    measured_steps,
    repeated_failures,
    trials,
)
from holdfast.lab.sharded.simulated_shards import SimulatedShadow, restore_lost
from holdfast.lab.sharded.training_text import load_text
from holdfast.lab.sharded.trial_keys import LongRun
from holdfast.lab.simulate.pools import Report
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
LossPoint: TypeAlias = tuple[int, float]
"""The number of steps made, and the validation loss of the mean of the weights after the last of them."""

SHADOWED = 8  # steps that a shadow makes before its owner is lost
DISTANCES = 12  # points of the undisturbed run at which its distance from its end is measured
FITTED = slice(0, 8)  # those to which a rate is fitted: near the end, the distance from it says nothing


@dataclass(frozen=True, slots=True, eq=False)
class UndisturbedRun:
    """A run without failures: its losses and rate, and by step the states and losses that trials need.

    `shadows` has the states that shadows of all shards have computed, at the steps of failures."""

    points: Sequence[LossPoint]
    rate: Rate
    losses: Mapping[int, float]
    states: Mapping[int, GptState]
    shadows: Mapping[int, GptState]


@dataclass(frozen=True, slots=True)
class TradeoffTrials:
    """The trials of an experiment; a call measures those of one part that are not in `known`, and reports each number.

    A part is a long run, or the number of a run, which stands for all its single failures."""

    size: TradeoffSize
    data: Path | None
    experiment_seed: int
    known: Mapping[str, float]

    def __call__(self, part: int | LongRun, report: Report) -> None:
        """Measure what is missing of `part`."""
        if isinstance(part, LongRun):
            self._measure_long_run(part, report)
        else:
            self._measure_failures(part, report)

    def _measure_failures(self, seed: int, report: Report) -> None:
        planned = failures(self.size, self.experiment_seed, seed)
        by_key = {trial.key: trial for failure in planned for trial in trials(self.size, failure)}
        todo = [trial for trial in by_key.values() if not self._is_known(trial)]
        if not todo and keys.rate_key(seed) in self.known:
            return
        training, first = prepared_training(self.size, self.data, self.experiment_seed, seed)
        training.load(first)
        run = undisturbed_run(training, self.size, planned)
        for step, loss in run.points:
            report(keys.curve_key(seed, step), loss)
        report(keys.distance_key(seed), run.rate.distance)
        report(keys.rate_key(seed), run.rate.c)
        for trial in todo:
            measure(training, self.size, run, trial, report)

    def _is_known(self, trial: ShardTrial) -> bool:
        last = measured_steps(self.size, trial.failure.step)[-1]
        return keys.loss_key(trial, last) in self.known

    def _measure_long_run(self, run: LongRun, report: Report) -> None:
        if keys.last_key(self.size, run) in self.known:
            return
        training, first = prepared_training(self.size, self.data, self.experiment_seed, run.seed)
        training.load(first)
        lost = repeated_failures(self.size, self.experiment_seed, run.seed, run.rate)
        (rule,) = (rule for strategy, rule in RULES.items() if strategy.name == run.strategy)
        for step, loss in repeated_run(training, self.size, rule, lost):
            report(keys.repeated_key(run.seed, run.rate, run.strategy, step), loss)


@lru_cache(maxsize=1)
def prepared_training(
    size: TradeoffSize, data: Path | None, experiment_seed: int, seed: int
) -> tuple[GptTraining, GptState]:
    """Return the training of run `seed` and its first state; the next call for the same run returns the same training."""
    stream = int(np.random.default_rng((experiment_seed, seed)).integers(2**62))
    positions = max(size.steps + 1, size.repeated_steps)
    device, text = prepared_device(), load_text(data, size.text)
    record = recorded if device.type == "cuda" else None
    training = GptTraining(size.model, text, stream, device, positions, record)
    return training, training.state()


def prepared_device() -> torch.device:
    """Return the device on which trials run, after making its results repeatable where PyTorch can."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # so that no result depends on the number of processes that share the cores
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it matrix products may differ from run to run
    torch.use_deterministic_algorithms(True)
    # Nothing here reads uninitialized memory; filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cuda", 0)


def undisturbed_run(training: GptTraining, size: TradeoffSize, planned: Sequence[ShardFailure]) -> UndisturbedRun:
    """Train all steps without a failure, from the first state."""
    needed = {trial.saved_at for failure in planned for trial in trials(size, failure)}
    struck = {failure.step for failure in planned}
    gap = size.steps // DISTANCES
    losses, spaced = dict[int, float](), list[list[torch.Tensor]]()
    states, shadows, shadowing = dict[int, GptState](), dict[int, GptState](), dict[int, SimulatedShadow]()
    points: list[LossPoint] = [(0, training.validation_loss())]
    for step in range(size.steps):
        if step in struck:
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
        points += averaged_losses(training, size, step + 1, size.spacing)
    return UndisturbedRun(points, convergence([*spaced, training.weights()], gap), losses, states, shadows)


def averaged_losses(training: GptTraining, size: TradeoffSize, done: int, spacing: int) -> list[LossPoint]:
    """Add the weights after `done` steps to their mean if that is measured next, and return the loss if it is now."""
    until = -done % spacing
    if until < size.averaged:
        training.add_weights()
    return [] if until else [(done, training.averaged_loss())]


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
    for step, loss in followed(training, size, trial.failure.step):
        report(keys.loss_key(trial, step), loss)


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


def followed(training: GptTraining, size: TradeoffSize, start: int) -> list[LossPoint]:
    """Train from `start` on, and return the losses that a trial measures."""
    measured, points = measured_steps(size, start), list[LossPoint]()
    for step in range(start, measured[-1]):
        training.train(step)
        if step + 1 > measured[0] - size.averaged:
            points += averaged_losses(training, size, step + 1, size.spacing)
    return points


def repeated_run(
    training: GptTraining, size: TradeoffSize, rule: Rule, lost: Sequence[frozenset[int]]
) -> list[LossPoint]:
    """Train a run in which the ranks `lost[step]` are lost before each step and restored by `rule`."""
    points: list[LossPoint] = [(0, training.validation_loss())]
    saved = training.state()
    for step, ranks in enumerate(lost):
        if step % size.repeated_interval == 0:
            saved = training.state()
        if ranks:
            training.load(restore_lost(rule, training.state(), saved, ranks, WORLD_SIZE, training.compute_dtype))
        training.train(step)
        points += averaged_losses(training, size, step + 1, REPEATED_SPACING * size.spacing)
    return points
