"""Snapshots: complete saved states, written by one or more ranks, and committed by a manifest that is written last."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from holdfast.blocks.division import Array, State
from holdfast.checkpoint import digest, payload, shard_file, sharding
from holdfast.checkpoint.digest import Digest, Progress, seal, unwatched
from holdfast.checkpoint.manifest import (
    EXTRA_LIMIT,
    LATEST,
    STEP,
    Manifest,
    clear_uncommitted,
    encoded,
    extra_name,
    file_name,
    manifest_name,
    remove,
    shard_name,
    steps,
    steps_in_use,
)
from holdfast.checkpoint.reader import LAYOUT, POSITION, SnapshotReader
from holdfast.checkpoint.sharding import ShardedTensor, Sharding, StateLayout
from holdfast.checkpoint.store import Store, read
from holdfast.errors import BadInput, CommitConflict, Corrupt, NoSnapshot, StorageFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")

BACKOFF = (0.1, 0.5, 2.0)
"""Seconds to wait before each retry of an operation that the storage refused."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The name of a snapshot that was skipped because it is damaged or unreadable, and the reason."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot that was read and verified.

    - `step`: the step of the snapshot.
    - `tensors`: the tensors by name. They are views of large buffers, so one tensor keeps a whole buffer in memory.
    - `extra`: everything else that was saved, as JSON values.
    - `manifest`: the commit record, with the digests of the files.
    - `passed_over`: the newer snapshots that could not be used, with the reasons."""

    manifest: Manifest
    tensors: dict[str, Array]
    extra: dict[str, Any]
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SnapshotDraft:
    """A snapshot that is not committed yet: everything except its tensors."""

    step: int
    position: dict[str, Any]
    extra: bytes
    saved: float = field(default_factory=time.time)

    def manifest(self, shards: Sequence[Digest]) -> Manifest:
        extra = digest.of_bytes(self.extra)
        return Manifest(**self.position, saved=self.saved, shards=tuple(shards), extra=extra)


def draft(
    step: int,
    extra: Mapping[str, Any],
    layout: StateLayout,
    *,
    epoch: int = 0,
    cursor: int = 0,
    world: int = 1,
    config: str = "",
) -> SnapshotDraft:
    """Return everything of a new snapshot except its tensors; raise BadInput if `extra` is not plain JSON or too large.

    `layout` says which rank saves which part of each tensor, `cursor` is the index of the next step in its epoch, and
    `config` a digest of the sample order and model structure."""
    if step < 0:
        raise BadInput(f"step {step} cannot be saved: steps count from 0.")
    position = {"step": step, "epoch": epoch, "cursor": cursor, "world": world, "config": config}
    if reserved := {POSITION, LAYOUT} & extra.keys():
        raise BadInput(f"the extra key {min(reserved)!r} is reserved for the snapshot itself: rename it.")
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"extra must be JSON ({error}): flatten the state first.") from error
    if json.loads(text) != extra:
        raise BadInput("extra does not survive JSON (tuples, or keys that are not strings): flatten the state first.")
    text = json.dumps({**extra, POSITION: position, LAYOUT: sharding.to_json(layout)})
    if len(text) > EXTRA_LIMIT:
        raise BadInput(f"an extra of {len(text)} bytes is larger than {EXTRA_LIMIT}: use tensors.")
    return SnapshotDraft(step=step, position=position, extra=text.encode())


def undivided(tensors: State) -> dict[str, ShardedTensor]:
    """Return the layout of a state that one process saves."""
    alone = Sharding((1,))
    return {
        name: ShardedTensor(payload.dtype_name(name, value), tuple(value.shape), alone)
        for name, value in tensors.items()
    }


def save(store: Store, step: int, tensors: State, extra: Mapping[str, Any], **position: Any) -> Manifest:
    """Write and commit the snapshot of a step.

    Raise CommitConflict if the store has an intact snapshot of this step; a damaged one is replaced.

    `tensors` is a dict of tensors, and `extra` a dict of JSON values. `position` stands for the optional
    arguments `epoch`, `cursor` (the number of the next step in the epoch), `world` (the number of ranks), and `config`
    (a digest of the settings). Only one process at a time may save into a store."""
    begun = draft(step, extra, undivided(tensors), **position)
    clear(store, step)
    return commit(store, begun, [write_shard(store, step, payload.encode(tensors, digests=True))])


def clear(store: Store, step: int) -> None:
    """Prepare a save of `step`: remove the leftovers of killed processes, and a corrupt snapshot of `step`.

    Raise CommitConflict if `step` has an intact snapshot. No other process may save into the store."""
    store.sweep(STEP)
    store.sweep(LATEST)
    if step in steps(store):
        try:
            check(store, step)  # an unreadable snapshot is not replaced: it may be good
            raise _already_saved(store, step)
        except (Corrupt, NoSnapshot):
            logger.warning("replacing the snapshot of step %d, which is corrupt", step)
            remove(store, step)
    clear_uncommitted(store)


def write_shard(
    store: Store,
    step: int,
    tensors: Iterable[memoryview | bytes],
    *,
    rank: int = 0,
    count: int = 1,
    progress: Progress = unwatched,
) -> Digest:
    """Write the tensor file of `rank`, one of `count` ranks; raise CommitConflict if the step already has a snapshot.

    `tensors` are the parts of the file, without the digests of its chunks, which are appended."""
    record = manifest_name(step, store.term)
    if record in store.names(record):  # another run has saved here: its files stay as they are
        raise _already_saved(store, step)
    return shard_file.put(store, shard_name(step, rank, count, store.term), tensors, progress)


def commit(store: Store, draft: SnapshotDraft, shards: Sequence[Digest], *, progress: Progress = unwatched) -> Manifest:
    """Commit a snapshot whose shard files are written; `shards` are their digests. A failed commit may be repeated."""
    step, manifest = draft.step, replace(draft.manifest(shards), term=store.term)
    name, record = manifest_name(step, store.term), encoded(manifest)
    is_committed = name in store.names(name)
    if is_committed and read(store, name) != record:
        raise _already_saved(store, step)
    # If an earlier try created the manifest but did not sync its folder, this does: a power cut could still lose it.
    digest.put(store, extra_name(step, store.term), [draft.extra], progress)
    if not is_committed:
        try:
            store.create(name, [record])
        except CommitConflict:
            # A client that lost the answer to its first attempt retries, and finds its own commit.
            if read(store, name) != record:
                raise
    store.put(LATEST, [seal({"step": step})])
    logger.info("saved step %d, %d bytes", step, manifest.bytes)
    return manifest


def _already_saved(store: Store, step: int) -> CommitConflict:
    return CommitConflict(f"step {step} is already saved in {store}: resume from it, or use another store.")


def load(store: Store, step: int, *, backoff: Sequence[float] = (), progress: Progress = unwatched) -> Snapshot:
    """Read, verify and return the snapshot of a step.

    If the storage fails, the function tries again after each of the pauses in `backoff`, in seconds. `progress` is
    called with the number of bytes that were just read."""

    def whole() -> Snapshot:
        reader = SnapshotReader(store, step, progress)
        return Snapshot(reader.manifest, reader.read_all(), reader.extra)

    return retried(step, backoff, whole)


def retried(step: int, backoff: Sequence[float], work: Callable[[], T]) -> T:
    """Return the result of `work`, which reads a snapshot. If the storage fails, wait and retry as `backoff` says."""
    for pause in backoff:
        try:
            return work()
        except StorageFailed as error:
            logger.warning("reading the snapshot of step %d again in %g s: %s", step, pause, error)
            time.sleep(pause)
    return work()


def newest(store: Store, *, backoff: Sequence[float] = BACKOFF, progress: Progress = unwatched) -> Snapshot:
    """Return the newest intact snapshot. Raise NoSnapshot if the store has none.

    The field `passed_over` of the result names newer snapshots that are damaged. If the storage fails, the function
    tries again after each of the pauses in `backoff`, in seconds. `progress` is called with the number of bytes that
    were just read."""
    found, bad = search(store, lambda step: load(store, step, backoff=backoff, progress=progress))
    if found is None:
        why = "; ".join(passed_over.why for passed_over in bad.values())
        raise NoSnapshot(f"{store} has no good snapshot ({why or 'it has none at all'}): start from the beginning.")
    return replace(found, passed_over=tuple(bad.values()))


def search(store: Store, attempt: Callable[[int], T]) -> tuple[T | None, dict[int, PassedOver]]:
    """Return `attempt(step)` of the newest good snapshot (None if there is none), and the newer bad ones by step.

    `attempt` must read the snapshot of a step, and raise Corrupt or StorageFailed if that fails. If no snapshot is good
    but the storage failed for one of them, StorageFailed is raised, because that snapshot may be readable later."""
    bad: dict[int, PassedOver] = {}
    refused: StorageFailed | None = None
    for step in reversed(listed := steps_in_use(store)):
        try:
            return attempt(step), bad
        except (Corrupt, StorageFailed) as error:
            logger.warning("passed over the snapshot of step %d: %s", step, error)
            bad[step] = PassedOver(file_name(step), str(error))
            refused = refused or (error if isinstance(error, StorageFailed) else None)
        except NoSnapshot:
            continue  # removed meanwhile
    if steps_in_use(store) != listed:
        return search(store, attempt)  # a writer has committed or removed a snapshot meanwhile
    if refused:
        raise StorageFailed(f"no snapshot in {store} is readable now, and training must not start again: {refused}")
    return None, bad


def is_good(store: Store, step: int) -> bool:
    """Return True if the snapshot of a step can be read and matches its digests."""
    try:
        check(store, step)
    except (Corrupt, NoSnapshot, StorageFailed):
        return False
    return True


def check(store: Store, step: int, *, progress: Progress = unwatched) -> None:
    """Verify the snapshot of a step by reading all of it; raise Corrupt, NoSnapshot or StorageFailed."""
    SnapshotReader(store, step, progress).check()


def outdated(store: Store, count: int, *, trusted: int | None = None) -> list[int]:
    """Return the steps of snapshots that may be removed: all but the last `count`, and never the newest good one.

    The snapshot of step `trusted` counts as good without being read, unless it is the only one kept."""
    if count < 1:
        raise BadInput(f"the number of snapshots to keep must be 1 or more (got {count}).")
    listed = steps(store)
    old, kept = listed[:-count], listed[-count:]
    if not old or (trusted in kept and len(kept) > 1) or any(is_good(store, step) for step in reversed(kept)):
        return old
    spared = next((step for step in reversed(old) if is_good(store, step)), None)
    # If none is good, the storage may only be unreadable at the moment: remove nothing.
    return [step for step in old if step != spared] if spared is not None else []
