"""holdfast: training that survives failures, proves that it did, and measures what it cost."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import lab
    from holdfast.audit.ledger import Ledger
    from holdfast.audit.verdicts import CHECKS, Finding, audit_run, worst
    from holdfast.blocks.division import Blocks, along, euclidean, partition, ragged, whole
    from holdfast.blocks.lost_blocks import full, partial, recover
    from holdfast.blocks.policy import BlockInfo, Policy
    from holdfast.checkpoint.objects import ObjectStore
    from holdfast.checkpoint.place import open_store
    from holdfast.checkpoint.running import RunningCheckpoint
    from holdfast.checkpoint.snapshot import Manifest, Snapshot
    from holdfast.checkpoint.state_tree import flatten, unflatten
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
    from holdfast.faults.schedule import Failure
    from holdfast.history.log import History, HistoryWriter, read_history
    from holdfast.sampler.digest import Samples
    from holdfast.sampler.plan import Position, SamplePlan
    from holdfast.stall import Stall
    from holdfast.theory.bounds import endless_cost_bound, irreducible_error, iteration_cost_bound, sgd_cost_bound
    from holdfast.theory.rate import OnlineRate, Rate, fitted_rate, worst_rate
    from holdfast.train.attach import attach
    from holdfast.train.loop import Batch
    from holdfast.train.run import Run
    from holdfast.weights.load import load

__version__ = "0.1.0"

# Where each name comes from. It is imported when it is first used: torch and numpy take their time, and neither a script
# that only attaches nor `holdfast --help` should wait for what it does not use.
_LATER = {
    "CHECKS": "audit.verdicts",
    "BadInput": "errors",
    "Batch": "train.loop",
    "Blocks": "blocks.division",
    "CommitConflict": "errors",
    "Corrupt": "errors",
    "DataMissing": "errors",
    "DirectoryStore": "checkpoint.store",
    "Event": "events",
    "Failure": "faults.schedule",
    "Finding": "audit.verdicts",
    "FutureVersion": "errors",
    "SamplePlan": "sampler.plan",
    "History": "history.log",
    "HistoryWriter": "history.log",
    "HoldfastError": "errors",
    "Ledger": "audit.ledger",
    "Manifest": "checkpoint.snapshot",
    "NoSnapshot": "errors",
    "NotAStore": "errors",
    "ObjectStore": "checkpoint.objects",
    "OnlineRate": "theory.rate",
    "Policy": "blocks.policy",
    "Position": "sampler.plan",
    "Rate": "theory.rate",
    "Run": "train.run",
    "RunTime": "cost.formulas",
    "RunningCheckpoint": "checkpoint.running",
    "Samples": "sampler.digest",
    "Saved": "checkpoint.writer",
    "Snapshot": "checkpoint.snapshot",
    "Stall": "stall",
    "BlockInfo": "blocks.policy",
    "StorageFailed": "errors",
    "Store": "checkpoint.store",
    "WorkerLost": "errors",
    "Writer": "checkpoint.writer",
    "along": "blocks.division",
    "attach": "train.attach",
    "audit_run": "audit.verdicts",
    "blocking": "checkpoint.writer",
    "daly_interval": "cost.formulas",
    "endless_cost_bound": "theory.bounds",
    "euclidean": "blocks.division",
    "expected_run_time": "cost.formulas",
    "expected_waste": "cost.formulas",
    "fitted_rate": "theory.rate",
    "flatten": "checkpoint.state_tree",
    "full": "blocks.lost_blocks",
    "goodput": "cost.formulas",
    "irreducible_error": "theory.bounds",
    "iteration_cost_bound": "theory.bounds",
    "load": "weights.load",
    "open_store": "checkpoint.place",
    "overlapped": "checkpoint.writer",
    "partial": "blocks.lost_blocks",
    "partition": "blocks.division",
    "ragged": "blocks.division",
    "read_history": "history.log",
    "recover": "blocks.lost_blocks",
    "sgd_cost_bound": "theory.bounds",
    "unflatten": "checkpoint.state_tree",
    "whole": "blocks.division",
    "worst": "audit.verdicts",
    "worst_rate": "theory.rate",
    "young_interval": "cost.formulas",
}

__all__ = [
    "CHECKS",
    "BadInput",
    "Batch",
    "BlockInfo",
    "Blocks",
    "CommitConflict",
    "Corrupt",
    "DataMissing",
    "DirectoryStore",
    "Event",
    "Failure",
    "Finding",
    "FutureVersion",
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
    "SamplePlan",
    "Samples",
    "Saved",
    "Snapshot",
    "Stall",
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
