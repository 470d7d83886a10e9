"""Perturbations of an iteration, their norms, and a bound on how many iterations they cost.

Iterations obey y[k+1] = f(y[k] + δ[k]), with f a contraction towards x*: ‖f(y) - x*‖ ≤ c ‖y - x*‖. The iteration cost
is how many more iterations the perturbed run needs than the unperturbed run to come and stay within ε of x*. This
module runs no iteration; c and the distance come from `holdfast.theory.rate`.
"""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput

Floating = TypeVar("Floating", bound=np.floating[Any])


def iteration_cost_bound(
    c: npt.ArrayLike, distance: npt.ArrayLike, sizes: npt.ArrayLike, steps: npt.ArrayLike
) -> Floats:
    """Return an upper limit of the additional iterations that are caused by perturbations (changes of a run's state).

    - `c`: the factor by which each iteration reduces the distance to the optimum.
    - `distance`: the distance D to the optimum at the start. For every k, the distance to the optimum after k iterations
      without perturbations must be at least `distance * c**k`. `worst_rate` returns a `c` and a `distance` that meet this
      condition. Those of `fitted_rate` meet it only for the iterations of its `window`.
    - `sizes`, `steps`: the norm of each perturbation, and the iteration in which it happens. In both arrays, the last axis
      is over the perturbations of one run. Any axes before it are over runs; they are broadcast with `c` and `distance`,
      which may have one value for each run.

    The limit is log(1 + Δ/D) / log(1/c), where Δ is the sum of c^-l ‖δ[l]‖ over all perturbations δ[l] in iterations l
    (Theorem 3.2 of the SCAR paper: Qiao et al., [Fault Tolerance in Iterative-Convergent Machine
    Learning](https://arxiv.org/abs/1810.07354), 2018)."""
    rate, far, lengths, at = (np.asarray(value, dtype=np.float64) for value in (c, distance, sizes, steps))
    if not np.all((rate > 0) & (rate < 1)):
        raise BadInput(f"The rate c must be between 0 and 1 (got {_span(rate)}).")
    if not np.all((far > 0) & np.isfinite(far)):
        raise BadInput(f"the distance to the optimum is {_span(far)}: the bounds need a positive, finite one")
    if not np.all((lengths >= 0) & np.isfinite(lengths)):
        raise BadInput(f"a perturbation's size is a norm, not {_span(lengths)}: give finite sizes of 0 or more")
    if not np.all(at >= 0):
        raise BadInput(f"Iterations are counted from 0, so give steps of 0 or more (got {np.min(at):g}).")
    log_c, log_distance = np.log(rate), np.log(far)  # c^-l and Δ/D may lie far outside the range of a float
    with np.errstate(divide="ignore"):  # log 0 = -inf: a perturbation of size 0 adds nothing
        terms = np.log(np.atleast_1d(lengths)) - at * log_c[..., np.newaxis]
    log_ratio = np.logaddexp.reduce(terms, axis=-1) - log_distance
    # log(1 + ratio); logaddexp takes log1p of the smaller term, so that tiny ratios keep their digits.
    return np.asarray(np.logaddexp(0.0, log_ratio) / -log_c)


def gaussian(shape: int | tuple[int, ...], size: float, rng: np.random.Generator) -> Floats:
    """Return a random perturbation of norm `size`. All directions are equally likely."""
    return _scaled(rng.standard_normal(shape), size)


def adversarial(x: npt.NDArray[Floating], optimum: npt.NDArray[Floating], size: float) -> Floats:
    """Return the perturbation of norm `size` that costs most: a vector that moves `x` straight away from `optimum`."""
    return _scaled(np.asarray(x - optimum, dtype=np.float64), size)


def full_size(distances: Floats, order: float = 2) -> float:
    """Return the size of the perturbation by full recovery, which resets every block to its saved values.

    `distances` has for each block the distance between its present and its saved values. `order` says how these
    distances are combined: 2 (root of the sum of squares), 1 (sum) or infinity (maximum)."""
    return _norm(distances, order)


def partial_size(distances: Floats, lost: npt.ArrayLike, order: float = 2) -> float:
    """Return the size of the perturbation by partial recovery, which resets only the `lost` blocks.

    `distances` and `order` are as in `full_size`. The result is never larger than that of `full_size` (Theorem 4.1 of
    Qiao et al., 2018)."""
    ids = np.asarray(lost, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= len(distances)):
        there = f"the {len(distances)} blocks, numbered from 0"
        raise BadInput(f"lost blocks {ids.min()}..{ids.max()} are not all among {there}")
    # Zeros, not a selection: the same sum in the same order, so that rounding cannot break Theorem 4.1.
    moved = np.zeros(len(distances))
    moved[ids] = distances[ids]
    return _norm(moved, order)


def _scaled(direction: Floats, size: float) -> Floats:
    peak = float(np.max(np.abs(direction), initial=0.0))
    if not peak > 0:
        raise BadInput("no direction to perturb in: the state is empty, or it is at the optimum, where all are alike")
    if not size >= 0:
        raise BadInput(f"a perturbation's size is a norm, not {size}: give 0 or more")
    unit = direction / peak  # first to order 1: the square of a very short or long vector is 0 or infinite
    return size * unit / np.linalg.norm(unit)


def _norm(distances: Floats, order: float) -> float:
    if not order >= 1:
        raise BadInput(f"order must be at least 1 (got {order:g}): 1 (a sum), 2 (lengths) or inf (the largest).")
    if order == 2:
        return float(np.sqrt(np.sum(np.square(distances))))
    return float(np.linalg.norm(distances, order)) if distances.size else 0.0


def _span(values: Floats) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"
