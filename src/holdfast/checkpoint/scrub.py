"""Listing and verification of all checkpoints in a store, for `holdfast inspect` and `holdfast verify`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.checkpoint import digest, manifest, retention, snapshot
from holdfast.checkpoint.digest import unseal
from holdfast.checkpoint.index import Index, generations, index_name, read_index, strange_indexes
from holdfast.checkpoint.manifest import LATEST, Manifest
from holdfast.checkpoint.store import Store, read
from holdfast.errors import Corrupt, FutureVersion, NoSnapshot, NotAStore, StorageFailed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damage:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The checkpoints in a store, according to its commit records; `set_aside` are folders of unusable snapshots."""

    snapshots: tuple[Manifest, ...]
    running: Index | None
    unreadable: tuple[Damage, ...]
    set_aside: tuple[str, ...]


def inspect(store: Store) -> Contents:
    """List the checkpoints in a store by reading its commit records and the names of its files, but no tensors."""
    strange = _strange(store)
    unreadable: list[Damage] = []
    snapshots = []
    for step in manifest.steps(store):
        record = _tried(_complete, store, step, manifest.name_of(store, step), unreadable)
        if record is not None:
            snapshots.append(record)
    running: Index | None = None
    for generation in reversed(generations(store)):
        running = _tried(read_index, store, generation, index_name(generation), unreadable)
        if running is not None:
            break
    return Contents(tuple(snapshots), running, (*unreadable, *strange), tuple(retention.aside(store)))


def verify(store: Store, progress: Callable[[int], None] = lambda done: None) -> list[Damage]:
    """Read all committed data in a store and return the damage found.

    `progress(1)` is called after each commit record is verified, so `records(store)` times in all."""
    strange = _strange(store)
    findings: list[Damage] = []
    for step in manifest.steps(store):
        _tried(snapshot.check, store, step, manifest.name_of(store, step), findings)
        progress(1)
    for generation in generations(store):
        _tried(_check_generation, store, generation, index_name(generation), findings)
        progress(1)
    if LATEST in store.names(LATEST):
        _tried(lambda store, _: unseal(read(store, LATEST), LATEST), store, 0, LATEST, findings)
    return [*findings, *strange]


def records(store: Store) -> int:
    """Return the number of commit records: one for each snapshot or version of an incremental checkpoint."""
    return len(manifest.steps(store)) + len(generations(store))


def _strange(store: Store) -> list[Damage]:
    names = [*manifest.strange(store), *strange_indexes(store)]
    if not (names or records(store) or retention.aside(store)):
        raise NotAStore(f"{store} has neither a snapshot nor a running checkpoint: name the place that a run saved to.")
    why = "it is named like a save but is not one, or cannot be read: see what it is"
    return [Damage(name, why) for name in names]


def _complete(store: Store, step: int) -> Manifest:
    """Return the manifest of a snapshot; raise Corrupt if a file of the snapshot is missing."""
    record = manifest.read_manifest(store, step)
    if lost := manifest.missing(store, record):
        count = f"{len(lost)} of the {len(record.files)} files that it lists"
        raise Corrupt(f"{count} are not in the store, the first is {lost[0]}: a run falls back to an older snapshot.")
    return record


def _check_generation(store: Store, generation: int) -> None:
    for name, expected in read_index(store, generation).segments.items():
        digest.check(store, name, expected)


def _tried(work: Callable[[Store, int], T], store: Store, which: int, record: str, findings: list[Damage]) -> T | None:
    try:
        return work(store, which)
    except (Corrupt, FutureVersion, NoSnapshot, StorageFailed) as error:
        if record in store.names(record):  # otherwise its writer removed it meanwhile
            findings.append(Damage(record, str(error)))
        return None
