"""What a regroup declares, by itself: who left, whether its window was complete, which samples that window lacks. Pure."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from holdfast.audit.life import Life
from holdfast.events import Regroup
from holdfast.sampler.plan import SamplePlan


class Told(NamedTuple):
    """A regroup, who declared it, and which rows of steps that life wrote after it and before it declared the next."""

    life: Life
    regroup: Regroup
    rows: range


class JoinedMember(NamedTuple):
    """A member that began in the middle of an attempt, and the first window that it takes part in."""

    life: Life
    start: int
    place: int  # of the regroup that says so, among those of the attempt
    woke: bool  # in the place of one that slept, and not of one that was lost


class LostMember(NamedTuple):
    """A member that was lost, in which window, whether all sums of that were kept, and its life, if it had begun one."""

    member: int
    step: int
    complete: bool
    life: Life | None


def told_by(life: Life) -> list[Told]:
    """Every regroup that a life declares, in the order in which it does."""
    starts = [rows for _, rows in life.regroups]
    ends = [*starts[1:], len(life.steps)]
    return [Told(life, each, range(rows, end)) for (each, rows), end in zip(life.regroups, ends, strict=False)]


def leavers(regroup: Regroup) -> list[int]:
    """Who is a member no longer, lost or asleep."""
    return [*regroup.lost, *regroup.asleep]


def is_complete(regroup: Regroup) -> bool:
    """Whether every sum of the window was kept, with the gradients of those who were lost in it."""
    return regroup.kept > 0 and regroup.redone == 0


def is_begun(told: Sequence[Told], basis: Sequence[int]) -> bool:
    """Whether members were settled within their window, and finished it as it had been divided before."""
    regroup = told[0].regroup
    if regroup.missing or regroup.kept or regroup.redone:
        return True
    places = [(each.life.rank, place) for each in told if (place := _finished(each))]
    return not _fit(places, regroup.members) and _fit(places, basis)


def shares(geometry: SamplePlan, regroup: Regroup, gone: Sequence[int], basis: Sequence[int]) -> list[int]:
    """The samples that a window lacks without these members, of those that it was divided among."""
    at = geometry.position(regroup.step)
    if regroup.strategy == "skip" and gone:
        return [*map(int, geometry.window(at))]
    if len(basis) > geometry.batch:
        return []
    return [each for member in gone for each in geometry.share(at, basis.index(member), len(basis)).tolist()]


def expected(regroup: Regroup, gone: Sequence[int], number: int) -> str:
    """How many samples a window lacks without these members, and whose they are, as a part of a sentence."""
    if not gone:
        return "nobody was lost in it"
    other = "other " * (number == len(regroup.missing))
    was = "was" if len(gone) == 1 else "were"
    if regroup.strategy == "skip":
        return f"it lacks {number} {other}samples, the whole window: {names(gone)} {was} lost in it"
    return f"it lacks {number} {other}samples: those of {names(gone)}, who {was} lost in it"


def names(members: Sequence[int]) -> str:
    """Members in words, the first few of them."""
    some = [str(member) for member in islice(members, 8)]
    if not some:
        return "nobody"
    return f"member{'s' * (len(members) > 1)} {', '.join(some)}{' and more' if len(members) > len(some) else ''}"


def _finished(told: Told) -> tuple[int, int] | None:
    """The rank and world with which a life finished the window of a regroup, if no other came before that."""
    rows = told.rows
    found = np.flatnonzero(told.life.steps.step[rows.start : rows.stop] == told.regroup.step)
    return told.life.place(rows.start + int(found[0])) if len(found) else None


def _fit(places: Sequence[tuple[int, tuple[int, int]]], basis: Sequence[int]) -> bool:
    return all(member in basis and place == (basis.index(member), len(basis)) for member, place in places)
