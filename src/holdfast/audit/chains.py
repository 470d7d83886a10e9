"""Whether every life declares each of the memberships that it trained under, and all who were lost in between."""

from collections.abc import Iterator, Mapping, Sequence

from holdfast.audit.declared import JoinedMember, leavers, names
from holdfast.audit.life import Life
from holdfast.events import Regroup


class Chains:
    """The memberships of one attempt, and who joined in which; `void` are windows by the id of the life they are of."""

    def __init__(
        self,
        number: int,
        world: int,
        regroups: Sequence[Regroup],
        joined: Sequence[JoinedMember],
        void: Mapping[int, int],
    ) -> None:
        self._number, self._world, self._regroups, self._void = number, world, regroups, void
        self._joined = {id(each.life): each.place for each in joined}
        self._places = {regroup.number: place for place, regroup in enumerate(regroups)}
        self._first: dict[
            tuple[int, int], tuple[Life, Regroup]
        ] = {}  # by where from and where to: who declares it first

    def complaints(self, lives: Sequence[Life]) -> Iterator[str]:
        """What of these lives cannot be."""
        for life in lives:
            yield from self._of(life)

    def _of(self, life: Life) -> Iterator[str]:
        numbers = [each.number for each, _ in life.regroups]
        if numbers != sorted({*numbers}):
            yield f"{life.who} declares its memberships of attempt {self._number} in another order"
        at, is_new = self._joined.get(id(life), 0), id(life) in self._joined
        before = self._regroups[at - 1].members if at else range(self._world)
        if life.arrival is not None if not is_new else life.recover and life.arrival is None:
            yield f"{life.who} begins in attempt {self._number} and declares otherwise whether it joins others"
        for regroup, rows in life.regroups:
            if (place := self._places.get(regroup.number)) is None or (is_new and place < at):
                continue  # one that joins may declare memberships that changed before it had joined
            if not (is_new and not regroup.lost):  # who has just joined knows of nobody else
                yield from self._follows(life, regroup, before)
                yield from self._agrees(life, regroup, *self._first.setdefault((at, place), (life, regroup)))
            yield from self._skips(life, range(at, place), regroup.step, rows)
            at, before, is_new = place + 1, regroup.members, False
        yield from self._skips(life, range(at, len(self._regroups)), None, len(life.steps))

    def _follows(self, life: Life, regroup: Regroup, before: Sequence[int]) -> Iterator[str]:
        """Who is lost are those who were members, and are no longer, or were replaced at once."""
        lost, was = {*leavers(regroup)}, {*before}
        if len(lost) != len(leavers(regroup)) or not was - {*regroup.members} <= lost <= was:
            yield (
                f"{life.who} declares {names(regroup.lost)} lost in membership {regroup.number} of attempt "
                f"{self._number}, where {names(before)} became {names(regroup.members)}"
            )

    def _agrees(self, life: Life, regroup: Regroup, other: Life, theirs: Regroup) -> Iterator[str]:
        """Who comes from the same membership into the same has lost the same."""
        if (sorted(regroup.lost), sorted(regroup.missing)) != (sorted(theirs.lost), sorted(theirs.missing)):
            yield (
                f"{other.who} and {life.who} declare other losses in membership {regroup.number} "
                f"of attempt {self._number}"
            )

    def _skips(self, life: Life, places: range, then: int | None, rows: int) -> Iterator[str]:
        """Memberships that a life does not declare: it was lost, or in the same window there came the next one.

        It declares the next one, if any, in window `then`, after it had written so many rows.
        """
        last = int(life.steps.step[rows - 1]) if rows else -1
        reached = last - (self._void.get(id(life)) == last)
        for place in places:
            regroup = self._regroups[place]
            lost = life.rank not in regroup.members or life.rank in leavers(regroup)
            if lost and then is None:
                return
            if reached >= regroup.step or (life.ended if then is None else then > regroup.step + 1):
                yield f"{life.who} does not declare membership {regroup.number} of attempt {self._number}"
