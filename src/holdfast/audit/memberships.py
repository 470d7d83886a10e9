"""Who took part in which windows of an attempt, as its `regroup` events declare, and whether they can be believed.

In an attempt that lost nobody, or that was not recovered live, all of its ranks took part in all of its windows. Else
every survivor has declared who went on, in which window, and which samples that window lacks: what they declare must
follow from who was lost and how the window was divided, and what everybody wrote before and after must agree with it.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np

from holdfast.audit.chains import Chains
from holdfast.audit.declared import (
    JoinedMember,
    LostMember,
    Told,
    expected,
    is_begun,
    is_complete,
    leavers,
    names,
    shares,
    told_by,
)
from holdfast.audit.life import Life
from holdfast.audit.step_columns import Numbers
from holdfast.events import Regroup
from holdfast.finding import CannotTell, counted
from holdfast.sampler.plan import SamplePlan

STRATEGIES = ("replay", "forward", "skip")
_MOST = 1 << 20  # members of a run that recovers live: a forged world may be any number


class Memberships:
    """The members of one attempt, window by window; `wrong` says what of their regroups cannot be."""

    def __init__(self, number: int, world: int, lives: Sequence[Life]) -> None:
        self.number = number
        self.wrong: str | None = None
        self.regroups: list[Regroup] = []  # one for each number, as the first who declares it does
        self.missing: defaultdict[int, set[int]] = defaultdict(set)  # samples, by the window that lacks them
        self.skipped: set[int] = set()  # windows that nothing came of
        self.lost: list[LostMember] = []
        self.joined: list[JoinedMember] = []
        self.members: Sequence[int] = range(world)  # at last
        self._world, self._lives = world, lives
        self._firsts, self._bases = [0], list[Sequence[int]]([self.members])
        self._excused: defaultdict[int, set[int]] = defaultdict(set)
        self._lacking: set[tuple[int, int]] = set()  # members and the windows that their shares are missing from
        self._void: dict[int, int] = {}
        self._asleep: set[int] = set()
        self._since: dict[int, int] = {}  # of members that joined: the first window that has no sums without them
        self._gone: dict[int, Life] = {}  # lives that ended with a loss, the last of each member
        self._spared: dict[
            int, tuple[int, Sequence[int]]
        ] = {}  # by life: a window, and who was lost with all sums kept
        self._told: defaultdict[int, list[Told]] = defaultdict(list)
        for life in lives:
            for each in told_by(life):
                self._told[each.regroup.number].append(each)

    @property
    def is_live(self) -> bool:
        """Whether anybody was lost or joined while others went on."""
        return bool(self._told)

    @property
    def survived(self) -> Counter[int]:
        """How often the others went on without each member.

        Not how often it was declared lost: one that took its place and was not let in yet may be declared so, too.
        """
        there = {*self.members, *self._asleep}
        gone = Counter({each.member for each in self.lost if each.member not in there})
        return gone + Counter(each.life.rank for each in self.joined if not each.woke)

    def basis(self, step: int) -> Sequence[int]:
        """The members that this window was divided among."""
        return self._bases[bisect_right(self._firsts, step) - 1]

    def due(self, member: int, steps: Numbers) -> Numbers:
        """Those of these windows of which this member must have reported its share."""
        if not self.is_live:
            return steps if member in self.members else steps[:0]
        takes_part = np.array([member in basis for basis in self._bases])
        due: Numbers = steps[takes_part[np.searchsorted(self._firsts, steps, side="right") - 1]]
        left: Numbers = due[~np.isin(due, list(self._excused[member]))]
        return left

    def is_excused(self, member: int, step: int) -> bool:
        """Whether a member was lost before it could report this window, in which others vouch for it or miss it."""
        return step in self._excused[member]

    def vouched(self, steps: Numbers) -> int:
        """How many shares of these windows only the others tell of: their members were lost before they could."""
        lacking = {(member, step) for member, several in self._excused.items() for step in several} - self._lacking
        for life in self._lives:
            told = np.intersect1d(life.steps.step, list(self._excused[life.rank])).tolist()
            lacking -= {(life.rank, step) for step in told if step != self.void(life)}
        there = {*np.intersect1d(steps, [step for _, step in lacking]).tolist()} - self.skipped
        return sum(step in there and member in self.basis(step) for member, step in lacking)

    def void(self, life: Life) -> int | None:
        """The window that a lost member reported and the others finished without it, if there is one."""
        return self._void.get(id(life))

    def lacks(self, member: int, step: int) -> bool:
        """Whether the share of this member is declared missing from this window."""
        return (member, step) in self._lacking

    def is_replayed(self, step: int) -> bool:
        """Whether what was lost of this window was computed again, so that it came out as if nothing had been lost."""
        return any(each.step == step and each.strategy == "replay" for each in self.regroups)

    def savers(self, step: int) -> set[int]:
        """How many ranks may have saved this step; at the boundary where they are settled it is saved before."""
        sizes = [(0, self._world), *((each.step, len(each.members)) for each in self.regroups)]
        before = [size for at, size in sizes if at < step or at == 0]
        return {before[-1], *(size for at, size in sizes if at == step)}

    def parts(self) -> Iterator[tuple[int, object]]:
        """The windows from which on steps come out otherwise than before, and what they depend on."""
        changes: dict[int, object] = {}
        for first, basis in zip(self._firsts, self._bases, strict=True):
            whole = len(basis) == self._world
            changes[first] = self._world if whole else (self._world, tuple(basis), self.number, first)
        divided = {step: changes[self._firsts[bisect_right(self._firsts, step) - 1]] for step in self.missing}
        for step in sorted(self.missing):
            changes.setdefault(step + 1, divided[step])
            changes[step] = ("lossy", self.number, step)
        return iter(sorted(changes.items(), key=lambda each: each[0]))

    def misplaced(self, life: Life) -> str | None:
        """The first step of a life that says another rank or world than the division of its window gives its member."""
        steps = life.steps.step
        for rows, rank, world in life.stretches():
            for step in self._division_starts(steps[rows.start : rows.stop]):
                basis = self.basis(step)
                if life.rank not in basis or (rank, world) != (basis.index(life.rank), len(basis)):
                    place = f"as rank {rank} of {world}"
                    return f"{life.who} trained step {step} {place}, which was divided among {names(basis)}"
        return None

    def _division_starts(self, steps: Numbers) -> list[int]:
        """One of these steps for each division that they fall into."""
        _, rows = np.unique(np.searchsorted(self._firsts, steps, side="right"), return_index=True)
        return [int(steps[row]) for row in rows]

    # How regroups are read.

    def read(self, geometry: SamplePlan) -> "Memberships":
        """Take every regroup into account, in the order of their numbers."""
        if self.is_live and self._world > _MOST:
            raise CannotTell(f"attempt {self.number} is said to have had {self._world} members")
        lives = self._by_member()
        for number in sorted(self._told):
            told = self._told[number]
            regroup = told[0].regroup
            if because := self._other_words(told) or self._impossible(regroup, geometry):
                self._complain(because)
                continue
            self._settle(told, geometry, lives)
        self._look_for_missing()
        chains = Chains(self.number, self._world, self.regroups, self.joined, self._void)
        for because in chains.complaints(self._lives):
            self._complain(because)
        return self

    def _by_member(self) -> dict[int, list[Life]]:
        lives: defaultdict[int, list[Life]] = defaultdict(list)
        for life in self._lives:
            if not (life.is_idle and lives[life.rank]):  # one that was to join, and ended before, was no member
                lives[life.rank].append(life)
        return lives

    def _other_words(self, told: Sequence[Told]) -> str | None:
        """Two that declare one membership in different words; who was lost depends on what one has seen before."""
        first = told[0]
        for other in told[1:]:
            for name in ("step", "strategy", "members", "kept", "redone", "behind", "asleep"):
                mine, theirs = getattr(first.regroup, name), getattr(other.regroup, name)
                if mine != theirs:
                    who = f"{first.life.who} and {other.life.who}"
                    return f"{who} declare another {name} of membership {first.regroup.number} ({mine}, {theirs})"
        return None

    def _impossible(self, regroup: Regroup, geometry: SamplePlan) -> str | None:
        name, members = f"membership {regroup.number} of attempt {self.number}", regroup.members
        if regroup.strategy not in STRATEGIES:
            return f"{name} was found by {regroup.strategy!r:.20}, which is no strategy"
        if not members or list(members) != sorted({*members}) or members[-1] >= self._world:
            return f"{name} cannot have the members {names(members)} in a world of {self._world}"
        if not 0 <= regroup.step < geometry.steps or (self.regroups and regroup.step < self.regroups[-1].step):
            return f"{name} was settled in step {regroup.step}, which it cannot have been in"
        return None

    def _settle(self, told: Sequence[Told], geometry: SamplePlan, lives: Mapping[int, list[Life]]) -> None:
        regroup, before = told[0].regroup, self.members
        step, members = regroup.step, tuple(regroup.members)
        basis = self.basis(step)
        begun = is_begun(told, basis)
        slept = {member for member in regroup.asleep if member in before}
        gone = slept | {member for each in told for member in each.regroup.lost if member in before}
        if slept and begun:
            self._complain(f"members fell asleep within step {step} of attempt {self.number}, and not before it")
        come = [member for member in members if member not in before or member in gone]
        self.regroups.append(regroup)
        self.members = members
        self._divide(step + begun, members)
        for member in sorted(gone):
            self._lose(member, regroup, begun, lives[member])
        self._asleep |= slept
        for member in come:
            self._join(member, regroup, lives[member])
            late = begun and is_complete(regroup)  # then this window has all its sums without it
            self._since[member] = step + (late or member not in self.basis(step))
        for each in told:
            self._declare(each, basis if begun else (), geometry)

    def _divide(self, first: int, members: Sequence[int]) -> None:
        while self._firsts and self._firsts[-1] >= first:
            self._firsts.pop()
            self._bases.pop()
        self._firsts.append(first)
        self._bases.append(members)

    def _lose(self, member: int, regroup: Regroup, begun: bool, lives: list[Life]) -> None:
        """A member ends here: what it wrote must end, too, and what it could no longer write is not asked for."""
        step, complete = regroup.step, is_complete(regroup)
        here = lives[0] if lives and self._gone.get(member) is not lives[0] else None
        if member not in regroup.asleep:
            self.lost.append(LostMember(member, step, complete, here))
            self._excused[member] |= {step - 1} | ({step} if begun else set())
        if lives and not (here and here.recover) and self._took_part(member, regroup):
            since, until = self._since.get(member, 0), f"lost in step {step} of attempt {self.number}"
            self._complain(
                f"member {member} took part since step {since}, was {until}, and never said with what it began"
            )
        if here is None:
            return  # one that took its place is lost, too, before it had joined
        life = self._gone[member] = here
        last = life.steps.last
        goes_on = (
            bool(life.ended)
            or (bool(life.regroups) and life.regroups[-1][0].number >= regroup.number)
            or any(commit.step > step for commit in life.commits)
        )
        if goes_on or (last is not None and last > (step if begun else step - 1)):
            self._complain(f"{life.who} goes on after it was lost in step {step} of attempt {self.number}")
        elif any(commit.step > life.reached and not commit.found for commit in life.commits):
            self._complain(
                f"{life.who} saved more than the {life.reached} steps that it reached in attempt {self.number}"
            )
        elif life.recover and life.reached < step - 2:  # a step is written in the next backward, after its last sum
            self._complain(
                f"{life.who} ended at step {life.reached}, and was lost in step {step} of attempt {self.number}"
            )
        elif begun and not complete and last == step:
            self._void[id(life)] = step
        elif life.recover and life.reached == step - 2 and member not in regroup.asleep:
            self._excused[member].add(step - 2)

    def _took_part(self, member: int, regroup: Regroup) -> bool:
        """Whether there are sums that a member had a part in before it was lost: earlier, it has said how it began."""
        summed, until = self.summed, regroup.step + is_complete(regroup)
        place = int(np.searchsorted(summed, self._since.get(member, 0)))
        return place < len(summed) and int(summed[place]) < until

    @cached_property
    def _ends(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the memberships that each member left, in order."""
        ends: defaultdict[int, list[int]] = defaultdict(list)
        for number in sorted(self._told):
            for member in leavers(self._told[number][0].regroup):
                ends[member].append(number)
        return ends

    @cached_property
    def summed(self) -> Numbers:
        """The windows in which anybody says that gradients were summed over all members."""
        return np.unique(np.concatenate([life.steps.step[life.steps.reduced > 0] for life in self._lives]))

    def _join(self, member: int, regroup: Regroup, lives: list[Life]) -> None:
        """A member begins here, with its next life in this attempt if it came so far as to write one."""
        start = regroup.step if member in self.basis(regroup.step) else regroup.step + 1
        ends = self._ends[member]
        place = bisect_right(ends, regroup.number)
        until = ends[place] if place < len(ends) else None
        first = -1 if len(lives) < 2 else regroup.number if lives[1].arrival is None else lives[1].arrival
        if regroup.number <= first and (until is None or first < until):
            del lives[0]
            self.joined.append(JoinedMember(lives[0], start, len(self.regroups) - 1, member in self._asleep))
            self._asleep.discard(member)
            if start == regroup.step:
                self._excused[member].discard(start)

    def _declare(self, told: Told, basis: Sequence[int], geometry: SamplePlan) -> None:
        """The samples that are missing are the shares of those who were lost, in a window that was begun with them."""
        regroup, life = told.regroup, told.life
        name = f"{life.who} declares in membership {regroup.number} of attempt {self.number}"
        if life.rank not in regroup.members:
            self._complain(f"{name} that others go on without it")
        if told.rows.start and life.steps.step[told.rows.start - 1] >= regroup.step:
            self._complain(f"{name} who goes on in step {regroup.step}, which it had reported before")
        if life.arrival is None and life.recover and regroup.step < life.start:
            self._complain(f"{name} who goes on in step {regroup.step}, and it began with step {life.start}")
        gone = self._lacked(told, basis)
        planned = shares(geometry, regroup, gone, basis)
        again = bool(gone) and all(self._came_back(member) for member in gone)
        none = not gone or is_complete(regroup) or again or regroup.strategy == "replay"
        declared = sorted(regroup.missing)
        if declared != sorted(planned) and not (none and not declared):
            of = f"membership {regroup.number} of attempt {self.number}"
            said = f"{life.who} declares {counted(len(declared), 'sample')} of step {regroup.step} missing in {of}"
            self._complain(f"{said}, and {expected(regroup, gone, len(planned))}")
        elif declared and (is_complete(regroup) or again):
            self._complain(f"{name} samples of step {regroup.step} missing, which were trained")
        elif declared and regroup.strategy == "replay":
            self._complain(
                f"{name} samples of step {regroup.step} missing, and what is lost is trained again by replay"
            )
        if declared:
            self.missing[regroup.step] |= set(declared)
        if declared and regroup.strategy == "skip":
            self.skipped.add(regroup.step)
        elif declared:
            self._lacking |= {(member, regroup.step) for member in gone}
        if not declared and gone and not is_complete(regroup):
            for member in gone:
                self._excused[member].discard(regroup.step)

    def _lacked(self, told: Told, basis: Sequence[int]) -> list[int]:
        """Whose gradients a window lacks, as far as this life has seen it.

        Sums that were kept may be lost with the last who has them: then the window lacks also whom they held.
        """
        regroup, life = told.regroup, told.life
        step, before = self._spared.get(id(life), (-1, ()))
        spared = [member for member in before if step == regroup.step and member in basis]
        gone = [*spared, *(member for member in regroup.lost if member in basis and member not in spared)]
        self._spared[id(life)] = (regroup.step, gone if is_complete(regroup) else ())
        if not is_complete(regroup):
            self._void |= {id(each): step for each in map(self._gone.get, spared) if each and each.steps.last == step}
        return gone

    def _look_for_missing(self) -> None:
        """A share that is declared missing was reported by nobody, but where the others finished without its member."""
        by_member: defaultdict[int, list[int]] = defaultdict(list)
        for member, step in sorted(self._lacking):
            by_member[member].append(step)
        for life in self._lives:
            told = np.intersect1d(life.steps.step, by_member[life.rank]).tolist()
            for step in (each for each in told if each != self.void(life)):
                self._complain(
                    f"{life.who} reports step {step} of attempt {self.number}, and its share is declared missing"
                )

    def _came_back(self, member: int) -> bool:
        """Whether a member that was lost in the last regroup was replaced in it, and trains its share itself."""
        now = len(self.regroups) - 1
        latest = takewhile(lambda each: each.place == now, reversed(self.joined))
        return any(each.life.rank == member and each.start == self.regroups[now].step for each in latest)

    def _complain(self, why: str) -> None:
        self.wrong = self.wrong or why
