"""Products of a sparse matrix with the stacked states of many trials; the matrix is read once for all trials.

The terms of a trial are always added in the same order, so its result is the same to the last bit, whatever other
trials are in the stack.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from holdfast.blocks.division import Floats, Ids


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A sparse matrix, stored by rows (CSR) if `tall`, otherwise by columns (CSC)."""

    shape: tuple[int, int]
    tall: bool
    starts: Ids
    others: Ids  # where each entry is on the shorter side
    values: Floats

    @property
    def transposed(self) -> "Sparse":
        return Sparse(self.shape[::-1], not self.tall, self.starts, self.others, self.values)

    def times(self, x: Floats) -> Floats:
        """Return the products of this matrix with the matrices `x[:, :, i]`, one for each independent run i."""
        out = np.zeros((self.shape[0], *x.shape[1:]))
        onto = _gather if self.tall else _scatter
        onto(self.starts, self.others, self.values, _flat(x), _flat(out))
        return out


def sparse(shape: tuple[int, int], rows: Ids, columns: Ids, values: Floats) -> Sparse:
    """Return the sparse matrix with the entries `values[i]` at row `rows[i]` and column `columns[i]`."""
    tall = shape[0] >= shape[1]
    along, across = (rows, columns) if tall else (columns, rows)
    order = np.lexsort((across, along))
    starts = np.searchsorted(along[order], np.arange(max(shape) + 1))
    return Sparse(shape, tall, starts, across[order], values[order])


def _flat(x: Floats) -> Floats:
    return np.ascontiguousarray(x).reshape(len(x), x.shape[1] * x.shape[2])


@njit(cache=True)
def _gather(starts: Ids, others: Ids, values: Floats, short: Floats, long: Floats) -> None:
    width = short.shape[1]
    for i in range(len(long)):
        entry, end = starts[i], starts[i + 1]
        while entry + 4 <= end:  # four at a time, in the same order: the sum is loaded and stored a quarter as often
            o0, o1, o2, o3 = others[entry], others[entry + 1], others[entry + 2], others[entry + 3]
            v0, v1, v2, v3 = values[entry], values[entry + 1], values[entry + 2], values[entry + 3]
            for c in range(width):
                total = long[i, c] + v0 * short[o0, c]
                total += v1 * short[o1, c]
                total += v2 * short[o2, c]
                long[i, c] = total + v3 * short[o3, c]
            entry += 4
        while entry < end:
            for c in range(width):
                long[i, c] += values[entry] * short[others[entry], c]
            entry += 1


@njit(cache=True)
def _scatter(starts: Ids, others: Ids, values: Floats, long: Floats, short: Floats) -> None:
    width = long.shape[1]
    for i in range(len(long)):
        for entry in range(starts[i], starts[i + 1]):
            other, value = others[entry], values[entry]
            for c in range(width):
                short[other, c] += value * long[i, c]
