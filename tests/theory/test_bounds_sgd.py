"""SGD under perturbations settles where its recursion says, and not later."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.theory.bounds import harmonic, sgd_cost_bound, sgd_iterations

Floats = npt.NDArray[np.float64]


def settled(distances: Floats, epsilon: float) -> int:
    """The first iteration from which the distance stays below ε."""
    assert distances[-1] < epsilon
    return int(np.max(np.flatnonzero(distances >= epsilon), initial=-1)) + 1


def test_unperturbed_sgd_with_steps_1_over_k_follows_the_harmonic_numbers() -> None:
    # With α[k] = 1/(k+1), k r[k]² = (k-1) r[k-1]² + G²/k, hence r[k]² = G² H[k] / k.
    harmonics = np.cumsum(1 / np.arange(1, 5001))
    norms = 2.0 * np.sqrt(harmonics / np.arange(1, 5001))
    assert sgd_iterations(harmonic(1, 1), 2.0, 10.0, 0.1) == 1 + int(np.argmax(norms < 0.1))


def worst_case_sgd(
    alpha: Callable[[int], float], gradient: float, distance: float, delta: dict[int, float], iterations: int
) -> Floats:
    """The mean distances of SGD on a line, where (15) and the triangle inequality are both equalities in squares."""
    squares = [distance**2]
    for k in range(iterations):
        moved = math.sqrt(squares[-1]) + delta.get(k, 0.0)
        squares.append((1 - alpha(k)) * moved**2 + alpha(k) ** 2 * gradient**2)
    return np.sqrt(squares)


@settings(max_examples=40)
@given(
    scale=st.floats(1.1, 5),
    gradient=st.floats(0, 3),
    distance=st.floats(0.5, 50),
    epsilon=st.floats(0.2, 2),
    delta=st.dictionaries(st.integers(0, 300), st.floats(0, 20), max_size=4),
)
def test_the_sgd_bound_is_where_the_worst_recursion_settles(
    scale: float, gradient: float, distance: float, epsilon: float, delta: dict[int, float]
) -> None:
    alpha = harmonic(scale, 6.0)
    k = sgd_iterations(alpha, gradient, distance, epsilon, sizes=list(delta.values()), steps=list(delta), limit=20_000)
    if math.isfinite(k):
        distances = worst_case_sgd(alpha, gradient, distance, delta, int(k) + 500)
        assert settled(distances, epsilon * (1 + 1e-9)) <= k
        assert k == 0 or distances[int(k) - 1] >= epsilon * (1 - 1e-9)


def test_real_sgd_with_a_perturbation_settles_no_later_than_its_bound() -> None:
    # On ℓ = ‖x‖²/2 with gradient noise of variance σ², (15) holds with G = σ: (1-α)² ≤ 1-α.
    rng, alpha, sigma, epsilon, step, size = np.random.default_rng(0), harmonic(2, 4), 1.0, 0.2, 50, 3.0
    k = sgd_iterations(alpha, sigma, 5.0, epsilon, sizes=[size], steps=[step])
    x = np.tile([5.0, 0.0, 0.0], (4000, 1))
    norms = []
    for i in range(int(k) + 50):
        norms.append(math.sqrt(np.mean(np.sum(x**2, axis=1))))
        if i == step:
            x += size * x / np.linalg.norm(x, axis=1, keepdims=True)
        x -= alpha(i) * (x + rng.normal(scale=sigma / math.sqrt(3), size=x.shape))
    assert settled(np.array(norms), epsilon) <= k


def test_sgd_below_epsilon_before_a_perturbation_counts_from_its_return() -> None:
    early = sgd_iterations(harmonic(2, 4), 1.0, 1.0, 0.3)
    assert sgd_iterations(harmonic(2, 4), 1.0, 1.0, 0.3, sizes=[5.0], steps=[200]) > 200 > early
    assert sgd_cost_bound(harmonic(2, 4), 1.0, 1.0, 0.3, sizes=[5.0], steps=[200]) > 200 - early
    assert sgd_cost_bound(harmonic(2, 4), 1.0, 1.0, 0.3, sizes=[0.0], steps=[200]) == 0


def test_two_perturbations_of_sgd_at_one_step_are_their_sum() -> None:
    two = sgd_iterations(harmonic(2, 4), 1.0, 1.0, 0.2, sizes=[1.0, 2.0], steps=[9, 9])
    assert two == sgd_iterations(harmonic(2, 4), 1.0, 1.0, 0.2, sizes=[3.0], steps=[9])


def test_sgd_that_does_not_converge_takes_for_ever() -> None:
    assert sgd_iterations(lambda k: 0.5, 1.0, 1.0, 0.1, limit=1000) == math.inf
    with pytest.raises(BadInput, match="even unperturbed"):
        sgd_cost_bound(lambda k: 0.5, 1.0, 1.0, 0.1, sizes=[1.0], steps=[1], limit=1000)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: harmonic(2, 1), "0 < scale <= offset"),
        (lambda: sgd_iterations(lambda k: 2.0, 1.0, 1.0, 0.1), "no contraction"),
        (lambda: sgd_iterations(harmonic(1, 1), 1.0, 1.0, 0.1, sizes=[1.0]), "do not pair"),
    ],
)
def test_invalid_schedules_and_perturbations_are_refused(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        call()
