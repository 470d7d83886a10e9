"""The lag of a run behind the undisturbed one: 0 for equal losses, k for losses that are k steps late."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lab.sharded.lag import LossCurve, lag, trend

STEPS = np.arange(0, 801, 4)


def falling(steps: np.ndarray) -> np.ndarray:
    return 2 + 3 * np.exp(-steps / 400)


@given(st.lists(st.floats(0, 10), min_size=60, max_size=60), st.integers(0, 40))
def test_a_run_with_the_losses_of_the_undisturbed_run_has_no_lag(losses: list[float], first: int) -> None:
    reference = LossCurve(np.arange(60) * 4, np.array(losses))
    run = LossCurve(reference.steps[first : first + 10], reference.losses[first : first + 10])
    assert lag(reference, run) == 0


@given(st.integers(-50, 250))
def test_a_run_that_is_k_steps_late_has_a_lag_of_k(late: int) -> None:
    steps = np.arange(400, 464, 4)
    run = LossCurve(steps, falling(steps - late))
    assert lag(LossCurve(STEPS, falling(STEPS)), run) == pytest.approx(late, abs=0.5 + 0.01 * abs(late))


@given(st.integers(0, 100), st.integers(0, 1000))
def test_noise_that_both_runs_share_does_not_change_the_lag(late: int, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.02, len(STEPS))
    shared = LossCurve(STEPS, falling(STEPS) + noise)
    part = slice(100, 116)
    run = LossCurve(STEPS[part], falling(STEPS[part] - late) + noise[part])
    assert lag(shared, run) == pytest.approx(late, abs=3 + 0.2 * late)


def test_a_run_that_fails_to_train_is_behind_by_all_its_steps() -> None:
    steps = np.arange(400, 464, 4)
    for losses in (np.full(len(steps), 99.0), np.full(len(steps), np.nan)):
        assert lag(LossCurve(STEPS, falling(STEPS)), LossCurve(steps, losses)) == 460


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_the_trend_never_rises(losses: list[float]) -> None:
    curve = trend(LossCurve(np.arange(len(losses)) * 4, np.array(losses)))
    assert np.all(np.diff(curve.losses) <= 1e-12)
