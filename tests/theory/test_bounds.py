"""The theorems hold on iterations that are run, the bounds are reached by the worst of them, and no number overflows."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.errors import BadInput
from holdfast.theory.bounds import adversarial, full_size, gaussian, iteration_cost_bound, partial_size

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
    deltas = [gaussian(dimension, size, rng) for size in sizes]

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
        return adversarial(y, np.zeros(4), size) if k == step else np.zeros(4)

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


@given(distances=block_distances, data=st.data())
def test_partial_recovery_never_perturbs_more_than_full_recovery(distances: Floats, data: st.DataObject) -> None:
    lost = data.draw(st.lists(st.integers(0, len(distances) - 1)))
    for order in (1, 2, 3, np.inf):
        assert partial_size(distances, lost, order) <= full_size(distances, order)
    assert partial_size(distances, range(len(distances))) == full_size(distances)
    assert partial_size(distances, []) == 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: iteration_cost_bound(1.0, 1.0, [1.0], [0]), "The rate c must be between 0 and 1"),
        (lambda: iteration_cost_bound([0.5, -1.0], 1.0, [1.0], [0]), r"got -1\.\.0\.5"),
        (lambda: iteration_cost_bound(0.5, 0.0, [1.0], [0]), "distance to the optimum is 0"),
        (lambda: iteration_cost_bound(0.5, 1.0, [-1.0], [0]), "size is a norm"),
        (lambda: iteration_cost_bound(0.5, 1.0, [1.0], [-1]), "counted from 0"),
        (lambda: partial_size(np.ones(3), [3]), "not all among the 3 blocks"),
    ],
)
def test_numbers_outside_the_theory_are_refused_in_one_line(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refusal:
        call()
    assert "\n" not in str(refusal.value)


@given(size=st.floats(0, 1e6), seed=st.integers(0, 99))
def test_a_gaussian_perturbation_has_the_size_asked_for(size: float, seed: int) -> None:
    delta = gaussian((3, 4), size, np.random.default_rng(seed))
    assert delta.shape == (3, 4)
    assert np.linalg.norm(delta) == pytest.approx(size)


def test_gaussian_perturbations_prefer_no_direction_and_repeat_with_their_seed() -> None:
    rng = np.random.default_rng(0)
    deltas = np.array([gaussian(3, 1.0, rng) for _ in range(20_000)])
    assert np.allclose(deltas.T @ deltas / 20_000, np.eye(3) / 3, atol=0.01)
    assert np.array_equal(deltas[0], gaussian(3, 1.0, np.random.default_rng(0)))


def test_an_adversarial_perturbation_takes_the_state_as_far_from_the_optimum_as_its_size_allows() -> None:
    rng = np.random.default_rng(0)
    x, optimum = rng.standard_normal((2, 5, 3))
    delta = adversarial(x, optimum, 0.7)
    assert np.linalg.norm(delta) == pytest.approx(0.7)
    assert np.linalg.norm(x + delta - optimum) == pytest.approx(np.linalg.norm(x - optimum) + 0.7)


def test_an_adversarial_perturbation_knows_its_way_however_near_the_optimum_is() -> None:
    assert adversarial(np.array([3e-300, 4e-300]), np.zeros(2), 5.0) == pytest.approx([3, 4])


def test_invalid_perturbations_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(BadInput, match="size is a norm"):
        gaussian(3, -1.0, rng)
    with pytest.raises(BadInput, match="no direction"):
        gaussian(0, 1.0, rng)
    with pytest.raises(BadInput, match="at the optimum"):
        adversarial(np.ones(2), np.ones(2), 1.0)
