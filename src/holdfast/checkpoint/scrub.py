"""What a store holds and what of it is bad: the answers of `holdfast inspect` and `holdfast verify`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.checkpoint import digest, retention, snapshot
from holdfast.checkpoint.index import Index, generations, index_name, read_index, strange_indexes
from holdfast.checkpoint.sealed import unseal
from holdfast.checkpoint.snapshot import LATEST, Manifest
from holdfast.checkpoint.store import Store, read
from holdfast.errors import Corrupt, FutureVersion, NoSnapshot, NotAStore, StorageFailed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a store that is not as it was committed."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What the commit records of a store say; nothing else has been read."""

    snapshots: tuple[Manifest, ...]
    running: Index | None
    unreadable: tuple[Damage, ...]
    set_aside: tuple[str, ...]


def inspect(store: Store) -> Contents:
    """Every snapshot and the running checkpoint, from their commit records alone."""
    _require(store)
    unreadable: list[Damage] = []
    snapshots = []
    for step in snapshot.steps(store):
        manifest = _tried(snapshot.read_manifest, store, step, snapshot.manifest_name(step), unreadable)
        if manifest is not None:
            snapshots.append(manifest)
    running = _newest_index(store, unreadable)
    return Contents(tuple(snapshots), running, (*unreadable, *_strange(store)), tuple(retention.aside(store)))


def verify(store: Store, progress: Callable[[int], None] = lambda done: None) -> list[Damage]:
    """Read every byte that was committed and name what is bad; an empty list means that all is well.

    `progress` is told of each commit record that is done, of `records(store)`.
    """
    _require(store)
    findings: list[Damage] = []
    for step in snapshot.steps(store):
        _tried(snapshot.check, store, step, snapshot.manifest_name(step), findings)
        progress(1)
    for generation in generations(store):
        _tried(_check_generation, store, generation, index_name(generation), findings)
        progress(1)
    if LATEST in store.names(LATEST):
        _tried(lambda store, _: unseal(read(store, LATEST), LATEST), store, 0, LATEST, findings)
    return [*findings, *_strange(store)]


def records(store: Store) -> int:
    """How many commit records there are to verify."""
    return len(snapshot.steps(store)) + len(generations(store))


def _require(store: Store) -> None:
    if not (snapshot.steps(store) or generations(store) or retention.aside(store) or _strange(store)):
        raise NotAStore(f"{store} holds neither a snapshot nor a running checkpoint: give the place a run saved to")


def _strange(store: Store) -> list[Damage]:
    """What looks like a save by its name and is not to be had as one, so that nobody takes it for one."""
    names = [*snapshot.strange(store), *strange_indexes(store)]
    return [
        Damage(name, "it is named like a save but is none, or cannot be looked into: see what it is") for name in names
    ]


def _check_generation(store: Store, generation: int) -> None:
    for name, expected in read_index(store, generation).segments.items():
        digest.check(store, name, expected)


def _newest_index(store: Store, unreadable: list[Damage]) -> Index | None:
    for generation in reversed(generations(store)):
        index = _tried(read_index, store, generation, index_name(generation), unreadable)
        if index is not None:
            return index
    return None


def _tried(work: Callable[[Store, int], T], store: Store, which: int, record: str, findings: list[Damage]) -> T | None:
    try:
        return work(store, which)
    except (Corrupt, FutureVersion, NoSnapshot, StorageFailed) as error:
        if record in store.names(record):  # or else its writer has removed it while we looked
            findings.append(Damage(record, str(error)))
        return None
