"""What a finished run left behind: its last snapshot and its losses, to be compared with those of another run."""

from pathlib import Path
from typing import Any

import torch

from holdfast.audit.verdicts import audit_run
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.history.log import read_history


def last(out: Path) -> Snapshot:
    """The newest snapshot of a run."""
    return snapshot.newest(DirectoryStore(out / "checkpoints"))


def different(one: Path, other: Path) -> list[str]:
    """What is not equal, bit by bit, in the last snapshots and the losses of two runs."""
    a, b = last(one), last(other)
    assert a.step == b.step
    assert a.extra["state"] == b.extra["state"]  # all that is no tensor: schedules, scales, flags
    tensors = [name for name in a.tensors.keys() | b.tensors.keys() if not _same(a.tensors[name], b.tensors[name])]
    theirs = losses(other)
    return tensors + [f"loss of step {step}" for step, loss in losses(one).items() if loss != theirs[step]]


def distance(one: Path, other: Path) -> float:
    """The largest difference between two runs' weights."""
    a, b = last(one).tensors, last(other).tensors
    return max(float((a[name] - b[name]).abs().max()) for name in a if name.startswith("model/"))


def losses(out: Path) -> dict[int, Any]:
    """Rank 0's loss of every step, as it was trained last."""
    return {event.what.step: event.what.loss for event in events(out, "step", "rank-0")}


def events(out: Path, kind: str, who: str | None = None) -> list[Any]:
    """The events of a kind in a run's history, or in that of one writer."""
    own = out / "history" / f"{who}.jsonl"
    told = read_history(own if own.exists() else out).events
    return [each for each in told if each.kind == kind and who in (None, each.who)]


def complaints(out: Path) -> list[str]:
    """What the audit of a run does not pass, in words."""
    return [f"{each.check}: {each.because}" for each in audit_run(out) if each.verdict != "pass"]


def _same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
