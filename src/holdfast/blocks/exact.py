"""Sums of floating-point numbers without rounding: parts that are summed apart add up to the sum of the whole."""

from fractions import Fraction

import numpy as np

from holdfast.blocks.division import Floats

_LOW = 26  # a mantissa of 53 bits is summed in two halves, so that sums of 2**26 of them are still exact in a float64
_CHUNK = 2**26
_SMALLEST = -1073  # the exponent of the smallest number above zero, as `frexp` counts
_EXPONENTS = 1024 - _SMALLEST + 1


def exact_sum(values: Floats) -> Fraction:
    """The sum of finite numbers, exactly."""
    return sum((_chunk_sum(values[i : i + _CHUNK]) for i in range(0, len(values), _CHUNK)), Fraction(0))


def at_most(number: Fraction) -> float:
    """The largest float that is not above a number: a float is above the one exactly if it is above the other."""
    nearest = float(number)
    return nearest if Fraction(nearest) <= number else float(np.nextafter(nearest, -np.inf))


def _chunk_sum(values: Floats) -> Fraction:
    """Mantissas are whole numbers: those of equal exponents are added up, then shifted and added as long integers."""
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    where = exponents - _SMALLEST
    high = np.bincount(where, weights=mantissas >> _LOW, minlength=_EXPONENTS)
    low = np.bincount(where, weights=mantissas & (2**_LOW - 1), minlength=_EXPONENTS)
    total = sum(
        ((int(high[i]) << _LOW) + int(low[i])) << int(i) for i in np.flatnonzero((high != 0) | (low != 0)).tolist()
    )
    return Fraction(total, 2 ** (53 - _SMALLEST))
