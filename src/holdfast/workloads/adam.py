"""Adam (Kingma and Ba, 2014) at its recommended settings, on one flat buffer cut into rows that count their own steps.

A row that is restored takes its count back with its moments; else the correction for moments that started at zero
would be gone, and the row would leap by three times the rate.
"""

from typing import Any

import numpy as np
from numba import njit

RATE, MEAN, SQUARE, EPSILON = 1e-3, 0.9, 0.999, 1e-8


@njit(cache=True, error_model="numpy")  # numpy's division: no test for zero, so that the loop runs in vectors
def update(parameters: Any, mean: Any, square: Any, total: Any, gradient: Any, bounds: Any, counts: Any) -> None:
    """One step in place: parameters, moments and counts; the new parameters are also added to `total`."""
    fresh, fresh_square = np.float32(1 - MEAN), np.float32(1 - SQUARE)
    kept, epsilon = np.float32(SQUARE), np.float32(EPSILON)
    for row in range(len(counts)):
        counts[row] += 1
        rate = np.float32(RATE / (1 - MEAN ** counts[row]))
        root = np.float32((1 - SQUARE ** counts[row]) ** -0.5)
        for i in range(bounds[row], bounds[row + 1]):
            slope = gradient[i]
            mean[i] += fresh * (slope - mean[i])
            square[i] = kept * square[i] + fresh_square * slope * slope
            parameters[i] -= rate * mean[i] / (np.sqrt(square[i]) * root + epsilon)
            total[i] += parameters[i]
