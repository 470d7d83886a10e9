"""Old snapshots at the start of a run: unusable ones are set aside, leftovers and outdated ones removed."""

import logging
import re
from collections.abc import Callable, Sequence

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.digest import Progress, unwatched
from holdfast.checkpoint.snapshot import BACKOFF, LATEST, Check, PassedOver, Snapshot, anything
from holdfast.checkpoint.store import Store
from holdfast.errors import StorageFailed

logger = logging.getLogger(__name__)

_ASIDE = "set-aside-"
_SET_ASIDE = re.compile(r"set-aside-([0-9]{8,18})-([0-9]{1,9})(?:/.+)?")


def resume(
    store: Store, *, backoff: Sequence[float] = BACKOFF, progress: Progress = unwatched, check: Check = anything
) -> tuple[Snapshot | None, tuple[PassedOver, ...]]:
    """Return the newest good snapshot to resume from, or None, and the ones that were passed over.

    `check` raises Corrupt for a snapshot that the run cannot resume from. Everything passed over is set aside: if it
    became readable after the run continued without it, it would belong to another history. Only the process that saves
    may call this; other readers use `newest` or `load`.
    """
    loaded, bad = snapshot.search(store, backoff, progress, check)
    for step in bad:
        set_aside(store, step)
    return loaded, tuple(bad.values())


def set_aside(store: Store, step: int) -> str:
    """Move a snapshot, which need not be readable, out of the sequence of steps; return its new folder."""
    taken = (_SET_ASIDE.fullmatch(name) for name in store.names(f"{_ASIDE}{step:08d}-"))
    number = 1 + max((int(match[2]) for match in taken if match), default=-1)
    place = f"{_ASIDE}{step:08d}-{number}"
    store.sweep(place)  # removes an empty folder that a killed removal left
    logger.warning("setting the snapshot of step %d aside, as %s", step, place)
    store.move(snapshot.folder(step), place)
    return place


def steps_aside(store: Store) -> list[int]:
    """Return the steps that were set aside, in order."""
    return [int(name.split("-")[2]) for name in aside(store)]


def aside(store: Store) -> list[str]:
    """Return the folders that were set aside, the oldest first."""
    matches = (_SET_ASIDE.fullmatch(name) for name in store.names(_ASIDE))
    numbered = {(int(match[1]), int(match[2])): match[0].split("/")[0] for match in matches if match}
    return [numbered[key] for key in sorted(numbered)]


def tidy(store: Store, count: int, *, trusted: int | None = None) -> None:
    """Remove the leftovers of killed processes at the start of a run, and all but the last `count` snapshots.

    Leftovers are unfinished files, uncommitted payloads, empty folders, and all but `count` of the folders set aside.
    Whatever the storage refuses to remove stays. `trusted` is a step that was just read and need not be verified.
    """
    old = snapshot.outdated(store, count, trusted=trusted)
    for prefix in (snapshot.STEP, LATEST, _ASIDE):
        _try(lambda prefix=prefix: store.sweep(prefix))  # type: ignore[misc]
    _try(lambda: snapshot.clear_uncommitted(store))
    for step in old:
        _try(lambda step=step: snapshot.remove(store, step))  # type: ignore[misc]
    for folder in aside(store)[:-count]:
        for name in store.names(f"{folder}/") or [folder]:
            _try(lambda name=name: store.remove(name))  # type: ignore[misc]


def _try(work: Callable[[], None]) -> None:
    try:
        work()
    except StorageFailed as error:
        logger.warning("left behind: %s", error)


def keep_last(store: Store, count: int) -> list[int]:
    """Remove all but the last `count` snapshots, except the newest good one; return the removed steps."""
    old = snapshot.outdated(store, count)
    for step in old:
        snapshot.remove(store, step)
    return old
