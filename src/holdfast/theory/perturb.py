"""Perturbations δ for an iteration y[k+1] = f(y[k] + δ[k]): random, worst-case, and those of real systems.

Functions return δ without changing their arguments. Equation and example numbers are those of Qiao et al. (2018).
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
    """Return a perturbation of norm `size` in a uniformly random direction."""
    return _scaled(rng.standard_normal(shape), size)


def adversarial(x: npt.NDArray[Floating], optimum: npt.NDArray[Floating], size: float) -> Floats:
    """Return the worst perturbation of norm `size`: a step from `x` straight away from the optimum."""
    return _scaled(np.asarray(x - optimum, dtype=np.float64), size)


def reduced_precision(y: npt.NDArray[Floating], bits: int) -> npt.NDArray[Floating]:
    """Return the error of rounding `y` to a mantissa of `bits` bits (example 2.1 of Qiao et al., 2018).

    For every nonzero element, the error is below 2^-(bits-1) times its absolute value."""
    return np.asarray(rounded(y, bits) - y)  # exact: both lie within a factor 2 of each other


def rounded(y: npt.NDArray[Floating], bits: int) -> npt.NDArray[Floating]:
    """Return `y` rounded to a mantissa of `bits` bits, including the leading bit; ties round to even."""
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
    """Return the error of the mean gradient if machine i uses parameters that are `delays[i]` iterations old.

    `iterates` are the parameters after each iteration; delays that reach further back use the first of them.
    `gradient(x, shard)` is the mean gradient over one machine's data shard; all shards have the same size. In SGD the
    error of the parameters is -α times the result, where α is the learning rate; Qiao et al. (example 2.2) omit -α."""
    if len(delays) != len(shards):
        raise BadInput(f"{len(delays)} delays for {len(shards)} machines: give one delay for each shard")
    newest = iterates[-1]
    seen = [iterates[max(len(iterates) - 1 - int(delay), 0)] for delay in delays]
    errors = [gradient(x, shard) - gradient(newest, shard) for x, shard in zip(seen, shards, strict=True)]
    return np.asarray(np.mean(errors, axis=0))


def stale_delays(machines: int, bound: int, rng: np.random.Generator) -> Ids:
    """Draw the delay of each machine in iterations, independently and uniformly from 0 to `bound`, inclusive."""
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
