"""Selection of the snapshot that a run resumes from, and removal of old, unusable and incomplete snapshots.

A snapshot that cannot be used is set aside: its folder is renamed, so that no later run resumes from it.
"""

import logging
import re
from collections.abc import Callable
from typing import TypeVar

from holdfast.checkpoint import manifest, snapshot
from holdfast.checkpoint.snapshot import PassedOver
from holdfast.checkpoint.store import Store
from holdfast.errors import StorageFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ASIDE = "set-aside-"
_SET_ASIDE = re.compile(r"set-aside-([0-9]{8,18})-([0-9]{1,9})(?:/.+)?")


def resume(store: Store, attempt: Callable[[int], T]) -> tuple[T | None, tuple[PassedOver, ...]]:
    """Return `attempt(step)` of the newest good snapshot (None if there is none), and the newer unusable snapshots.

    `attempt` must read the snapshot of a step, and raise Corrupt if the run cannot use it. Unusable snapshots are
    renamed, so that they are not tried again. Nodes of older terms commit nothing from now on: steps that are trained
    after this choice must not be followed by an older snapshot. Only the process that commits may call this function."""
    manifest.close_unfinished(store)
    found, bad = snapshot.search(store, attempt)
    for step in bad:
        set_aside(store, step)
    return found, tuple(bad.values())


def set_newer_aside(store: Store, step: int, why: str) -> tuple[PassedOver, ...]:
    """Rename the folders of all snapshots after `step`, so that no run loads them; return them, with the reason `why`."""
    newer = [saved for saved in manifest.steps(store) if saved > step]
    for saved in newer:
        for _ in manifest.terms_of(store, saved):
            set_aside(store, saved)
    return tuple(PassedOver(manifest.file_name(saved), why) for saved in newer)


def set_aside(store: Store, step: int) -> str:
    """Rename the folder of an unusable snapshot, so that no run loads it, and return the new folder name.

    If several terms have saved this step, only the newest snapshot is renamed, which was the one that was read."""
    taken = (_SET_ASIDE.fullmatch(name) for name in store.names(f"{_ASIDE}{step:08d}-"))
    number = 1 + max((int(match[2]) for match in taken if match), default=-1)
    place = f"{_ASIDE}{step:08d}-{number}"
    store.sweep(place)  # removes an empty folder that a killed removal left
    logger.warning("setting the snapshot of step %d aside, as %s", step, place)
    store.move(manifest.name_of(store, step).rpartition("/")[0], place)
    return place


def steps_aside(store: Store) -> list[int]:
    return [int(name.split("-")[2]) for name in aside(store)]


def aside(store: Store) -> list[str]:
    """Return the folders of the snapshots that were set aside as unusable, sorted by step."""
    matches = (_SET_ASIDE.fullmatch(name) for name in store.names(_ASIDE))
    numbered = {(int(match[1]), int(match[2])): match[0].split("/")[0] for match in matches if match}
    return [numbered[key] for key in sorted(numbered)]


def tidy(store: Store, count: int, *, trusted: int | None = None) -> None:
    """Keep only the last `count` snapshots and the last `count` unusable ones, and remove temporary files.

    `trusted` is the step of a snapshot that is known to be good, so that it need not be verified. Errors of the storage
    are only logged."""
    old = snapshot.outdated(store, count, trusted=trusted)
    for prefix in (manifest.STEP, manifest.LATEST, _ASIDE):
        _try(lambda prefix=prefix: store.sweep(prefix))  # type: ignore[misc]
    _try(lambda: manifest.clear_uncommitted(store))
    for step in old:
        _try(lambda step=step: manifest.remove(store, step))  # type: ignore[misc]
    for folder in aside(store)[:-count]:
        for name in store.names(f"{folder}/") or [folder]:
            _try(lambda name=name: store.remove(name))  # type: ignore[misc]


def _try(work: Callable[[], None]) -> None:
    try:
        work()
    except StorageFailed as error:
        logger.warning("left behind: %s", error)


def keep_last(store: Store, count: int) -> list[int]:
    """Remove all but the last `count` snapshots, but never the newest good one; return the removed steps."""
    old = snapshot.outdated(store, count)
    for step in old:
        manifest.remove(store, step)
    return old
