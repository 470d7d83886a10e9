"""Runs with snapshots that several ranks have saved, made without processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.payload import flatten
from holdfast.checkpoint.store import FIRST_TERM, DirectoryStore
from holdfast.checkpoint.terms import Fenced
from holdfast.train.state.shards import divide


def saved_by_ranks(
    out: Path,
    step: int,
    states: dict[str, Any],
    count: int = 2,
    *,
    term: int = FIRST_TERM,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A run with one more snapshot, in which `count` ranks of `term` have each saved a part of every tensor.

    `extra` adds to the values of the snapshot that are not tensors, or replaces some."""
    (out / "history").mkdir(parents=True, exist_ok=True)
    flat, store = flatten(states), Fenced(DirectoryStore(out / "checkpoints"), term)
    parts = [divide(flat, flat.tensors, rank, count) for rank in range(count)]
    shards = [
        snapshot.write_shard(store, step, payload.encode(part.parts, digests=True), rank=rank, count=count)
        for rank, part in enumerate(parts)
    ]
    others = {**flat.extra, "config": {}, "conditions": {}, "generators": [{}] * count, **(extra or {})}
    snapshot.commit(store, snapshot.draft(step, others, parts[0].layout, world=count), shards)
    return out
