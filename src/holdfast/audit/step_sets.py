"""Sets of steps as sorted arrays of step numbers. Most are ranges, which need not be sorted or compared number by number."""

from collections.abc import Iterable

import numpy as np

from holdfast.audit.step_columns import Numbers


def union(arrays: Iterable[Numbers]) -> Numbers:
    """Return the sorted numbers of all `arrays`, which need not be sorted. Equal views of one array count once."""
    views = {(array.ctypes.data, array.strides, len(array)): array for array in arrays if len(array)}
    if len(views) == 1:
        (only,) = views.values()
        return distinct(only)
    return distinct(np.concatenate([*views.values(), np.zeros(0, np.int64)]))


def distinct(numbers: Numbers) -> Numbers:
    """Return the sorted numbers without repetitions. It is faster than `np.unique` where they are nearly sorted."""
    if (numbers[1:] > numbers[:-1]).all():
        return numbers
    ordered = np.sort(numbers, kind="stable")
    once: Numbers = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return once


def common(steps: Numbers, others: Numbers) -> Numbers:
    """Return the numbers that are in `steps` and in `others`; both are sorted, without repetitions."""
    both: Numbers = np.intersect1d(steps, others, assume_unique=True)
    return both


def without(steps: Numbers, others: Numbers) -> Numbers:
    """Return the numbers of `steps` that are not in `others`; both are sorted, without repetitions."""
    if len(steps) and len(others) and others[-1] - others[0] == len(others) - 1:
        first, last = np.searchsorted(steps, [others[0], others[-1] + 1])
        return steps[:0] if last - first == len(steps) else np.concatenate([steps[:first], steps[last:]])
    left: Numbers = np.setdiff1d(steps, others, assume_unique=True)
    return left


def twice_in(numbers: Numbers) -> Numbers:
    """Return the numbers that `numbers` has more than once, sorted."""
    if (numbers[1:] > numbers[:-1]).all():
        return np.zeros(0, np.int64)  # a view would keep all of `numbers` in memory
    ordered = np.sort(numbers)
    return distinct(ordered[1:][ordered[1:] == ordered[:-1]])
