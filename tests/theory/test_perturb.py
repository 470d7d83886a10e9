"""Perturbations have the size, the direction and the error that they promise."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.errors import BadInput
from holdfast.theory import perturb

Floats = npt.NDArray[np.float64]

numbers = arrays(np.float64, st.integers(1, 20), elements=st.floats(allow_nan=False, allow_infinity=False))
singles = arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(y=st.one_of(numbers, singles), bits=st.integers(1, 60))
def test_rounding_to_p_bits_moves_a_number_by_less_than_2_to_the_1_minus_p_of_itself(y: Floats, bits: int) -> None:
    delta = perturb.reduced_precision(y, bits)
    nonzero = y != 0
    # Compared at the scale of 1, where both sides are exact: 2^(1-bits) |y| itself may underflow.
    fraction, exponent = np.frexp(y[nonzero].astype(np.float64))
    relative = np.ldexp(delta[nonzero].astype(np.float64), -exponent)
    assert np.all(np.abs(relative) < np.ldexp(np.abs(fraction), 1 - bits))
    assert np.all(delta[~nonzero] == 0)


@given(y=st.one_of(numbers, singles), bits=st.integers(1, 60))
def test_a_rounded_number_has_no_more_bits_and_is_what_the_perturbation_leads_to(y: Floats, bits: int) -> None:
    rounded = perturb.rounded(y, bits)
    assert rounded.dtype == y.dtype
    mantissa = np.ldexp(np.frexp(rounded.astype(np.float64))[0], bits)
    assert np.all(mantissa == np.rint(mantissa))
    assert np.array_equal(y + perturb.reduced_precision(y, bits), rounded)
    assert np.array_equal(perturb.rounded(rounded, bits), rounded)
    assert np.array_equal(perturb.rounded(-y, bits), -rounded)


def test_rounding_is_to_the_nearest_with_ties_to_even() -> None:
    assert perturb.rounded(np.array([1.0, 1.1, 1.25, 1.75, -1.9, 0.0]), 2).tolist() == [1, 1, 1, 2, -2, 0]


def test_the_smallest_and_the_largest_numbers_stay_finite_and_nonzero() -> None:
    ends = np.array([5e-324, 2.2e-308, np.finfo(np.float64).max])
    assert np.all(np.isfinite(perturb.rounded(ends, 3)))
    assert np.all(perturb.rounded(ends, 3) > 0)


def test_as_many_bits_as_the_type_has_change_nothing() -> None:
    y = np.random.default_rng(0).standard_normal(100)
    assert not np.any(perturb.reduced_precision(y, 53))
    assert np.any(perturb.reduced_precision(y, 52))


def test_rounding_to_11_bits_is_half_precision() -> None:
    y = np.random.default_rng(0).uniform(-100, 100, 1000).astype(np.float32)
    assert np.array_equal(perturb.rounded(y, 11), y.astype(np.float16).astype(np.float32))


@given(size=st.floats(0, 1e6), seed=st.integers(0, 99))
def test_a_gaussian_perturbation_has_the_size_asked_for(size: float, seed: int) -> None:
    delta = perturb.gaussian((3, 4), size, np.random.default_rng(seed))
    assert delta.shape == (3, 4)
    assert np.linalg.norm(delta) == pytest.approx(size)


def test_gaussian_perturbations_prefer_no_direction_and_repeat_with_their_seed() -> None:
    rng = np.random.default_rng(0)
    deltas = np.array([perturb.gaussian(3, 1.0, rng) for _ in range(20_000)])
    assert np.allclose(deltas.T @ deltas / 20_000, np.eye(3) / 3, atol=0.01)
    assert np.array_equal(deltas[0], perturb.gaussian(3, 1.0, np.random.default_rng(0)))


def test_an_adversarial_perturbation_takes_the_state_as_far_from_the_optimum_as_its_size_allows() -> None:
    rng = np.random.default_rng(0)
    x, optimum = rng.standard_normal((2, 5, 3))
    delta = perturb.adversarial(x, optimum, 0.7)
    assert np.linalg.norm(delta) == pytest.approx(0.7)
    assert np.linalg.norm(x + delta - optimum) == pytest.approx(np.linalg.norm(x - optimum) + 0.7)


def test_an_adversarial_perturbation_knows_its_way_however_near_the_optimum_is() -> None:
    assert perturb.adversarial(np.array([3e-300, 4e-300]), np.zeros(2), 5.0) == pytest.approx([3, 4])


def least_squares(x: Floats, shard: tuple[Floats, Floats]) -> Floats:
    features, targets = shard
    return np.asarray(features.T @ (features @ x - targets) / len(targets))


def test_stale_sgd_is_sgd_perturbed_by_the_learning_rate_times_the_staleness() -> None:
    rng, learning_rate = np.random.default_rng(0), 0.1
    features, targets = rng.standard_normal((40, 3)), rng.standard_normal(40)
    shards = [(features[i::4], targets[i::4]) for i in range(4)]
    iterates = [rng.standard_normal(3) for _ in range(6)]
    delays = np.array([0, 1, 3, 5])
    stale = np.mean([least_squares(iterates[5 - delay], shards[m]) for m, delay in enumerate(delays)], axis=0)
    plain = iterates[-1] - learning_rate * least_squares(iterates[-1], (features, targets))
    perturbed = plain - learning_rate * perturb.staleness(least_squares, iterates, shards, delays)
    assert np.allclose(perturbed, iterates[-1] - learning_rate * stale)


def test_fresh_gradients_perturb_nothing() -> None:
    shards = [(np.eye(2), np.ones(2))] * 3
    assert not np.any(perturb.staleness(least_squares, [np.ones(2), np.zeros(2)], shards, np.zeros(3, np.int64)))


def test_a_delay_from_before_the_start_sees_the_first_iterate() -> None:
    shards, iterates = [(np.eye(2), np.ones(2))], [np.ones(2), np.zeros(2)]
    far = perturb.staleness(least_squares, iterates, shards, np.array([99]))
    assert np.array_equal(far, perturb.staleness(least_squares, iterates, shards, np.array([1])))


def test_delays_cover_zero_to_the_bound_and_repeat_with_their_seed() -> None:
    delays = perturb.stale_delays(1000, 3, np.random.default_rng(0))
    assert set(delays.tolist()) == {0, 1, 2, 3}
    assert np.array_equal(delays, perturb.stale_delays(1000, 3, np.random.default_rng(0)))
    assert not np.any(perturb.stale_delays(10, 0, np.random.default_rng(0)))


def test_invalid_perturbations_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(BadInput, match="size is a norm"):
        perturb.gaussian(3, -1.0, rng)
    with pytest.raises(BadInput, match="no direction"):
        perturb.gaussian(0, 1.0, rng)
    with pytest.raises(BadInput, match="at the optimum"):
        perturb.adversarial(np.ones(2), np.ones(2), 1.0)
    with pytest.raises(BadInput, match="mantissa of 0 bits"):
        perturb.rounded(np.ones(2), 0)
    with pytest.raises(BadInput, match="one delay for each shard"):
        perturb.staleness(least_squares, [np.ones(2)], [(np.eye(2), np.ones(2))], np.array([0, 0]))
    with pytest.raises(BadInput, match="lies in the future"):
        perturb.stale_delays(3, -1, rng)
