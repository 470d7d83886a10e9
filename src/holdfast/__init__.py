"""holdfast: training that survives failures, proves that it did, and measures what it cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.audit.ledger import Ledger
from holdfast.audit.verdicts import CHECKS, Finding, audit_run, worst
from holdfast.blocks import Blocks, along, euclidean, partition, ragged, whole
from holdfast.checkpoint.place import open_store
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.cost.formulas import (
    RunTime,
    daly_interval,
    expected_run_time,
    expected_waste,
    goodput,
    young_interval,
)
from holdfast.errors import (
    BadInput,
    CommitConflict,
    Corrupt,
    DataMissing,
    FutureVersion,
    HoldfastError,
    NoSnapshot,
    NotAStore,
    StorageFailed,
    WorkerLost,
)
from holdfast.events import Event
from holdfast.failure import Failure
from holdfast.geometry import Geometry, Position
from holdfast.history import History, HistoryWriter, read_history
from holdfast.policy import Policy, Standing
from holdfast.rate import OnlineRate, Rate, fitted_rate, worst_rate
from holdfast.recovery import full, partial, recover
from holdfast.samples import Samples
from holdfast.stall import Stall
from holdfast.theory import endless_cost_bound, irreducible_error, iteration_cost_bound, sgd_cost_bound

if TYPE_CHECKING:
    from holdfast.checkpoint.objects import ObjectStore
    from holdfast.checkpoint.running import RunningCheckpoint
    from holdfast.checkpoint.snapshot import Manifest, Snapshot
    from holdfast.checkpoint.writer import Saved, Writer, blocking, overlapped
    from holdfast.ddp.batches import Batch
    from holdfast.ddp.run import Run, attach
    from holdfast.exchange.load import load
    from holdfast.state import flatten, unflatten

__version__ = "0.1.0"

# Imported when first used: they need torch or fsspec, and neither a simulation nor `holdfast --help` should wait for it.
_LATER = {
    "Batch": "ddp.batches",
    "Manifest": "checkpoint.snapshot",
    "ObjectStore": "checkpoint.objects",
    "Run": "ddp.run",
    "RunningCheckpoint": "checkpoint.running",
    "Saved": "checkpoint.writer",
    "Snapshot": "checkpoint.snapshot",
    "Writer": "checkpoint.writer",
    "attach": "ddp.run",
    "blocking": "checkpoint.writer",
    "flatten": "state",
    "load": "exchange.load",
    "overlapped": "checkpoint.writer",
    "unflatten": "state",
}

__all__ = [
    "CHECKS",
    "BadInput",
    "Batch",
    "Blocks",
    "CommitConflict",
    "Corrupt",
    "DataMissing",
    "DirectoryStore",
    "Event",
    "Failure",
    "Finding",
    "FutureVersion",
    "Geometry",
    "History",
    "HistoryWriter",
    "HoldfastError",
    "Ledger",
    "Manifest",
    "NoSnapshot",
    "NotAStore",
    "ObjectStore",
    "OnlineRate",
    "Policy",
    "Position",
    "Rate",
    "Run",
    "RunTime",
    "RunningCheckpoint",
    "Samples",
    "Saved",
    "Snapshot",
    "Stall",
    "Standing",
    "StorageFailed",
    "Store",
    "WorkerLost",
    "Writer",
    "along",
    "attach",
    "audit_run",
    "blocking",
    "daly_interval",
    "endless_cost_bound",
    "euclidean",
    "expected_run_time",
    "expected_waste",
    "fitted_rate",
    "flatten",
    "full",
    "goodput",
    "irreducible_error",
    "iteration_cost_bound",
    "load",
    "open_store",
    "overlapped",
    "partial",
    "partition",
    "ragged",
    "read_history",
    "recover",
    "sgd_cost_bound",
    "unflatten",
    "whole",
    "worst",
    "worst_rate",
    "young_interval",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
