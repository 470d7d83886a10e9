"""One life of a rank: what it wrote between two openings of its file, and whether in an order in which a rank lives.

    open  attempt  [commit found]  plan  {regroup}  recover  step, save, commit, regroup ...  [done, stopped or preempted]

A life may end anywhere. Its rank and world are those that it began with, until a regroup divides windows anew; one that
joins the others in the middle of an attempt declares that before it tells with what it begins. Before version 2 only
rank 0 told the plan, and a first attempt told no recover.
"""

from bisect import bisect_right
from collections.abc import Iterator

from holdfast.audit.step_columns import Columns
from holdfast.events import (
    Attempt,
    Commit,
    Done,
    Malformed,
    Open,
    Other,
    Plan,
    Preempted,
    Recover,
    Regroup,
    Save,
    Step,
    Stopped,
    Strike,
    What,
)

_BEGINNING = ("an attempt", "a plan", "a recover")


class Life:
    """What one rank wrote from one opening of its file to the next."""

    def __init__(self, who: str, rank: int, opened: Open | None) -> None:
        self.who, self.rank = who, rank
        self.version = opened.version if opened else 0
        self.began: Attempt | None = None
        self.plan: Plan | None = None
        self.recover: Recover | None = None
        self.commits: list[Commit] = []
        self.ended: Done | Stopped | Preempted | None = None
        self.steps = Columns()
        self.regroups: list[tuple[Regroup, int]] = []  # with the number of steps that were written before
        self.arrival: int | None = None  # the last membership that it declares before it tells with what it begins
        self.places: list[tuple[int, int, int]] = []  # rows of steps from which on it had another rank and world
        self.number: int | None = None  # of its attempt
        self.world: int | None = None
        self._saves = rank == 0
        self._saved: set[int] = set()  # steps of which it told what their save cost
        self._trains: tuple[int, int, int] | None = None  # steps of this attempt, rank and world need no more checks
        self.wrong: str | None = None if opened else f"{who} wrote before it had opened its history"

    @property
    def start(self) -> int:
        """The first step that is to be trained."""
        return (self.recover.restored or 0) if self.recover else 0

    @property
    def reached(self) -> int:
        """How many steps of the training this rank had behind it at last."""
        last = self.steps.last
        return self.start if last is None else last + 1

    @property
    def is_idle(self) -> bool:
        """Whether it never said with what it begins, nor who it goes on with: it ended before it took part."""
        return not (self.recover or self.regroups or len(self.steps) or self.commits or self.ended)

    def stretches(self) -> Iterator[tuple[range, int, int]]:
        """Rows of steps that say the same rank and world, and which."""
        ends = [*(row for row, _, _ in self.places[1:]), len(self.steps)]
        return ((range(row, end), rank, world) for (row, rank, world), end in zip(self.places, ends, strict=False))

    def place(self, row: int) -> tuple[int, int]:
        """The rank and the world of the step in this row, as it says."""
        return self.places[bisect_right(self.places, row, key=lambda place: place[0]) - 1][1:]

    def take(self, what: What) -> None:
        """Add what it wrote next."""
        if type(what) is Step:
            if (what.attempt, what.rank, what.world) != self._trains:
                self._check(what)
            self.steps.add(what)
        elif isinstance(what, Attempt):
            self._begin(what)
        elif isinstance(what, Plan):
            self._place(what)
            self._must_follow("a plan", 1)
            self._once(self.plan or self.recover, "a plan")
            self.plan = what
        elif isinstance(what, Recover):
            self._place(what)
            self._must_follow("a recover", 2)
            self._once(self.recover or self.steps.last is not None, "a recover")
            self.recover = what
        elif isinstance(what, Commit | Save):
            self._save(what)
        elif isinstance(what, Done | Stopped | Preempted):
            self._end(what)
        elif isinstance(what, Regroup):
            self._place(what)
            self.arrival = self.arrival if self.recover else what.number
            self._must_follow("a regroup", 3 if self.recover else 2)
            self.regroups.append((what, len(self.steps)))
            self._saves = self._saves or what.members[:1] == (self.rank,)
        elif not isinstance(what, Strike | Other | Malformed):
            self._complain(f"{self.who} wrote what only a supervisor can say ({type(what).__name__.lower()})")

    def _check(self, what: Step) -> None:
        if self.regroups:
            self._place(what)  # whether rank and world are right, the regroups of all members tell
        else:
            self._place(what, what.rank, what.world)
        place = (what.rank, what.world) if self.regroups else (self.rank, self.world or 0)
        if not self.places or self.places[-1][1:] != place:
            self.places.append((len(self.steps), *place))
        self._must_follow("a step", 3)
        if self.wrong is None:
            self._trains = (what.attempt, what.rank, what.world)

    def _begin(self, what: Attempt) -> None:
        self._once(self.number is not None, "an attempt")
        self._place(what, what.rank, what.world)
        self.began = what

    def _save(self, what: Commit | Save) -> None:
        self._place(what)
        found = isinstance(what, Commit) and what.found
        self._must_follow("a commit" if isinstance(what, Commit) else "a save", 1 if found else 3)
        if not self._saves:
            first = "the first member" if self.regroups else "rank-0"
            self._complain(f"{self.who} told of a save, and only {first} saves")
        if found and self.recover:
            self._complain(f"{self.who} found the snapshot of step {what.step} after it had restored one")
        if isinstance(what, Save):
            self._saved.add(what.step)
            return
        if self._saved and not what.found and what.step not in self._saved:
            self._complain(
                f"{self.who} told of a commit of step {what.step} in attempt {what.attempt}, and of no save of it"
            )
        self.commits.append(what)

    def _end(self, what: Done | Stopped | Preempted) -> None:
        self._place(what)
        how = type(what).__name__.lower()
        self._must_follow(f"that it was {how}", 3)
        if what.step != self.reached:
            self._complain(
                f"{self.who} was {how} at step {what.step} in attempt {what.attempt}, and had trained to step {self.reached}"
            )
        self.ended, self._trains = what, None

    def _place(self, what: What, rank: int | None = None, world: int | None = None) -> None:
        """Whose attempt, rank and world this is: those that the life began with."""
        attempt: int = what.attempt  # type: ignore[union-attr]
        if self.number is None:
            self.number = attempt
        if world is not None and self.world is None:
            self.world = world
        if attempt != self.number or rank not in (None, self.rank) or world not in (None, self.world):
            self._misplaced(what, attempt, rank, world)

    def _misplaced(self, what: What, attempt: int, rank: int | None, world: int | None) -> None:
        told = f"attempt {attempt}" + ("" if world is None else f", rank {rank} of {world}")
        mine = f"attempt {self.number}, rank {self.rank} of {self.world}"
        which = f" of step {what.step}" if isinstance(what, Step | Commit | Save | Done | Stopped | Preempted) else ""
        self._complain(f"{self.who} wrote {_named(what)}{which} of {told}, in a life of {mine}")

    def _must_follow(self, what: str, needed: int) -> None:
        """This comes after so many of what a life begins with, and before its end."""
        if self.ended:
            self._complain(f"{self.who} wrote {what} after it had ended in attempt {self.number}")
        beginning = (self.began, self.plan, self.recover)
        if self.wrong is None and (lacks := [_BEGINNING[i] for i in self._needs(needed) if beginning[i] is None]):
            self._complain(f"{self.who} wrote {what} in attempt {self.number} and had not told {' or '.join(lacks)}")

    def _needs(self, needed: int) -> list[int]:
        if self.version >= 2:
            return list(range(needed))
        first = (self.number or 1) <= 1
        return [i for i in range(needed) if i == 0 or (i == 2 and not first)]

    def _once(self, before: object, what: str) -> None:
        if before:
            self._complain(f"{self.who} wrote {what} a second time, or too late, in attempt {self.number}")

    def _complain(self, why: str) -> None:
        self.wrong = self.wrong or why


def _named(what: What) -> str:
    word = type(what).__name__.lower()
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
