"""Bounds on the cost of perturbing an iteration: the paper's theorems as functions of numbers.

Iterations obey y[k+1] = f(y[k] + δ[k]) (2), with f a contraction towards x*: ‖f(y) - x*‖ ≤ c ‖y - x*‖ (3, 5). The
iteration cost (4) is how many more iterations than the unperturbed run they need to come, and stay, within ε of x*.
Equation numbers are those of Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (2018). This
module runs no iteration; c and the distance come from `holdfast.theory.rate`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput

Schedule: TypeAlias = Callable[[int], float]
"""A function that returns the step size α[k] of equation (15) for iteration k."""


def iteration_cost_bound(
    c: npt.ArrayLike, distance: npt.ArrayLike, sizes: npt.ArrayLike, steps: npt.ArrayLike
) -> Floats:
    """Return the largest number of iterations that perturbations of norm `sizes` at iterations `steps` can cost.

    By Theorem 3.2 of Qiao et al. it is log(1 + Δ/D) / log(1/c), where D is `distance` and Δ = Σ c^-l ‖δ[l]‖ over all
    perturbations δ[l].

    The last axis of `sizes` and `steps` runs over the perturbations of one trial; the axes before it are trials and
    broadcast with `c` and `distance`. So n trials of one perturbation each have `sizes` of shape (n, 1). Everything is
    computed in logarithms, because c^-l and Δ/D may lie far outside the range of a float.

    Measured costs obey the bound only if `distance * c**k` never exceeds the distance to the optimum after k iterations
    without perturbations. The initial distance is often larger; `holdfast.theory.rate` computes the right one.
    """
    log_c = np.log(_contraction(c))
    log_distance = np.log(_positive("distance to the optimum", distance))
    lengths, at = _sizes(sizes), np.asarray(steps, dtype=np.float64)
    if not np.all(at >= 0):
        raise BadInput(f"Iterations are counted from 0, so give steps of 0 or more (got {np.min(at):g}).")
    with np.errstate(divide="ignore"):  # log 0 = -inf: a perturbation of size 0 adds nothing
        terms = np.log(np.atleast_1d(lengths)) - at * log_c[..., np.newaxis]
    log_ratio = np.logaddexp.reduce(terms, axis=-1) - log_distance
    # log(1 + ratio); logaddexp takes log1p of the smaller term, so that tiny ratios keep their digits.
    return np.asarray(np.logaddexp(0.0, log_ratio) / -log_c)


def irreducible_error(c: npt.ArrayLike, size: npt.ArrayLike) -> Floats:
    """Return how far from the optimum an iteration with rate `c` stays if each step is perturbed by norm `size`.

    This limit is c·size / (1-c)."""
    rate = _contraction(c)
    return np.asarray(rate * _sizes(size) / (1 - rate))


def endless_cost_bound(
    c: npt.ArrayLike, distance: npt.ArrayLike, size: npt.ArrayLike, epsilon: npt.ArrayLike
) -> Floats:
    """Return an upper bound on the iterations that perturbations of norm `size` in every iteration can cost.

    The initial distance to the optimum is at most `distance`, and each iteration multiplies it by `c` or less. The cost
    is the delay until the run is within `epsilon` of the optimum, or infinity if that never happens."""
    # Let Δ be `size`, D `distance`, ε `epsilon`, and e = cΔ/(1-c). Summing the series in (13) of the paper gives ‖y[k] -
    # x*‖ ≤ c^k D + e(1 - c^k) = e + c^k (D - e). This is below ε > e if and only if c^k (D - e) < ε - e, that is k >
    # log((D - e)/(ε - e)) / log(1/c). The unperturbed run needs log(D/ε) / log(1/c) iterations, so the cost is at most
    # log((1 - e/D) / (1 - e/ε)) / log(1/c), which grows with D. The printed (14) lacks ε. If D ≤ ε (so also if D ≤ e < ε),
    # both runs are within ε from the start and never leave: the cost is 0.
    rate, error = _contraction(c), irreducible_error(c, size)
    far, near = _positive("distance to the optimum", distance), _positive("epsilon", epsilon)
    with np.errstate(divide="ignore", invalid="ignore"):  # where e ≥ D or e ≥ ε the formula does not apply
        cost = (np.log1p(-error / far) - np.log1p(-error / near)) / -np.log(rate)
    return np.where(near <= error, np.inf, np.where(far <= near, 0.0, cost))


def harmonic(scale: float, offset: float) -> Schedule:
    """Return the step size schedule α[k] = scale / (k + offset); SGD then converges as 1/k if `scale` exceeds 1."""
    if not 0 < scale <= offset:
        raise BadInput(f"scale {scale} with offset {offset} makes α[0] leave (0, 1]: choose 0 < scale <= offset")
    return lambda k: scale / (k + offset)


def sgd_iterations(
    alpha: Schedule,
    gradient: float,
    distance: float,
    epsilon: float,
    *,
    sizes: Sequence[float] = (),
    steps: Sequence[int] = (),
    limit: int = 1_000_000,
) -> float:
    """Return the iteration from which SGD's error bound stays below `epsilon`; infinite if that is later than `limit`.

    The error is the root mean square distance to the optimum, which is `distance` at the start. `alpha` is the schedule
    of step sizes, which must not increase, and `gradient` is the bound G on the gradients in the paper of Qiao et al. A
    perturbation of size `sizes[i]` is added at iteration `steps[i]`."""
    # With r[k] = √E‖y[k] - x*‖² and s[k] = √E‖δ[k]‖², Minkowski gives √E‖y[k] + δ[k] - x*‖² ≤ r[k] + s[k], so by (15) r[k+1]²
    # ≤ (1 - α[k]) (r[k] + s[k])² + α[k]² G². (The analogue printed in appendix B.2 adds ‖δ‖, a length, to α²G², a square,
    # and drops the cross term 2 r s.) By Jensen E‖y - x*‖ ≤ r, so r < ε is enough. Once r < ε and α G² ≤ ε², it stays so.
    _positive("distance to the optimum", distance)
    _positive("epsilon", epsilon)
    if len(sizes) != len(steps):
        raise BadInput(f"{len(sizes)} sizes and {len(steps)} steps do not pair: give one step for each perturbation")
    perturbation: defaultdict[int, float] = defaultdict(float)  # by the triangle inequality, sizes at one step add up
    for size, step in zip(_sizes(sizes).tolist(), steps, strict=True):
        perturbation[step] += size
    last = max(perturbation, default=-1)
    norm, since = distance, math.inf
    for k in range(limit + 1):
        since = math.inf if norm >= epsilon else min(since, k)
        rate = alpha(k)
        if not 0 < rate <= 1:
            raise BadInput(f"α[{k}] = {rate} makes no contraction in (15): give a schedule within (0, 1]")
        if k > last and since <= k and math.sqrt(rate) * gradient <= epsilon:
            return since
        norm = math.hypot(math.sqrt(1 - rate) * (norm + perturbation.get(k, 0.0)), rate * gradient)
    return math.inf


def sgd_cost_bound(
    alpha: Schedule,
    gradient: float,
    distance: float,
    epsilon: float,
    *,
    sizes: Sequence[float],
    steps: Sequence[int],
    limit: int = 1_000_000,
) -> float:
    """Return how many more iterations SGD needs to reach `epsilon` because of perturbations, by its error bound.

    Perturbation i has the norm `sizes[i]` and comes at iteration `steps[i]`; the other arguments are as in
    `sgd_iterations`."""
    without = sgd_iterations(alpha, gradient, distance, epsilon, limit=limit)
    if math.isinf(without):
        reached = f"the bound is not below {epsilon} after {limit} iterations"
        raise BadInput(f"even unperturbed, {reached}: raise one of the two")
    return sgd_iterations(alpha, gradient, distance, epsilon, sizes=sizes, steps=steps, limit=limit) - without


def full_size(distances: Floats, order: float = 2) -> float:
    """Return the norm of the perturbation that full recovery causes by resetting every block to its saved value.

    `distances` are the distances between the live and the saved value of each block. `order` tells how they combine: 2
    for lengths, whose squares add up; 1 for distances that add up, such as numbers of differing tokens; infinity for
    the largest."""
    return _norm(distances, order)


def partial_size(distances: Floats, lost: npt.ArrayLike, order: float = 2) -> float:
    """Return the norm of the perturbation that partial recovery causes by resetting only the `lost` blocks.

    `distances` and `order` are as for `full_size`. By Theorem 4.1 of Qiao et al. (2018), the result is at most that of
    `full_size`. Both are equal (the paper prints <) if no surviving block has moved since its save."""
    ids = np.asarray(lost, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= len(distances)):
        there = f"the {len(distances)} blocks, numbered from 0"
        raise BadInput(f"lost blocks {ids.min()}..{ids.max()} are not all among {there}")
    # Zeros, not a selection: the same sum in the same order, so that rounding cannot break Theorem 4.1.
    moved = np.zeros(len(distances))
    moved[ids] = distances[ids]
    return _norm(moved, order)


def expected_partial_square(distances: Floats, p: float) -> float:
    """Return the expected squared norm of the perturbation if each block is lost and reset with probability `p`."""
    if not 0 <= p <= 1:
        raise BadInput(f"The lost fraction p must be between 0 and 1 (got {p}).")
    return p * float(np.sum(np.square(distances)))


def _norm(distances: Floats, order: float) -> float:
    if not order >= 1:
        raise BadInput(f"order must be at least 1 (got {order:g}): 1 (a sum), 2 (lengths) or inf (the largest).")
    if order == 2:
        return float(np.sqrt(np.sum(np.square(distances))))
    return float(np.linalg.norm(distances, order)) if distances.size else 0.0


def _contraction(c: npt.ArrayLike) -> Floats:
    rate = np.asarray(c, dtype=np.float64)
    if not np.all((rate > 0) & (rate < 1)):
        raise BadInput(f"The rate c must be between 0 and 1 (got {_span(rate)}).")
    return rate


def _positive(what: str, value: npt.ArrayLike) -> Floats:
    number = np.asarray(value, dtype=np.float64)
    if not np.all((number > 0) & np.isfinite(number)):
        raise BadInput(f"the {what} is {_span(number)}: the bounds need a positive, finite one")
    return number


def _sizes(sizes: npt.ArrayLike) -> Floats:
    lengths = np.asarray(sizes, dtype=np.float64)
    if not np.all((lengths >= 0) & np.isfinite(lengths)):
        raise BadInput(f"a perturbation's size is a norm, not {_span(lengths)}: give finite sizes of 0 or more")
    return lengths


def _span(values: Floats) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"
