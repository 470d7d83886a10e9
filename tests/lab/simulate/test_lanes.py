"""Simulation: batched trials are the trials one would run one by one, whatever their company."""

import os
import signal
from fractions import Fraction
from functools import cache
from multiprocessing import parent_process

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.blocks.division import Floats, along
from holdfast.blocks.policy import Policy
from holdfast.blocks.recoveries import full, partial
from holdfast.errors import BadInput, WorkerLost
from holdfast.lab.simulate.lanes import (
    Start,
    Trajectory,
    continue_training,
    crossing,
    iterations_to_criterion,
    start_as_given,
    trajectory,
)
from holdfast.lab.simulate.strategy import checkpoint_state, last_saved, recovered_state
from holdfast.workloads.mlr import LogisticRegression, mlr
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.workload import Arrays, Clock, Stack


@cache
def digits() -> tuple[LogisticRegression, Trajectory]:
    workload = mlr("digits")
    return workload, trajectory(workload)


@cache
def random_starts(count: int) -> list[Start]:
    _, run = digits()
    rng = np.random.default_rng(5)
    weights = run.states[30]["weights"]
    noisy = [(weights + rng.normal(0, 0.1, weights.shape)).astype(np.float32) for _ in range(count)]
    return [Start({"weights": each}, 30) for each in noisy]


def one_by_one(workload: LogisticRegression, start: Arrays, limit: int) -> float:
    """A trial as one would write it without this package."""
    x, y, weights = workload.data.x, workload.data.y, start["weights"].copy()
    truth = np.eye(workload.data.classes, dtype=np.float32)[y]

    def probabilities(rows: slice | None = None) -> np.ndarray:
        scores = (x if rows is None else x[rows]) @ weights
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(scores / scores.sum(axis=1, keepdims=True))

    for k in range(limit + 1):
        loss = -np.log(probabilities()[np.arange(len(y)), y].astype(np.float64)).sum()
        if loss < workload.criterion:
            return k
        for first in range(0, len(y), workload.batch):
            rows = slice(first, first + workload.batch)
            weights -= np.float32(workload.rate) * (x[rows].T @ (probabilities(rows) - truth[rows]))
    return np.inf


def test_batched_trials_take_as_many_iterations_as_trials_run_one_by_one() -> None:
    workload, _ = digits()
    starts = random_starts(6)
    counts = iterations_to_criterion(workload, starts, start_as_given, limit=200)
    whole = np.array([one_by_one(workload, start.state, 200) for start in starts])
    # The two add up in different orders: a count near a whole number may lie on either side of it.
    assert np.all((whole - 1.001 < counts) & (counts < whole + 0.001))


def test_results_do_not_depend_on_the_order_or_the_company_of_trials() -> None:
    workload, _ = digits()
    starts = random_starts(40)
    together = iterations_to_criterion(workload, starts, start_as_given, limit=200)
    order = np.random.default_rng(1).permutation(len(starts))
    assert np.array_equal(
        iterations_to_criterion(workload, [starts[i] for i in order], start_as_given, limit=200), together[order]
    )
    assert np.array_equal(iterations_to_criterion(workload, starts[3:8], start_as_given, limit=200), together[3:8])


def test_a_state_is_advanced_to_the_same_bits_in_every_lane() -> None:
    workload, _ = digits()
    starts = random_starts(workload.lanes)
    stack = np.stack([start.state["weights"] for start in starts], axis=-1)
    order = np.random.default_rng(2).permutation(workload.lanes)
    clock = Clock(np.full(workload.lanes, 30), np.zeros(workload.lanes, dtype=np.int64))
    advanced = workload.advance({"weights": stack}, clock)["weights"]
    assert np.array_equal(
        workload.advance({"weights": stack[..., order].copy()}, clock)["weights"], advanced[..., order]
    )


def test_results_do_not_depend_on_the_number_of_jobs() -> None:
    workload, _ = digits()
    starts = random_starts(40)
    counted: list[int] = []
    assert np.array_equal(
        iterations_to_criterion(
            workload, starts, start_as_given, limit=200, jobs=2, done=lambda trial, count: counted.append(trial)
        ),
        iterations_to_criterion(workload, starts, start_as_given, limit=200),
    )
    assert sorted(counted) == list(range(len(starts)))


def test_a_trial_below_the_criterion_takes_0_iterations_and_one_at_the_limit_infinity() -> None:
    workload, run = digits()
    counted: list[int] = []
    found = iterations_to_criterion(
        workload,
        [Start(run.states[k], k) for k in (-1, -4, 0)],
        start_as_given,
        limit=10,
        done=lambda trial, count: counted.append(trial),
    )
    assert np.ceil(found).tolist() == [0, 3, np.inf]
    assert sorted(counted) == [0, 1, 2]


def test_a_trajectory_ends_at_the_first_iterate_under_the_criterion() -> None:
    workload, run = digits()
    assert np.all(run.losses[:-1] >= workload.criterion)
    assert run.losses[-1] < workload.criterion
    assert run.length == len(run.states) - 1
    assert np.array_equal(continue_training(workload, run.states[3], 3, 5)["weights"], run.states[5]["weights"])


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_an_iteration_crosses_the_criterion_once_within_itself(criterion: float, above: float, below: float) -> None:
    where = crossing(criterion + above, criterion - below, criterion)
    assert 0 < where <= 1
    assert where == pytest.approx(above / (above + below), rel=1e-3, abs=1e-4)
    assert crossing(np.inf, criterion - below, criterion) == 1


def test_a_run_that_does_not_converge_reports_its_last_loss() -> None:
    with pytest.raises(BadInput, match=r"not below its criterion .* after 10 iterations"):
        trajectory(QuadraticProgram(), limit=10)


@given(
    st.sampled_from(["priority", "round", "random"]),
    st.sampled_from([Fraction(1, 2), Fraction(1, 4)]),
    st.integers(0, 99),
)
@settings(max_examples=20)
def test_ages_describe_the_running_checkpoint_that_the_policy_would_have_written(
    ranking: str, fraction: Fraction, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    states = [{"w": rng.normal(size=(8, 2))} for _ in range(13)]
    blocks, policy = along(states[0], "w"), Policy(ranking=ranking, interval=4, fraction=fraction, seed=seed)
    table = last_saved(states, blocks, lambda b, x, y: np.linalg.norm(x["w"] - y["w"], axis=1), policy)
    assert np.all(np.diff(table, axis=0) >= 0)
    for step in range(13):
        saved = checkpoint_state(states, blocks, table[step])
        for row in range(8):
            assert np.array_equal(saved["w"][row], states[table[step, row]]["w"][row])
        changed = np.flatnonzero(table[step] == step) if step else np.arange(8)
        assert len(changed) == (8 if not step else 8 * fraction if policy.due(step) else 0)


def test_full_recovery_costs_exactly_the_iterations_since_the_checkpoint() -> None:
    workload, run = digits()
    table = last_saved(run.states, workload.blocks, workload.norm, Policy(ranking="full", interval=8))
    steps = [1, 8, 13, 23, 40]
    starts = [
        Start(recovered_state(run.states, workload.blocks, table[step], full, step, np.array([0])), step)
        for step in steps
    ]
    costs = (
        steps + iterations_to_criterion(workload, starts, start_as_given, limit=200) - run.crossed(workload.criterion)
    )
    assert costs == pytest.approx([1, 0, 5, 7, 0], abs=1e-4)  # rounding of a loss, whose stack has another width


def test_partial_recovery_takes_only_the_lost_rows_from_the_checkpoint() -> None:
    workload, run = digits()
    table = last_saved(run.states, workload.blocks, workload.norm, Policy(ranking="full", interval=8))
    after = recovered_state(run.states, workload.blocks, table[13], partial, 13, np.array([5, 20]))["weights"]
    stale = np.isin(np.arange(len(after)), [5, 20])
    assert np.array_equal(after[stale], run.states[8]["weights"][stale])
    assert np.array_equal(after[~stale], run.states[13]["weights"][~stale])


class Deadly(QuadraticProgram):
    """A workload whose process is killed while it works."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        if parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().advance(stack, clock)


def test_a_killed_process_is_reported_in_one_line_and_does_not_hang() -> None:
    workload = Deadly(lanes=2)
    with pytest.raises(WorkerLost, match="use fewer --jobs"):
        iterations_to_criterion(workload, [Start(workload.start(), 0)] * 6, start_as_given, limit=10, jobs=2)


class Drawing(QuadraticProgram):
    """A workload that takes a random step, and converges when the step is a good one."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        moments = zip(clock.stream, clock.iteration, strict=True)
        return {"x": np.stack([np.random.default_rng(moment).random(4) for moment in moments], axis=-1)}

    def loss(self, stack: Stack) -> Floats:
        return np.asarray(stack["x"][0])


def test_a_trial_draws_by_its_stream_and_iteration_whatever_lane_it_has_and_whenever_it_began() -> None:
    workload = Drawing(lanes=3, criterion=0.1)
    start = {"x": np.ones(4)}
    moments = [(iteration, stream) for stream in range(4) for iteration in (5, 7, 2)]
    found = iterations_to_criterion(workload, [Start(start, *moment) for moment in moments], start_as_given, limit=1000)

    def alone(iteration: int, stream: int) -> int:
        return next(k for k in range(1, 1000) if np.random.default_rng((stream, iteration + k - 1)).random(4)[0] < 0.1)

    assert np.ceil(found).tolist() == [alone(*moment) for moment in moments]


class Swamp(QuadraticProgram):
    """A workload that claims to be steady but is not: its loss hardly falls for long, and then all at once."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        return {"x": stack["x"] + 1}

    def loss(self, stack: Stack) -> Floats:
        age = stack["x"][0]
        return np.where(age < 40, 100 - 0.1 * age, 96 - 10 * (age - 40))


def test_a_misleading_slope_costs_time_and_never_a_wrong_count() -> None:
    starts = [Start({"x": np.full(4, float(first))}, 0) for first in (0, 5, 17, 39)]
    counts = [
        iterations_to_criterion(Swamp(lanes=3, criterion=50.0, steady=steady), starts, start_as_given, limit=99)
        for steady in (True, False)
    ]
    assert counts[0].tolist() == counts[1].tolist()
    assert counts[0] == pytest.approx([44.6, 39.6, 27.6, 5.6])  # from 56 to 46 it meets 50 after six tenths


def test_a_steady_loss_is_looked_at_less_often_than_it_falls() -> None:
    workload, run = digits()
    looks = []

    class Counting(LogisticRegression):
        def loss(self, stack: Stack) -> Floats:
            looks.append(1)
            return super().loss(stack)

    counting = Counting(workload.data, workload.batch, workload.rate, workload.criterion)
    (count,) = iterations_to_criterion(counting, [Start(run.states[0], 0)], start_as_given, limit=200)
    assert count == pytest.approx(run.crossed(workload.criterion), abs=1e-4)
    assert len(looks) < run.length / 2
