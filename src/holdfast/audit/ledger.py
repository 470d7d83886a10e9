"""What the checks of an audit read: the lives of all ranks and supervisors, and what of them counts.

Order across ranks is told by attempts, and within one by what follows from what: a snapshot was found before it came
back, and was saved after. Clocks decide nothing.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from holdfast.audit.declared import JoinedMember
from holdfast.audit.life import Life
from holdfast.audit.memberships import Memberships
from holdfast.audit.step_columns import Numbers
from holdfast.audit.supervision import Supervision
from holdfast.errors import BadInput
from holdfast.events import Commit, Event, Malformed, Open, Other, Plan, Recover, Strike
from holdfast.finding import SHOWN, CannotTell, where
from holdfast.history.lineage import Lineage
from holdfast.history.log import Torn
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan

_INJECTOR = re.compile(r"injected-(storage|0|[1-9][0-9]{0,17})")


class ShareReport(NamedTuple):
    """A rank's share of a window, trained, as it says."""

    who: str
    rank: int
    world: int
    attempt: int
    samples: Samples


class Restore(NamedTuple):
    """What came back in a life, and the commit of it that stood then, if one did."""

    life: Life
    recover: Recover
    commit: Commit | None
    saver: int | None  # the attempt that trained up to that commit
    abandoned: bool  # there was a commit of this step, of a branch that did not stand

    def __str__(self) -> str:
        step = self.recover.restored
        what = "nothing" if step is None else f"step {step}"
        return f"{self.life.who} restored {what}"

    def passed_over(self, step: int) -> bool:
        """Whether the snapshot of this step was found, and not used."""
        return any(str(each.get("name")).rstrip("/") == f"step-{step:08d}" for each in self.recover.passed_over)


class CommittedSave(NamedTuple):
    """A commit, and the attempt that must have trained up to it: the one whose branch it ends, as it stood then."""

    commit: Commit
    trainer: int | None


class Ledger:
    """What the checks of an audit read of a run, from its events in any order that keeps each writer's own."""

    def __init__(
        self,
        history: Iterable[Event] = (),
        torn: Sequence[Torn] = (),
        argv: Sequence[str] | None = None,
        recovery: str | None = None,
        weights: str | None = None,
        at_home: bool = False,
    ) -> None:
        self.events = 0
        self.recovery = recovery  # how the run was to recover, if that is known
        self.writers: set[str] = set()
        self.torn = torn
        self.argv = argv  # what was to be run, where run.json tells it
        self.weights = weights  # the digest of what it was to begin with, told there, too
        self.at_home = at_home  # whether its snapshots lie in its own folder, as run.json tells
        self.malformed: list[str] = []
        self.strays: list[str] = []  # lines in a file of another writer
        self.strangers: list[str] = []  # writers who say what they cannot know
        self.supervisions: list[Supervision] = []
        self.strikes: list[tuple[str, Strike]] = []  # failures that were struck on purpose, and who tells of each
        self._all: dict[str, list[Life]] = {}
        self._at: dict[str, Life | Supervision] = {}
        for event in history:
            self.take(event)

    def take(self, event: Event, file: str | None = None) -> None:
        """Add an event, from the file of this name if it was read from one."""
        who, what = event.who, event.what
        self.events += 1
        self.writers.add(who)
        if file not in (None, who):
            self.strays.append(f"{file}.jsonl has a line of {who}")
        if isinstance(what, Malformed):
            self.malformed.append(f"{_article(what.kind)} of {who}{where(what, file)}: {what.why}")
        if type(what) is Open:
            self._open(who, what)
        elif (life := self._at.get(who) or self._open(who, None)) is None:
            if isinstance(what, Strike) and _INJECTOR.fullmatch(who):
                self.strikes.append((who, what))
            elif not isinstance(what, Other | Malformed):
                self.strangers.append(f"{who} is neither a rank nor a supervisor, and tells of {_article(event.kind)}")
        elif isinstance(life, Life):
            life.take(what)
        elif not life.take(what):
            self.strangers.append(f"{who} tells of {_article(event.kind)}, which only a rank can")

    def _open(self, who: str, what: Open | None) -> Life | Supervision | None:
        if (rank := rank_of(who)) is not None:
            life = Life(who, rank, what)
            self._all.setdefault(who, []).append(life)
            self._at[who] = life
            return life
        if re.fullmatch(r"supervisor(-[0-9]+)?", who):
            self.supervisions.append(supervision := Supervision(who, what))
            self._at[who] = supervision
            return supervision
        return None

    @cached_property
    def lives(self) -> Mapping[str, Sequence[Life]]:
        """The lives of each rank, in order."""
        return {who: self._all[who] for who in sorted(self._all, key=lambda who: self._all[who][0].rank)}

    @cached_property
    def attempts(self) -> Mapping[int, Sequence[Life]]:
        """The lives of each attempt, by its number and in the order of ranks."""
        attempts: defaultdict[int, list[Life]] = defaultdict(list)
        for lives in self.lives.values():
            for life in lives:
                if life.number is not None:
                    attempts[life.number].append(life)
        return {number: attempts[number] for number in sorted(attempts)}

    @cached_property
    def plans(self) -> Sequence[tuple[Life, Plan]]:
        """Every plan and whose it is, in the order of attempts and ranks."""
        return [(life, life.plan) for lives in self.attempts.values() for life in lives if life.plan]

    @property
    def has_begun(self) -> bool:
        """Whether any rank has said what it is to train, or that it trained."""
        return any(life.plan or life.recover or len(life.steps.step) for lives in self._all.values() for life in lives)

    @cached_property
    def geometry(self) -> SamplePlan:
        """What is to be trained, as the first plan says; a run may be extended, by a later one that is as long or longer."""
        if not self.plans:
            raise CannotTell("no plan event says which windows to expect")
        life, plan = self.plans[0]
        longest = max((each for _, each in self.plans if each.extends), key=_length, default=plan)
        last = max((plan, longest), key=_length)
        try:
            return SamplePlan(
                samples=plan.samples, batch=plan.batch, epochs=last.epochs, seed=plan.seed, limit=last.limit
            )
        except BadInput as error:
            raise CannotTell(f"the plan of {life.who} says nothing that can be trained: {error}") from error

    @cached_property
    def lineage(self) -> Lineage:
        """What counts at the end of the history."""
        self._restores_and_saves()
        return self._lineage

    @cached_property
    def restores(self) -> Sequence[Restore]:
        """Every recover with the commit that stood for it."""
        return self._restores_and_saves()[0]

    @cached_property
    def saves(self) -> Sequence[CommittedSave]:
        """Every commit with the attempt that must have trained up to it."""
        return self._restores_and_saves()[1]

    @cache  # noqa: B019  # a ledger lives as long as its audit
    def _restores_and_saves(self) -> tuple[list[Restore], list[CommittedSave]]:
        lineage = self._lineage = Lineage()
        restores: list[Restore] = []
        saves: list[CommittedSave] = []
        savers: dict[int, int | None] = {}  # by step: of the last commit of it
        for lives in self.attempts.values():
            commits = [commit for life in lives for commit in life.commits]
            saves += [self._saved(lineage, each, savers) for each in commits if each.found]
            came_back = [(life, life.recover) for life in lives if life.recover and not self.has_joined(life)]
            if lineage.trainer(0) is None and not came_back:  # before version 2 a first attempt told of none
                lineage.add(Recover(lives[0].number or 1, None, 0, 0, "keyed", 0.0))
            stood = dict(lineage.commits)
            for life, recover in came_back:
                step = -1 if recover.restored is None else recover.restored
                restores.append(Restore(life, recover, stood.get(step), savers.get(step), step in savers))
                lineage.add(recover)
            saves += [self._saved(lineage, each, savers) for each in commits if not each.found]
        return restores, saves

    @staticmethod
    def _saved(lineage: Lineage, commit: Commit, savers: dict[int, int | None]) -> CommittedSave:
        trainer = savers[commit.step] = lineage.trainer(max(0, commit.step - 1))
        lineage.add(commit)
        return CommittedSave(commit, trainer)

    @cache  # noqa: B019  # a ledger lives as long as its audit
    def memberships(self, attempt: int) -> Memberships:
        """Who took part in which windows of an attempt."""
        found = Memberships(attempt, self.world(attempt), self.attempts.get(attempt, ()))
        return found.read(self.geometry) if found.is_live else found

    @cached_property
    def live(self) -> Sequence[Memberships]:
        """Those of the attempts in which members were lost or joined while others went on."""
        numbers = [number for number, lives in self.attempts.items() if any(life.regroups for life in lives)]
        return [self.memberships(number) for number in numbers]

    @cached_property
    def joins(self) -> Mapping[int, JoinedMember]:
        """The lives that began in the middle of an attempt, by their id."""
        return {id(each.life): each for memberships in self.live for each in memberships.joined}

    def has_joined(self, life: Life) -> bool:
        """Whether this life began in the middle of an attempt, with the state of a survivor."""
        return id(life) in self.joins

    def never_joined(self, life: Life) -> bool:
        """Whether this life was to take the place of a lost one, and ended before it did."""
        live = self.recovery not in (None, "restart") or any(each.number == life.number for each in self.live)
        return live and life.is_idle

    def lacking(self) -> int:
        """How many samples of windows that count are declared missing."""
        return sum(
            len(ids)
            for memberships in self.live
            for step, ids in memberships.missing.items()
            if step in self.trained.get(memberships.number, ())
        )

    @cached_property
    def committed(self) -> int:
        """How many of the kept steps are covered by a commit that stands."""
        return self.lineage.committed

    def kept(self, life: Life) -> Numbers:
        """The rows of a life's steps that no later recover rolled back, and that others did not finish without it."""
        limit = self.lineage.limit(life.number or 0)
        numbers = life.steps.step
        void = self.memberships(life.number).void(life) if life.number is not None and self.live else None
        if void is None and (not len(numbers) or numbers.max() < limit):
            return np.arange(len(numbers))
        return np.flatnonzero((numbers < limit) & (numbers != (-1 if void is None else void)))

    @cached_property
    def trained(self) -> Mapping[int, Numbers]:
        """By attempt, the numbers of the steps that were kept, each once and in order; attempts without any left out."""
        trained: dict[int, Numbers] = {}
        for number, lives in self.attempts.items():
            numbers = [life.steps.step[self.kept(life)] for life in lives]
            if any(map(len, numbers)):
                trained[number] = np.unique(np.concatenate(numbers))
        return trained

    def world(self, attempt: int) -> int:
        """How many ranks an attempt had, as the first of them says."""
        worlds = (life.world for life in self.attempts.get(attempt, ()) if life.world is not None)
        if (world := next(worlds, None)) is None:
            raise CannotTell(f"the history does not tell how many ranks attempt {attempt} had")
        return world

    def absent(self, attempt: int) -> list[str]:
        """Ranks of an attempt's world of which there is no history at all; not more of them than are told."""
        world = self.world(attempt)
        if sum(lives[0].rank < world for lives in self.lives.values()) == world:
            return []
        return list(islice((who for who in map("rank-{}".format, range(world)) if who not in self.lives), SHOWN))

    def reports(self, step: int) -> list[ShareReport]:
        """What was reported of a step that was kept."""
        found: list[ShareReport] = []
        for number, lives in self.attempts.items():
            for life in lives:
                kept = self.kept(life)
                rows = kept[life.steps.step[kept] == step].tolist()
                found += [ShareReport(life.who, *life.place(row), number, life.steps.samples(row)) for row in rows]
        return found

    def of_ranks(self, attempt: int) -> Iterator[tuple[int, Life]]:
        """The lives of an attempt by the rank they began with, those that belong to its world."""
        world = self.world(attempt)
        return ((life.rank, life) for life in self.attempts[attempt] if life.rank < world)


def _length(plan: Plan) -> tuple[int, int]:
    """Plans in the order of their lengths; a limit ends a plan within its last epoch."""
    return plan.epochs, sys.maxsize if plan.limit is None else plan.limit


@cache
def rank_of(who: str) -> int | None:
    """The number of the rank that writes under this name."""
    found = re.fullmatch(r"rank-(0|[1-9][0-9]{0,17})", who)
    return int(found[1]) if found else None


def _article(kind: str) -> str:
    word = f"{kind:.40}"
    return f"an {word}" if word[:1] in "aeiou" else f"a {word}"
