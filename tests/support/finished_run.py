"""The results of a finished run: its newest snapshot, losses and events, and comparisons with another run."""

from pathlib import Path
from typing import Any

import torch

from holdfast.audit.verdicts import audit_run
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.history.log import read_history


def last(out: Path) -> Snapshot:
    """Return the newest snapshot of a run."""
    return snapshot.newest(DirectoryStore(out / "checkpoints"))


def different(one: Path, other: Path) -> list[str]:
    """Return the names of tensors and losses that are not bit-identical in two runs."""
    a, b = last(one), last(other)
    assert a.step == b.step
    assert a.extra["state"] == b.extra["state"]  # everything but tensors: schedules, scales, flags
    tensors = [name for name in a.tensors.keys() | b.tensors.keys() if not _same(a.tensors[name], b.tensors[name])]
    theirs = losses(other)
    return tensors + [f"loss of step {step}" for step, loss in losses(one).items() if loss != theirs[step]]


def distance(one: Path, other: Path) -> float:
    """Return the largest difference between the weights of two runs."""
    a, b = last(one).tensors, last(other).tensors
    return max(float((a[name] - b[name]).abs().max()) for name in a if name.startswith("model/"))


def losses(out: Path) -> dict[int, Any]:
    """Return rank 0's loss of every step; of a repeated step, the last one."""
    return {event.what.step: event.what.loss for event in events(out, "step", "rank-0")}


def events(out: Path, kind: str, who: str | None = None) -> list[Any]:
    """Return the events of a kind in a run's history, or of one writer."""
    own = out / "history" / f"{who}.jsonl"
    history = read_history(own if own.exists() else out).events
    return [event for event in history if event.kind == kind and who in (None, event.who)]


def failed_checks(out: Path) -> list[str]:
    """Return a line for each check of the audit that does not pass."""
    return [f"{finding.check}: {finding.because}" for finding in audit_run(out) if finding.verdict != "pass"]


def _same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
