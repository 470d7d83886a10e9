"""Adam (Kingma and Ba, 2014) at its recommended settings, on one flat buffer; the caller counts the steps."""

from typing import Any

import numpy as np
from numba import njit

RATE, MEAN, SQUARE, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def update(parameters: Any, mean: Any, square: Any, gradient: Any, step: int) -> None:
    """Step number `step`, counted from 1, in place: the parameters and the two moments of the gradient."""
    rate, root = RATE / (1 - MEAN**step), (1 - SQUARE**step) ** -0.5
    _update(parameters, mean, square, gradient, np.float32(rate), np.float32(root))


@njit(cache=True, error_model="numpy")  # numpy's division: no test for zero, so that the loop runs in vectors
def _update(parameters: Any, mean: Any, square: Any, gradient: Any, rate: Any, root: Any) -> None:
    fresh, fresh_square = np.float32(1 - MEAN), np.float32(1 - SQUARE)
    kept, epsilon = np.float32(SQUARE), np.float32(EPSILON)
    for i in range(len(parameters)):
        slope = gradient[i]
        mean[i] += fresh * (slope - mean[i])
        square[i] = kept * square[i] + fresh_square * slope * slope
        parameters[i] -= rate * mean[i] / (np.sqrt(square[i]) * root + epsilon)
