"""Experiments that measure recovery methods, and `hf.lab.compare`, which compares strategies on your own model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.lab.partial.model_check import check
    from holdfast.lab.partial.own_model import Comparison, CostRow, compare
    from holdfast.workloads.criterion import LossAt
    from holdfast.workloads.simple_model import OneState

# Imported on first use, because these modules need the extra `lab`.
_LAZY = {
    "Comparison": "lab.partial.own_model",
    "CostRow": "lab.partial.own_model",
    "LossAt": "workloads.criterion",
    "OneState": "workloads.simple_model",
    "check": "lab.partial.model_check",
    "compare": "lab.partial.own_model",
}

__all__ = ["Comparison", "CostRow", "LossAt", "OneState", "check", "compare"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast.lab' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"holdfast.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
