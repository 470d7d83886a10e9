"""The theorems hold on iterations that are run, the bounds are reached by the worst of them, and no number overflows."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.errors import BadInput
from holdfast.theory import perturb
from holdfast.theory.bounds import (
    endless_cost_bound,
    expected_partial_square,
    full_size,
    irreducible_error,
    iteration_cost_bound,
    partial_size,
)

Floats = npt.NDArray[np.float64]
Perturbation = Callable[[int, Floats], Floats]

seeds = st.integers(0, 2**32 - 1)
block_distances = arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1e6))


def contraction(dimension: int, c: float, rng: np.random.Generator) -> Floats:
    """A random matrix of norm c, in general neither symmetric nor normal."""
    matrix = rng.standard_normal((dimension, dimension))
    return matrix * (c / np.linalg.norm(matrix, 2))


def run(matrix: Floats, x0: Floats, iterations: int, delta: Perturbation | None = None) -> Floats:
    """The distances to the optimum 0 of y[k+1] = A (y[k] + δ[k])."""
    y, distances = x0, [np.linalg.norm(x0)]
    for k in range(iterations):
        y = matrix @ (y + delta(k, y) if delta else y)
        distances.append(np.linalg.norm(y))
    return np.array(distances)


def settled(distances: Floats, epsilon: float) -> int:
    """The first iteration from which the distance stays below ε."""
    assert distances[-1] < epsilon
    return int(np.max(np.flatnonzero(distances >= epsilon), initial=-1)) + 1


@settings(max_examples=60)
@given(seed=seeds, dimension=st.integers(1, 6), c=st.floats(0.3, 0.97), scale=st.floats(1e-3, 1e3))
def test_no_random_perturbations_of_a_linear_contraction_cost_more_than_theorem_3_2(
    seed: int, dimension: int, c: float, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    matrix, x0 = contraction(dimension, c, rng), rng.standard_normal(dimension)
    plain = run(matrix, x0, 40)
    end = int(np.max(np.flatnonzero(plain > 1e-200)))
    epsilon = float(plain[end]) * 1.0001
    steps = rng.integers(0, max(end, 1), size=3)
    sizes = scale * plain[steps] * rng.random(3)
    deltas = [perturb.gaussian(dimension, size, rng) for size in sizes]

    def delta(k: int, y: Floats) -> Floats:
        return sum((d for d, step in zip(deltas, steps, strict=True) if step == k), np.zeros(dimension))

    unperturbed = settled(plain, epsilon)
    distance = plain[unperturbed] * c**-unperturbed
    bound = float(iteration_cost_bound(c, distance, sizes, steps))
    perturbed = run(matrix, x0, unperturbed + math.ceil(bound) + 2, delta)
    assert settled(perturbed, epsilon) - unperturbed <= bound + 1


@pytest.mark.parametrize("c", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("ratio", [0.01, 1.0, 100.0])
def test_an_adversarial_perturbation_reaches_theorem_3_2_within_rounding(c: float, ratio: float) -> None:
    rng = np.random.default_rng(0)
    turn, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    matrix, x0, step = c * turn, rng.standard_normal(4), 20  # every direction is as slow as the slowest
    size = ratio * c**step * float(np.linalg.norm(x0))
    epsilon = c**60 * float(np.linalg.norm(x0)) * 0.999

    def delta(k: int, y: Floats) -> Floats:
        return perturb.adversarial(y, np.zeros(4), size) if k == step else np.zeros(4)

    bound = float(iteration_cost_bound(c, np.linalg.norm(x0), [size], [step]))
    iterations = 70 + math.ceil(bound)
    cost = settled(run(matrix, x0, iterations, delta), epsilon) - settled(run(matrix, x0, iterations), epsilon)
    assert bound - 1 <= cost <= bound + 1


def test_the_initial_distance_is_unsafe_if_the_start_lies_in_a_fast_direction() -> None:
    matrix, x0, epsilon = np.diag([0.9, 0.5]), np.array([1e-3, 1.0]), 1e-5

    def delta(k: int, y: Floats) -> Floats:
        return np.array([1.0, 0.0]) if k == 10 else np.zeros(2)

    plain = run(matrix, x0, 300)
    cost = settled(run(matrix, x0, 300, delta), epsilon) - settled(plain, epsilon)
    assert cost > iteration_cost_bound(0.9, np.linalg.norm(x0), [1.0], [10]) + 1
    assert cost <= iteration_cost_bound(0.9, 1e-3, [1.0], [10]) + 1


def test_a_perturbation_ten_million_iterations_in_overflows_nothing() -> None:
    late = 10_000_000
    assert float(iteration_cost_bound(0.5, 1.0, [1.0], [late])) == pytest.approx(late)
    assert float(iteration_cost_bound(0.5, 2.0**-1000, [0.25], [0])) == pytest.approx(998)


def test_a_tiny_perturbation_keeps_its_digits() -> None:
    assert float(iteration_cost_bound(math.exp(-1), 1.0, [1e-30], [0])) == pytest.approx(1e-30, rel=1e-12, abs=0)


def test_no_perturbation_costs_nothing() -> None:
    assert iteration_cost_bound(0.9, 1.0, [], []) == 0
    assert iteration_cost_bound(0.9, 1.0, [0.0, 0.0], [3, 8]) == 0


@given(
    c=st.floats(0.05, 0.99),
    distance=st.floats(1e-3, 1e3),
    sizes=st.lists(st.floats(0, 10), min_size=1, max_size=5),
)
def test_the_bound_computed_in_logarithms_is_the_bound_of_the_paper(
    c: float, distance: float, sizes: list[float]
) -> None:
    total = sum(size / c**step for step, size in enumerate(sizes))
    expected = math.log1p(total / distance) / math.log(1 / c)
    assert float(iteration_cost_bound(c, distance, sizes, range(len(sizes)))) == pytest.approx(expected, rel=1e-9)


def test_many_trials_at_once_are_each_trial_alone() -> None:
    rng = np.random.default_rng(0)
    c, distance, sizes, steps = rng.random(50), rng.random(50), rng.random((50, 3)), rng.integers(0, 99, (50, 3))
    together = iteration_cost_bound(c, distance, sizes, steps)
    alone = [float(iteration_cost_bound(*trial)) for trial in zip(c, distance, sizes, steps, strict=True)]
    assert together.tolist() == alone
    singles = iteration_cost_bound(0.9, 1.0, sizes[:, :1], 50)
    assert singles.tolist() == [float(iteration_cost_bound(0.9, 1.0, [size], [50])) for size in sizes[:, 0]]


def test_a_perturbation_at_every_iteration_leaves_exactly_the_irreducible_error() -> None:
    def delta(k: int, y: Floats) -> Floats:
        return perturb.adversarial(y, np.zeros(3), 0.2)

    assert run(0.8 * np.eye(3), np.ones(3), 300, delta)[-1] == pytest.approx(float(irreducible_error(0.8, 0.2)))


@settings(max_examples=60)
@given(seed=seeds, dimension=st.integers(1, 6), c=st.floats(0.3, 0.97), above=st.floats(1.01, 20), worst=st.booleans())
def test_no_endless_perturbations_of_a_linear_contraction_cost_more_than_their_bound(
    seed: int, dimension: int, c: float, above: float, worst: bool
) -> None:
    rng = np.random.default_rng(seed)
    matrix, x0 = contraction(dimension, c, rng), rng.standard_normal(dimension)
    distance = float(np.linalg.norm(x0))
    size = 10 ** rng.uniform(-4, 0) * distance
    epsilon = float(irreducible_error(c, size)) * above

    def delta(k: int, y: Floats) -> Floats:
        away = worst and bool(np.any(y))
        return perturb.adversarial(y, np.zeros(dimension), size) if away else perturb.gaussian(dimension, size, rng)

    bound = float(endless_cost_bound(c, distance, size, epsilon))
    plain = settled(run(matrix, x0, 2000), epsilon)
    assert settled(run(matrix, x0, plain + math.ceil(bound) + 50, delta), epsilon) - plain <= bound + 1


@pytest.mark.parametrize("above", [1.001, 1.1, 3.0])
@pytest.mark.parametrize("distance", [0.6, 50.0])
def test_the_worst_endless_perturbations_reach_their_bound_within_rounding(above: float, distance: float) -> None:
    c, size = 0.95, 0.01
    epsilon = float(irreducible_error(c, size)) * above

    def delta(k: int, y: Floats) -> Floats:
        return perturb.adversarial(y, np.zeros(2), size)

    x0 = np.array([distance, 0.0])
    cost = settled(run(c * np.eye(2), x0, 1000, delta), epsilon) - settled(run(c * np.eye(2), x0, 1000), epsilon)
    bound = float(endless_cost_bound(c, distance, size, epsilon))
    assert bound - 1 <= cost <= bound + 1


def test_an_epsilon_within_the_irreducible_error_is_never_reached() -> None:
    assert irreducible_error(0.5, 2.0) == 2.0
    assert endless_cost_bound(0.5, 10.0, 2.0, [1.0, 2.0]).tolist() == [math.inf, math.inf]


def test_a_start_within_epsilon_costs_nothing_even_within_the_irreducible_error() -> None:
    assert endless_cost_bound(0.5, [0.1, 2.0, 2.5, 3.0], 2.0, 3.0).tolist() == [0, 0, 0, 0]


def test_the_endless_bound_vanishes_with_the_perturbations() -> None:
    assert endless_cost_bound(0.9, 10.0, 0.0, 1e-3) == 0
    assert float(endless_cost_bound(0.9, 10.0, 1e-12, 1e-3)) == pytest.approx(0, abs=1e-6)


@given(distances=block_distances, data=st.data())
def test_partial_recovery_never_perturbs_more_than_full_recovery(distances: Floats, data: st.DataObject) -> None:
    lost = data.draw(st.lists(st.integers(0, len(distances) - 1)))
    for order in (1, 2, 3, np.inf):
        assert partial_size(distances, lost, order) <= full_size(distances, order)
    assert partial_size(distances, range(len(distances))) == full_size(distances)
    assert partial_size(distances, []) == 0


@settings(max_examples=30)
@given(distances=arrays(np.float64, st.integers(1, 8), elements=st.floats(0, 1e3)), data=st.data())
def test_over_all_subsets_of_m_blocks_partial_recovery_averages_m_over_n_of_the_square(
    distances: Floats, data: st.DataObject
) -> None:
    n = len(distances)
    m = data.draw(st.integers(0, n))
    squares = [partial_size(distances, lost) ** 2 for lost in itertools.combinations(range(n), m)]
    assert np.mean(squares) == pytest.approx(expected_partial_square(distances, m / n), rel=1e-12)


def test_blocks_lost_with_their_node_average_the_same_share_of_the_square() -> None:
    rng, nodes = np.random.default_rng(0), 8
    distances = rng.exponential(size=400)
    owners = [rng.permutation(np.arange(400) % nodes) for _ in range(4000)]
    squares = [partial_size(distances, np.flatnonzero(owner < 3)) ** 2 for owner in owners]
    assert np.mean(squares) == pytest.approx(expected_partial_square(distances, 3 / nodes), rel=0.01)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: iteration_cost_bound(1.0, 1.0, [1.0], [0]), "The rate c must be between 0 and 1"),
        (lambda: iteration_cost_bound([0.5, -1.0], 1.0, [1.0], [0]), r"got -1\.\.0\.5"),
        (lambda: iteration_cost_bound(0.5, 0.0, [1.0], [0]), "distance to the optimum is 0"),
        (lambda: iteration_cost_bound(0.5, 1.0, [-1.0], [0]), "size is a norm"),
        (lambda: iteration_cost_bound(0.5, 1.0, [1.0], [-1]), "counted from 0"),
        (lambda: endless_cost_bound(0.5, 1.0, 0.1, math.nan), "epsilon is nan"),
        (lambda: partial_size(np.ones(3), [3]), "not all among the 3 blocks"),
        (lambda: expected_partial_square(np.ones(3), 1.5), "p must be between 0 and 1"),
    ],
)
def test_numbers_outside_the_theory_are_refused_in_one_line(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refusal:
        call()
    assert "\n" not in str(refusal.value)
