"""holdfast: training that survives failures, proves that it did, and measures what it cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import lab
    from holdfast.audit.ledger import Ledger
    from holdfast.audit.verdicts import CHECKS, Finding, audit_run, worst
    from holdfast.blocks import Blocks, along, euclidean, partition, ragged, whole
    from holdfast.checkpoint.objects import ObjectStore
    from holdfast.checkpoint.place import open_store
    from holdfast.checkpoint.running import RunningCheckpoint
    from holdfast.checkpoint.snapshot import Manifest, Snapshot
    from holdfast.checkpoint.store import DirectoryStore, Store
    from holdfast.checkpoint.writer import Saved, Writer, blocking, overlapped
    from holdfast.cost.formulas import (
        RunTime,
        daly_interval,
        expected_run_time,
        expected_waste,
        goodput,
        young_interval,
    )
    from holdfast.ddp.attaching import attach
    from holdfast.ddp.batches import Batch
    from holdfast.ddp.run import Run
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
    from holdfast.exchange.load import load
    from holdfast.failure import Failure
    from holdfast.geometry import Geometry, Position
    from holdfast.history import History, HistoryWriter, read_history
    from holdfast.policy import Policy, Standing
    from holdfast.rate import OnlineRate, Rate, fitted_rate, worst_rate
    from holdfast.recovery import full, partial, recover
    from holdfast.samples import Samples
    from holdfast.stall import Stall
    from holdfast.state import flatten, unflatten
    from holdfast.theory import endless_cost_bound, irreducible_error, iteration_cost_bound, sgd_cost_bound

__version__ = "0.1.0"

# Where each name comes from. It is imported when it is first used: torch and numpy take their time, and neither a script
# that only attaches nor `holdfast --help` should wait for what it does not use.
_LATER = {
    "CHECKS": "audit.verdicts",
    "BadInput": "errors",
    "Batch": "ddp.batches",
    "Blocks": "blocks",
    "CommitConflict": "errors",
    "Corrupt": "errors",
    "DataMissing": "errors",
    "DirectoryStore": "checkpoint.store",
    "Event": "events",
    "Failure": "failure",
    "Finding": "audit.verdicts",
    "FutureVersion": "errors",
    "Geometry": "geometry",
    "History": "history",
    "HistoryWriter": "history",
    "HoldfastError": "errors",
    "Ledger": "audit.ledger",
    "Manifest": "checkpoint.snapshot",
    "NoSnapshot": "errors",
    "NotAStore": "errors",
    "ObjectStore": "checkpoint.objects",
    "OnlineRate": "rate",
    "Policy": "policy",
    "Position": "geometry",
    "Rate": "rate",
    "Run": "ddp.run",
    "RunTime": "cost.formulas",
    "RunningCheckpoint": "checkpoint.running",
    "Samples": "samples",
    "Saved": "checkpoint.writer",
    "Snapshot": "checkpoint.snapshot",
    "Stall": "stall",
    "Standing": "policy",
    "StorageFailed": "errors",
    "Store": "checkpoint.store",
    "WorkerLost": "errors",
    "Writer": "checkpoint.writer",
    "along": "blocks",
    "attach": "ddp.attaching",
    "audit_run": "audit.verdicts",
    "blocking": "checkpoint.writer",
    "daly_interval": "cost.formulas",
    "endless_cost_bound": "theory",
    "euclidean": "blocks",
    "expected_run_time": "cost.formulas",
    "expected_waste": "cost.formulas",
    "fitted_rate": "rate",
    "flatten": "state",
    "full": "recovery",
    "goodput": "cost.formulas",
    "irreducible_error": "theory",
    "iteration_cost_bound": "theory",
    "load": "exchange.load",
    "open_store": "checkpoint.place",
    "overlapped": "checkpoint.writer",
    "partial": "recovery",
    "partition": "blocks",
    "ragged": "blocks",
    "read_history": "history",
    "recover": "recovery",
    "sgd_cost_bound": "theory",
    "unflatten": "state",
    "whole": "blocks",
    "worst": "audit.verdicts",
    "worst_rate": "rate",
    "young_interval": "cost.formulas",
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
    "lab",
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
    if name == "lab":
        return import_module("holdfast.lab")
    if name not in _LATER:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"holdfast.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # tab completion shows what is not imported yet
