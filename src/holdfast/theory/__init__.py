"""The theory of perturbed iterations: bounds on the cost of a perturbation, and measured rates of convergence.

Equation numbers are those of Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (2018).
"""

from holdfast.theory.bounds import (
    endless_cost_bound,
    expected_partial_square,
    full_size,
    harmonic,
    irreducible_error,
    iteration_cost_bound,
    partial_size,
    sgd_cost_bound,
    sgd_iterations,
)
from holdfast.theory.perturb import adversarial, gaussian, reduced_precision, stale_delays, staleness
from holdfast.theory.rate import OnlineRate, Rate, fitted_rate, worst_rate

__all__ = [
    "OnlineRate",
    "Rate",
    "adversarial",
    "endless_cost_bound",
    "expected_partial_square",
    "fitted_rate",
    "full_size",
    "gaussian",
    "harmonic",
    "irreducible_error",
    "iteration_cost_bound",
    "partial_size",
    "reduced_precision",
    "sgd_cost_bound",
    "sgd_iterations",
    "stale_delays",
    "staleness",
    "worst_rate",
]
