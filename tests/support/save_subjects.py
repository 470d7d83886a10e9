"""What the crash tests save: a value in a store, a snapshot, a running checkpoint; with correct and incorrect writers.

A subject starts as OLD in a directory and is saved as NEW; whoever reads it must find one of the two.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.blocks.division import Array, along
from holdfast.checkpoint import manifest, payload, retention, snapshot
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.checkpoint.sharding import ShardedTensor, Sharding
from holdfast.checkpoint.store import DirectoryStore, read
from holdfast.errors import HoldfastError

OLD, NEW = 1, 2
ROWS = 6
Step = Callable[[Path], None]


@dataclass(frozen=True)
class Subject:
    """Functions that create the old version, save the new one, read it, and create the new version elsewhere."""

    old: Step
    save: Step
    read: Callable[[Path], int]
    alone: Step


def state(version: int) -> dict[str, Array]:
    return {"w": np.full((ROWS, 4), version), "b": np.full(3, version)}


def _value_put(version: int) -> Step:
    return lambda place: DirectoryStore(place).put("value", [b"%d" % version * 1000, b"%d" % version])


def _value_read(place: Path) -> int:
    value = read(DirectoryStore(place), "value")
    return {b"1" * 1001: OLD, b"2" * 1001: NEW}[value]


def _snapshot_save(step: int, version: int) -> Step:
    return lambda place: (snapshot.save(DirectoryStore(place), step, state(version), {"version": version}), None)[1]


def _snapshot_replace(place: Path) -> None:
    """Replace the only snapshot as a run does: commit the next, then remove the previous one."""
    _snapshot_save(2, NEW)(place)
    retention.keep_last(DirectoryStore(place), 1)


def _snapshot_read(place: Path) -> int:
    back = snapshot.newest(DirectoryStore(place))
    (version,) = {back.extra["version"], *(int(v) for value in back.tensors.values() for v in np.unique(value))}
    return int(version)


def _divided_save(step: int, version: int) -> Step:
    """Save a snapshot of which two ranks write a part each."""
    halves = [{"w": np.full((ROWS // 2, 4), version)}, {"w": np.full((ROWS // 2, 4), version)}]
    layout = {"w": ShardedTensor("I64", (ROWS, 4), Sharding((2,), ((0, 0),)))}

    def save(place: Path) -> None:
        store = DirectoryStore(place)
        shards = [
            snapshot.write_shard(store, step, payload.encode(half, digests=True), rank=rank, count=2)
            for rank, half in enumerate(halves)
        ]
        snapshot.commit(store, snapshot.draft(step, {"version": version}, layout, world=2), shards)

    return save


def _divided_replace(place: Path) -> None:
    _divided_save(2, NEW)(place)
    retention.keep_last(DirectoryStore(place), 1)


BLOCKS = along(state(OLD), "w")
SAVED_OLD, SAVED_NEW = np.array([0, 2, 4]), np.array([0, 2])


def _running_create(version: int) -> Step:
    return lambda place: (RunningCheckpoint.create(DirectoryStore(place), BLOCKS, state(version)), None)[1]


def _running_old(place: Path) -> None:
    running = RunningCheckpoint.create(DirectoryStore(place), BLOCKS, state(0))
    for _ in range(2):  # so that this save also has segments and an index to remove
        running.save(OLD, state(OLD), SAVED_OLD)


def _running_save(place: Path) -> None:
    running = RunningCheckpoint.open(DirectoryStore(place), BLOCKS)
    running.save(NEW, state(NEW), SAVED_NEW)
    running.compact()


def _running_read(place: Path) -> int:
    running = RunningCheckpoint.open(DirectoryStore(place), BLOCKS)
    rows = np.asarray(running.load(np.arange(ROWS))["w"])[:, 0]
    if not np.array_equal(rows, running.saved_at):
        raise ValueError(f"values {rows} are not those of the iterations {running.saved_at}")
    return {(1, 0, 1, 0, 1, 0): OLD, (2, 0, 2, 0, 1, 0): NEW, (0,) * ROWS: NEW}[tuple(rows.tolist())]


SUBJECTS = {
    "value": Subject(_value_put(OLD), _value_put(NEW), _value_read, _value_put(NEW)),
    "snapshot": Subject(_snapshot_save(1, OLD), _snapshot_replace, _snapshot_read, _snapshot_save(1, NEW)),
    "divided": Subject(_divided_save(1, OLD), _divided_replace, _snapshot_read, _divided_save(1, NEW)),
    "running": Subject(_running_old, _running_save, _running_read, _running_create(0)),
}


def _aside_old(place: Path) -> None:
    for step in (1, 2):
        _snapshot_save(step, step)(place)
    (place / "step-00000002" / "extra.json").write_bytes(b"")


def _aside_save(place: Path) -> None:
    retention.set_aside(DirectoryStore(place), 2)


def _aside_read(place: Path) -> int:
    return OLD if 2 in manifest.steps(DirectoryStore(place)) else NEW


KILLED = {**SUBJECTS, "aside": Subject(_aside_old, _aside_save, _aside_read, _aside_save)}
"""All subjects, including those that change a store without saving into it."""


def verdict(subject: Subject, place: Path) -> str:
    """Return what a reader finds: old, new, or why it is neither."""
    try:
        return {OLD: "old", NEW: "new"}[subject.read(place)]
    except (HoldfastError, FileNotFoundError, KeyError, ValueError) as error:
        return f"neither: {error!r}"


# Writers with the two common mistakes, and one that is wrong only when the power fails.


def in_place(place: Path, files: dict[str, bytes]) -> None:
    """Overwrite every file in place."""
    for name, data in files.items():
        _write(place / name, data)


def unlink_first(place: Path, files: dict[str, bytes]) -> None:
    """Write to a temporary name and rename, but remove the old version first."""
    for name, data in files.items():
        _write(place / f"{name}.tmp", data)
    for name in reversed(files):
        (place / name).unlink(missing_ok=True)
    for name in files:
        os.replace(place / f"{name}.tmp", place / name)


def unsynced(place: Path, files: dict[str, bytes]) -> None:
    """Write to a temporary name and rename over the old version, without syncing."""
    for name, data in files.items():
        _write(place / f"{name}.tmp", data, sync=False)
        os.replace(place / f"{name}.tmp", place / name)


WRONG = {"in place": in_place, "unlink first": unlink_first, "unsynced": unsynced}


def files_of(place: Path) -> dict[str, bytes]:
    """Return all files of a directory, commit records last, as a careful writer would write them."""
    paths = (path for path in place.rglob("*") if path.is_file())
    ordered = sorted(paths, key=lambda path: (path.name.startswith(("manifest", "index")), str(path)))
    return {str(path.relative_to(place)): path.read_bytes() for path in ordered}


def _write(path: Path, data: bytes, sync: bool = True) -> None:
    if not path.parent.is_dir():
        os.makedirs(path.parent)  # noqa: PTH103 - a call the killer counts
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)
