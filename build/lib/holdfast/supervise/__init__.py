"""The parent process of the workers: starts them, watches them, and restarts them after a failure.

A launcher that does not use the command line calls `supervise(RunConfig(...), folder)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.supervise.supervisor import supervise
    from holdfast.supervise.verdict import RunVerdict

_MODULES = {"RunVerdict": "verdict", "supervise": "supervisor"}  # imported on first use: the supervisor needs torch

__all__ = ["RunVerdict", "supervise"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'holdfast.supervise' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"holdfast.supervise.{_MODULES[name]}"), name)
    return value
