"""Costs that are read from the log of trials: in steps, and relative to the age of the snapshot."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from holdfast.lab.sharded.claims import claims
from holdfast.lab.sharded.measured_costs import MeasuredCosts, with_lags
from holdfast.lab.sharded.shard_failures import (
    AVERAGED,
    FRESH,
    NOISE,
    QUICK,
    ROLLBACK,
    SHADOW,
    STRATEGIES,
    WHOLE,
    failures,
    measured_steps,
    trials,
)
from holdfast.lab.sharded.trial_keys import curve_key, curve_steps, distance_key, lag_key, loss_key, rate_key
from holdfast.theory.bounds import iteration_cost_bound

SIZE = replace(QUICK, seeds=3)
SHARES = {WHOLE: 0.2, FRESH: 0.01, AVERAGED: 0.5}  # of the age of the newest of the rarest snapshots
HALF = Fraction(1, 2)


def costs() -> MeasuredCosts:
    known: dict[str, float] = {}
    for seed in range(SIZE.seeds):
        known |= {rate_key(seed): 0.99, distance_key(seed): 10.0}
        for failure in failures(SIZE, 0, seed):
            for trial in trials(SIZE, failure):
                age = failure.step - trial.saved_at if trial.interval else failure.step % max(SIZE.intervals)
                known[lag_key(trial)] = SHARES.get(trial.strategy, 1.0 if trial.strategy == ROLLBACK else 0.0) * age
                known[f"{trial.key}/distance"] = 2.0
    return MeasuredCosts(SIZE, 0, known)


def test_a_cost_is_compared_with_the_exact_cost_of_a_rollback() -> None:
    measured = costs()
    assert measured.ratio(WHOLE, HALF, 64).value == pytest.approx(0.2)
    assert measured.ratio(AVERAGED, HALF, max(SIZE.intervals)).value == pytest.approx(0.5)
    assert not measured.rollback_errors().any()
    assert measured.noise_floor == 0


def test_every_claim_has_its_verdict_for_each_interval() -> None:
    made = {claim.id: claim for claim in claims(costs())}
    assert len(made) == 6 * len(SIZE.intervals) + 1
    assert not made["whole-1-of-8-every-64"].holds  # 0.2 > 0.15
    assert made["whole-1-of-4-every-64"].holds
    assert made["fresh-1-of-2-every-64"].holds
    assert not made["fresh-averaged-1-of-2-every-16"].holds
    assert made["replay-exact"].holds


def test_an_inexact_shadow_refutes_the_claim_on_replay() -> None:
    measured = costs()
    wrong = {lag_key(trial): 3.0 for lost in SHADOW.losses for trial in measured.trials(SHADOW, lost)}
    (claim,) = (
        claim for claim in claims(replace(measured, known={**measured.known, **wrong})) if claim.id == "replay-exact"
    )
    assert not claim.holds
    assert claim.resolved


def test_the_bound_is_that_of_the_theorem_for_the_perturbation_of_the_weights() -> None:
    measured = costs()
    (trial, *_) = measured.trials(WHOLE, HALF, 64)
    expected = iteration_cost_bound(0.99, 10.0, [2.0], [trial.failure.step])
    assert measured.bound(trial) == pytest.approx(float(expected))


def test_strategies_have_different_names() -> None:
    assert len({strategy.name for strategy in STRATEGIES}) == len(STRATEGIES)
    assert NOISE in STRATEGIES


def test_a_lag_is_computed_from_the_losses_of_the_trial_and_of_the_undisturbed_run() -> None:
    def loss(step: int) -> float:
        return 2 + 3 * float(np.exp(-step / 400))

    known = {curve_key(seed, step): loss(step) for seed in range(SIZE.seeds) for step in curve_steps(SIZE)}
    for seed in range(SIZE.seeds):
        for failure in failures(SIZE, 0, seed):
            for trial in trials(SIZE, failure):
                late = 7 if trial.strategy == WHOLE else 0
                known |= {loss_key(trial, step): loss(step - late) for step in measured_steps(SIZE, failure.step)}
    costs = MeasuredCosts(SIZE, 0, with_lags(SIZE, 0, known))
    assert costs.lags(WHOLE, HALF, 64) == pytest.approx(7, abs=0.7)
    assert costs.lags(FRESH, HALF, 64) == pytest.approx(0, abs=1e-6)
