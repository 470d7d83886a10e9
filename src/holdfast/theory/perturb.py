"""Perturbations δ for an iteration y[k+1] = f(y[k] + δ[k]): random, worst-case, and those of real systems.

Every function returns a δ and changes nothing. Equation and example numbers are those of Qiao et al. (2018).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats, Ids
from holdfast.errors import BadInput

Floating = TypeVar("Floating", bound=np.floating[Any])
Shard = TypeVar("Shard")


def gaussian(shape: int | tuple[int, ...], size: float, rng: np.random.Generator) -> Floats:
    """Return a uniformly random direction (a normal vector), scaled to the norm `size`."""
    return _scaled(rng.standard_normal(shape), size)


def adversarial(x: npt.NDArray[Floating], optimum: npt.NDArray[Floating], size: float) -> Floats:
    """Return a step of norm `size` straight away from the optimum, the worst perturbation of its size."""
    return _scaled(np.asarray(x - optimum, dtype=np.float64), size)


def reduced_precision(y: npt.NDArray[Floating], bits: int) -> npt.NDArray[Floating]:
    """Return the δ of example 2.1, rounding y to `bits` bits: |δ| < 2^-(bits-1) |y| wherever y is not 0."""
    return np.asarray(rounded(y, bits) - y)  # exact: both lie within a factor 2 of each other


def rounded(y: npt.NDArray[Floating], bits: int) -> npt.NDArray[Floating]:
    """Round y to a mantissa of `bits` bits, including the leading one; nearest, ties to even."""
    if bits < 1:
        raise BadInput(f"a mantissa of {bits} bits holds no number: give 1 or more")
    limits = np.finfo(y.dtype)
    bits = min(bits, limits.nmant + 1)
    fraction, exponent = np.frexp(y)  # y = fraction · 2^exponent, 1/2 ≤ |fraction| < 1, for subnormal numbers too
    nearest = np.ldexp(np.rint(np.ldexp(fraction, bits)), -bits)
    # At the top of the range a fraction must not round up to 1: the number would become infinite.
    most = np.where(exponent < limits.maxexp, 1, 1 - 2.0**-bits).astype(y.dtype)
    return np.asarray(np.ldexp(np.clip(nearest, -most, most), exponent))


def staleness(
    gradient: Callable[[Floats, Shard], Floats], iterates: Sequence[Floats], shards: Sequence[Shard], delays: Ids
) -> Floats:
    """Return the δ of example 2.2: the mean gradient of machines at iterates `delays` ago, minus that at the newest.

    `gradient(x, shard)` is the mean gradient over one machine's shard; shards are equally large, so their mean at x is
    the true gradient. A delay beyond the first iterate uses the first. The result is a gradient: a step of learning
    rate α perturbs the next state by -α times it, a factor the paper leaves out.
    """
    if len(delays) != len(shards):
        raise BadInput(f"{len(delays)} delays for {len(shards)} machines: give one delay for each shard")
    newest = iterates[-1]
    seen = [iterates[max(len(iterates) - 1 - int(delay), 0)] for delay in delays]
    errors = [gradient(x, shard) - gradient(newest, shard) for x, shard in zip(seen, shards, strict=True)]
    return np.asarray(np.mean(errors, axis=0))


def stale_delays(machines: int, bound: int, rng: np.random.Generator) -> Ids:
    """Draw how many iterations each machine lags behind: independent, uniform on 0..bound."""
    if bound < 0:
        raise BadInput(f"a staleness bound of {bound} lies in the future: give 0 or more")
    return rng.integers(0, bound, size=machines, endpoint=True)


def _scaled(direction: Floats, size: float) -> Floats:
    peak = float(np.max(np.abs(direction), initial=0.0))
    if not peak > 0:
        raise BadInput("no direction to perturb in: the state is empty, or it is at the optimum, where all are alike")
    if not size >= 0:
        raise BadInput(f"a perturbation's size is a norm, not {size}: give 0 or more")
    unit = direction / peak  # first to order 1: the square of a very short or long vector is 0 or infinite
    return size * unit / np.linalg.norm(unit)
