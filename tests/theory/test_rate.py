"""The rate and the distance read off an iteration are the true ones."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.theory.bounds import adversarial, gaussian, iteration_cost_bound
from holdfast.theory.rate import Rate, fitted_rate, worst_rate
from seeds import seeds

Floats = npt.NDArray[np.float64]


def linear(eigenvalues: list[float], x0: list[float], iterations: int) -> Floats:
    """The states of x[k+1] = A x[k], whose optimum is 0, for a diagonal A."""
    return np.array(x0) * np.array(eigenvalues) ** np.arange(iterations)[:, np.newaxis]


@given(c=st.floats(0.3, 0.999), distance=st.floats(1e-3, 1e3))
def test_a_geometric_trajectory_gives_its_own_rate(c: float, distance: float) -> None:
    distances = distance * c ** np.arange(200)
    for rate in (fitted_rate(distances), worst_rate(distances)):
        assert rate.c == pytest.approx(c)
        assert rate.distance == pytest.approx(distance)


def test_the_effective_distance_is_that_of_the_slowest_direction() -> None:
    distances = np.linalg.norm(linear([0.97, 0.9, 0.5], [0.1, 3.0, 40.0], 300), axis=1)
    rate = fitted_rate(distances)
    assert rate.c == pytest.approx(0.97, rel=1e-6)
    assert rate.distance == pytest.approx(0.1, rel=1e-3)


@given(ratios=st.lists(st.floats(0.1, 0.99), min_size=1, max_size=60))
def test_the_worst_rate_contracts_at_every_step_and_its_envelope_lies_beneath_the_trajectory(
    ratios: list[float],
) -> None:
    distances = 5.0 * np.cumprod([1.0, *ratios])
    rate = worst_rate(distances)
    assert rate.c == pytest.approx(max(ratios))
    assert np.all(distances[1:] <= rate.c * distances[:-1] * (1 + 1e-12))
    assert np.all(rate.distance * rate.c ** np.arange(len(distances)) <= distances * (1 + 1e-9))
    assert rate.distance * rate.c ** len(ratios) == pytest.approx(distances[-1])


def test_a_window_keeps_the_floor_of_rounding_out_of_the_fit() -> None:
    distances = np.maximum(0.8 ** np.arange(300), 1e-15)
    assert fitted_rate(distances).c > 0.99
    assert fitted_rate(distances, slice(50, 140)).c == pytest.approx(0.8)


def test_a_trajectory_that_does_not_contract_has_a_rate_of_one_or_more() -> None:
    assert worst_rate([1.0, 0.5, 0.75]).c == pytest.approx(1.5)


def test_trajectories_without_a_rate_are_refused() -> None:
    with pytest.raises(BadInput, match="cut the trajectory"):
        fitted_rate([1.0, 0.5, 0.0])
    with pytest.raises(BadInput, match="a slope needs 2"):
        fitted_rate([1.0, 0.5])
    with pytest.raises(BadInput, match="no ratio"):
        worst_rate([1.0])
    with pytest.raises(BadInput, match="count from a later one"):
        fitted_rate(np.append(np.ones(10_000), 0.5 ** np.arange(1000)), slice(10_000, None))


def cost_of(matrix: Floats, x: Floats, deltas: Floats, step: int, epsilon: float) -> npt.NDArray[np.int64]:
    """Return how much later each trial, perturbed once at this step, stays within ε; trials run side by side."""
    trials = np.tile(x, (1 + len(deltas), 1))  # the first is not perturbed
    settled = np.zeros(len(trials), dtype=np.int64)
    for k in range(4000):
        settled[np.linalg.norm(trials, axis=1) >= epsilon] = k + 1
        if k == step:
            trials[1:] += deltas
        trials = trials @ matrix.T
    return np.asarray(settled[1:] - settled[0])


@pytest.mark.parametrize("seed", seeds(5))
def test_theorem_3_2_with_the_fitted_rate_holds_for_random_and_is_tight_for_adversarial_perturbations(
    seed: int,
) -> None:
    rng, step, end = np.random.default_rng(seed), 300, 1000
    turn, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    matrix = turn @ np.diag([0.99, *rng.uniform(0.1, 0.97, 3)]) @ turn.T
    x0 = rng.standard_normal(4)
    states = [x0]
    for _ in range(end):
        states.append(matrix @ states[-1])
    distances = np.linalg.norm(states, axis=1)
    rate, epsilon = fitted_rate(distances), float(distances[end]) * 1.0001

    sizes = float(distances[step]) * np.geomspace(0.1, 1000, 60)
    bounds = iteration_cost_bound(rate.c, rate.distance, sizes[:, np.newaxis], step)
    random = np.array([gaussian(4, size, rng) for size in sizes])
    worst = np.array([adversarial(states[step], np.zeros(4), size) for size in sizes])
    assert np.all(cost_of(matrix, x0, random, step, epsilon) <= bounds + 1)
    costs = cost_of(matrix, x0, worst, step, epsilon)
    assert np.all(costs <= bounds + 1)
    assert np.all(costs >= 0.95 * bounds - 1)


def test_rates_compare_by_value() -> None:
    assert worst_rate([1.0, 0.5, 0.25]) == Rate(0.5, 1.0)
