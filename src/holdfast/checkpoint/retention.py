"""Which snapshots stay: the last few, never without the newest good one; what a run went on without is set aside."""

import logging
import re
from collections.abc import Callable, Sequence

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.digest import Progress, unwatched
from holdfast.checkpoint.snapshot import BACKOFF, LATEST, Check, PassedOver, Snapshot, anything
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, StorageFailed

logger = logging.getLogger(__name__)

_ASIDE = "set-aside-"
_SET_ASIDE = re.compile(r"set-aside-([0-9]{8,18})-([0-9]{1,9})(?:/.+)?")


def resume(
    store: Store, *, backoff: Sequence[float] = BACKOFF, progress: Progress = unwatched, check: Check = anything
) -> tuple[Snapshot | None, tuple[PassedOver, ...]]:
    """What a run goes on from, the newest good snapshot or nothing, and what was passed over to find it.

    `check` raises Corrupt for a snapshot that a run cannot go on from, whatever its digests say.
    All that was passed over is set aside: were it to become readable once the run has gone on without it, its history
    would be another than the run's. For the process that saves; others read with `newest` or `load`.
    """
    found, bad = snapshot.search(store, backoff, progress, check)
    for step in bad:
        set_aside(store, step)
    return found, tuple(bad.values())


def set_aside(store: Store, step: int) -> str:
    """Take a snapshot, which need not be readable, out of the sequence of steps; returns where it is kept."""
    taken = (_SET_ASIDE.fullmatch(name) for name in store.names(f"{_ASIDE}{step:08d}-"))
    number = 1 + max((int(match[2]) for match in taken if match), default=-1)
    place = f"{_ASIDE}{step:08d}-{number}"
    store.sweep(place)  # a folder that a killed removal has left empty
    logger.warning("setting the snapshot of step %d aside, as %s", step, place)
    store.move(snapshot.folder(step), place)
    return place


def steps_aside(store: Store) -> list[int]:
    """The steps of what was set aside, in order."""
    return [int(name.split("-")[2]) for name in aside(store)]


def aside(store: Store) -> list[str]:
    """The folders of what was set aside, the oldest first: of one step the first that was, of several the lowest."""
    found = (_SET_ASIDE.fullmatch(name) for name in store.names(_ASIDE))
    numbered = {(int(match[1]), int(match[2])): match[0].split("/")[0] for match in found if match}
    return [numbered[key] for key in sorted(numbered)]


def tidy(store: Store, count: int, *, trusted: int | None = None) -> None:
    """Clear away, at the start of a run, what its killed predecessors left: all but the last `count` snapshots.

    Unfinished files, payloads without a manifest, empty folders, snapshots too many, and of what was set aside all but
    as many. What the storage refuses to remove stays: it does no harm. Who has just read a step trusts it.
    """
    old = outdated(store, count, trusted=trusted)
    for prefix in (snapshot.STEP, LATEST, _ASIDE):
        _if_it_can(lambda prefix=prefix: store.sweep(prefix))  # type: ignore[misc]
    _if_it_can(lambda: snapshot.clear_uncommitted(store))
    for step in old:
        _if_it_can(lambda step=step: snapshot.remove(store, step))  # type: ignore[misc]
    for folder in aside(store)[:-count]:
        for name in store.names(f"{folder}/") or [folder]:
            _if_it_can(lambda name=name: store.remove(name))  # type: ignore[misc]


def _if_it_can(work: Callable[[], None]) -> None:
    try:
        work()
    except StorageFailed as error:
        logger.warning("left behind: %s", error)


def keep_last(store: Store, count: int) -> list[int]:
    """Remove all but the last snapshots; the newest good one stays, however old it is. Returns the steps removed."""
    old = outdated(store, count)
    for step in old:
        snapshot.remove(store, step)
    return old


def outdated(store: Store, count: int, *, trusted: int | None = None) -> list[int]:
    """The steps that are not among the last snapshots and may go: the newest good one may not.

    To find a good one is to read it. Who has just committed a step trusts it, and saves that; but not where nothing
    else would be kept, since a disk may have lied.
    """
    if count < 1:
        raise BadInput(f"cannot keep the last {count} snapshots: keep 1 or more")
    listed = snapshot.steps(store)
    old, kept = listed[:-count], listed[-count:]
    if not old or (trusted in kept and len(kept) > 1) or any(snapshot.is_good(store, step) for step in reversed(kept)):
        return old
    spared = next((step for step in reversed(old) if snapshot.is_good(store, step)), None)
    # Where none is good now, the storage may only be unable to say so: nothing goes.
    return [step for step in old if step != spared] if spared is not None else []
