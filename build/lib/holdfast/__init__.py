"""Training that survives failures, proves that it did, and measures what the failures cost.

Four packages hold further public names: `holdfast.supervise`, `holdfast.blocks`, `holdfast.theory` and `holdfast.lab`.
"""

# ruff: noqa: I001 - `X as X` exports a name; isort would give each of them a statement of its own

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import blocks as blocks, lab as lab, supervise as supervise, theory as theory
    from holdfast.audit.verdicts import Finding as Finding, audit_run as audit_run
    from holdfast.checkpoint.objects import ObjectStore as ObjectStore
    from holdfast.checkpoint.place import open_store as open_store
    from holdfast.checkpoint.snapshot import Snapshot as Snapshot
    from holdfast.checkpoint.store import DirectoryStore as DirectoryStore, Store as Store
    from holdfast.errors import (
        BadInput as BadInput,
        CommitConflict as CommitConflict,
        Corrupt as Corrupt,
        FutureVersion as FutureVersion,
        HoldfastError as HoldfastError,
        NoSnapshot as NoSnapshot,
        NotAStore as NotAStore,
        StorageFailed as StorageFailed,
        WorkerLost as WorkerLost,
    )
    from holdfast.history.log import read_history as read_history
    from holdfast.runs.config import RunConfig as RunConfig
    from holdfast.train.attach import attach as attach
    from holdfast.train.iterators import Batch as Batch
    from holdfast.train.run import Run as Run
    from holdfast.weights.load import load as load

__version__ = "0.2.0"

# The public names of each module. A name is imported on first use, so that neither `import holdfast` nor
# `holdfast --help` waits for numpy and torch.
_NAMES = {
    "audit.verdicts": "Finding audit_run",
    "checkpoint.objects": "ObjectStore",
    "checkpoint.place": "open_store",
    "checkpoint.snapshot": "Snapshot",
    "checkpoint.store": "DirectoryStore Store",
    "errors": "BadInput CommitConflict Corrupt FutureVersion HoldfastError NoSnapshot NotAStore StorageFailed WorkerLost",
    "history.log": "read_history",
    "runs.config": "RunConfig",
    "train.attach": "attach",
    "train.iterators": "Batch",
    "train.run": "Run",
    "weights.load": "load",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("blocks", "lab", "supervise", "theory")

__all__ = [*_MODULES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"holdfast.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"holdfast.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # tab completion also offers the names that are not imported yet
