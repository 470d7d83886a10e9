"""Training that survives failures, proves that it did, and measures what the failures cost.

Four packages hold further public names: `holdfast.supervise`, `holdfast.blocks`, `holdfast.theory` and `holdfast.lab`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import blocks, lab, supervise, theory
    from holdfast.audit.verdicts import Finding, audit_run
    from holdfast.checkpoint.objects import ObjectStore
    from holdfast.checkpoint.place import open_store
    from holdfast.checkpoint.snapshot import Snapshot
    from holdfast.checkpoint.store import DirectoryStore, Store
    from holdfast.errors import (
        BadInput,
        CommitConflict,
        Corrupt,
        FutureVersion,
        HoldfastError,
        NoSnapshot,
        NotAStore,
        StorageFailed,
        WorkerLost,
    )
    from holdfast.history.log import read_history
    from holdfast.runs.config import RunConfig
    from holdfast.train.attach import attach
    from holdfast.train.iterators import Batch
    from holdfast.train.run import Run
    from holdfast.weights.load import load

__version__ = "0.1.0"

# The module of each public name. A name is imported on first use, so that neither `import holdfast` nor
# `holdfast --help` waits for numpy and torch.
_MODULES = {
    "BadInput": "errors",
    "Batch": "train.iterators",
    "CommitConflict": "errors",
    "Corrupt": "errors",
    "DirectoryStore": "checkpoint.store",
    "Finding": "audit.verdicts",
    "FutureVersion": "errors",
    "HoldfastError": "errors",
    "NoSnapshot": "errors",
    "NotAStore": "errors",
    "ObjectStore": "checkpoint.objects",
    "Run": "train.run",
    "RunConfig": "runs.config",
    "Snapshot": "checkpoint.snapshot",
    "StorageFailed": "errors",
    "Store": "checkpoint.store",
    "WorkerLost": "errors",
    "attach": "train.attach",
    "audit_run": "audit.verdicts",
    "load": "weights.load",
    "open_store": "checkpoint.place",
    "read_history": "history.log",
}
_PACKAGES = ("blocks", "lab", "supervise", "theory")

__all__ = [
    "BadInput",
    "Batch",
    "CommitConflict",
    "Corrupt",
    "DirectoryStore",
    "Finding",
    "FutureVersion",
    "HoldfastError",
    "NoSnapshot",
    "NotAStore",
    "ObjectStore",
    "Run",
    "RunConfig",
    "Snapshot",
    "StorageFailed",
    "Store",
    "WorkerLost",
    "attach",
    "audit_run",
    "blocks",
    "lab",
    "load",
    "open_store",
    "read_history",
    "supervise",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"holdfast.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"holdfast.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # tab completion also offers the names that are not imported yet
