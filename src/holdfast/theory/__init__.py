"""Convergence theory: an upper limit of the additional iterations that training needs after a change of its state, and convergence rates.

After Qiao et al., "Fault Tolerance in Iterative-Convergent Machine Learning" (2018).
"""

from holdfast.theory.bounds import adversarial, full_size, gaussian, iteration_cost_bound, partial_size
from holdfast.theory.rate import Rate, fitted_rate, worst_rate

__all__ = [
    "Rate",
    "adversarial",
    "fitted_rate",
    "full_size",
    "gaussian",
    "iteration_cost_bound",
    "partial_size",
    "worst_rate",
]
