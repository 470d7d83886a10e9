"""Predicted and measured costs of failures, and how often the predictions hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.advice.estimate import Estimate
from holdfast.lab.result import Row


@dataclass(frozen=True, slots=True)
class AdviceCase:
    """The predicted and the measured cost of one failure; `unit` is seconds or iterations."""

    workload: str
    failure: str
    strategy: str
    unit: str
    predicted: Estimate
    measured: float

    @property
    def holds(self) -> bool:
        """True if the measured cost lies in the predicted interval."""
        return self.predicted.holds(self.measured)

    def to_row(self) -> Row:
        """Return the case as a row of the result."""
        return {
            "workload": self.workload,
            "failure": self.failure,
            "strategy": self.strategy,
            "unit": self.unit,
            "predicted": self.predicted.value,
            "low": self.predicted.low,
            "high": self.predicted.high,
            "basis": self.predicted.basis,
            "measured": self.measured,
            "holds": self.holds,
        }


def coverage(cases: Sequence[AdviceCase]) -> float:
    """Return the share of cases whose measured cost lies in the predicted interval."""
    return sum(case.holds for case in cases) / len(cases) if cases else float("nan")
