"""Rank sessions: the events of one process of a rank, from one `open` event in its file up to the next.

    open  attempt  [commit found]  plan  {regroup}  recover  step, save, commit, order, regroup ...  [done, stopped or preempted]

A session may end anywhere, because processes are killed. The `attempt` event gives the rank and world size of the
process, and each later `regroup` event may change them. A process that joins a running attempt writes `regroup` before
`recover`.
"""

from bisect import bisect_right
from collections.abc import Iterator

from holdfast.audit.step_columns import StepColumns
from holdfast.events import (
    Attempt,
    Commit,
    Corruption,
    Done,
    Malformed,
    Open,
    Order,
    Other,
    Plan,
    Preempted,
    Reassembled,
    Recover,
    Regroup,
    Save,
    Seconds,
    Step,
    Stopped,
    Strike,
    What,
    Witnessed,
)
from holdfast.history.folded import StepRun
from holdfast.sampler.digest import Samples

_FIRST_EVENTS = ("attempt", "plan", "recover")


class RankSession:
    """The events that one worker process recorded in one attempt.

    `error` describes the first event that contradicts earlier events; it is None if there is none."""

    def __init__(self, who: str, rank: int, opened: Open | None) -> None:
        self.who, self.rank = who, rank
        self.attempt: int | None = None
        self.world: int | None = None
        self.seed: int | None = None
        self.plan: Plan | None = None
        self.recover: Recover | None = None
        self.orders: list[Order] = []
        self.witnesses: list[Witnessed] = []
        self.corruption: Corruption | None = None
        self.commits: list[Commit] = []
        self.end: Done | Stopped | Preempted | None = None
        self.steps = StepColumns()
        self.regroups: list[tuple[Regroup, int]] = []  # each with the number of step events before it
        self.reassembled: list[Reassembled] = []
        self.joined_as: int | None = None  # the last membership declared before `recover`, of a member that joins
        self._has_begun = False
        self._placements: list[tuple[int, int, int]] = []  # (first row, rank, world size) at each change
        self._may_save = rank == 0
        self._saved_steps: set[int] = set()
        self._checked: tuple[int, int, int] | None = None  # attempt, rank and world size of the last valid step event
        self.error: str | None = None if opened else f"{who} has no open event before its first event"

    @property
    def tensor_parallel(self) -> int:
        """The number of ranks in a group that trains the same samples."""
        return max(1, self.plan.tensor_parallel) if self.plan else 1

    @property
    def first_step(self) -> int:
        """The first step that this process had to train: the step of its restored snapshot, or 0 if it has none."""
        return (self.recover.restored or 0) if self.recover else 0

    @property
    def reached(self) -> int:
        """The step after the last step that this process trained."""
        last = self.steps.last
        return self.first_step if last is None else last + 1

    @property
    def is_idle(self) -> bool:
        """True if the process ended before it restored a state, trained a step or saved."""
        return not (self.recover or self.regroups or len(self.steps) or self.commits or self.end)

    def placements(self) -> Iterator[tuple[range, int, int]]:
        """Yield (range of indices in `steps`, share, number of shares) for each period in which both are constant.

        The share is the part of a step's samples that this process trained: its rank among all ranks or, with tensor
        parallelism, that of its group among all groups."""
        ends = [*(row for row, _, _ in self._placements[1:]), len(self.steps)]
        size = self.tensor_parallel
        return (
            (range(row, end), rank // size, world // size)
            for (row, rank, world), end in zip(self._placements, ends, strict=False)
        )

    def placement(self, row: int) -> tuple[int, int]:
        """Return the share that this process had in the step at index `row`, and the number of shares."""
        _, rank, world = self._placements[bisect_right(self._placements, row, key=lambda place: place[0]) - 1]
        return rank // self.tensor_parallel, world // self.tensor_parallel

    def add(self, what: What) -> None:
        """Append the next event of this process, and set `error` if the event is not valid at this point."""
        if type(what) is Step:
            if (what.attempt, what.rank, what.world) != self._checked:
                self._check_step(what)
            self.steps.add(what)
        elif isinstance(what, Attempt):
            self._require_first(self.attempt is None, what)
            self._check_place(what, what.rank, what.world)
            self._has_begun, self.seed = True, what.seed
        elif isinstance(what, Plan):
            self._check_order(what, 1)
            self._require_first(not (self.plan or self.recover), what)
            self.plan = what
        elif isinstance(what, Recover):
            self._check_order(what, 2)
            self._require_first(not self.recover and self.steps.last is None, what)
            self.recover = what
        elif isinstance(what, Order):
            self._check_order(what, 3)
            self.orders.append(what)
        elif isinstance(what, Commit | Save):
            self._add_save(what)
        elif isinstance(what, Done | Stopped | Preempted):
            self._add_end(what)
        elif isinstance(what, Regroup):
            self._check_order(what, 3 if self.recover else 2)
            self.joined_as = self.joined_as if self.recover else what.number
            self.regroups.append((what, len(self.steps)))
            self._may_save = self._may_save or what.members[:1] == (self.rank,)
        elif isinstance(what, Witnessed):
            self._check_order(what, 3)
            self.witnesses.append(what)
        elif isinstance(what, Corruption):
            self._check_order(what, 3)
            self.corruption = what
        elif isinstance(what, Reassembled):
            self._check_order(what, 2)
            self.reassembled.append(what)
        elif not isinstance(what, Strike | Other | Malformed):
            self._set_error(f"{self.who} wrote {named(what)} event, which only a supervisor writes")

    def add_run(self, run: StepRun) -> None:
        """Append folded steps, as if their events were added one by one."""
        place, before = (run.panel.attempt, run.rank, run.panel.world), len(self._placements)
        if place != self._checked:
            attempt, rank, world = place
            self._check_step(Step(attempt, world, rank, 0, 0, run.first, Samples(), Seconds(0.0, 0.0, 0.0)))
        self.steps.add_run(run, may_join=len(self._placements) == before)

    def _check_step(self, step: Step) -> None:
        # After a regroup, `Memberships` checks rank and world size against what all members declare.
        self._check_order(step, 3, None if self.regroups else step.rank, None if self.regroups else step.world)
        place = (step.rank, step.world) if self.regroups else (self.rank, self.world or 0)
        if not self._placements or self._placements[-1][1:] != place:
            self._placements.append((len(self.steps), *place))
        if self.error is None:
            self._checked = (step.attempt, step.rank, step.world)

    def _add_save(self, what: Commit | Save) -> None:
        was_found = isinstance(what, Commit) and what.found
        self._check_order(what, 1 if was_found else 3)
        if not self._may_save:
            saver = "the first member" if self.regroups else "rank-0"
            self._set_error(f"{self.who} wrote {named(what)} event, but only {saver} saves")
        if was_found and self.recover:
            self._set_error(f"{self.who} found the snapshot of step {what.step} after it had restored one")
        if isinstance(what, Save):
            self._saved_steps.add(what.step)
            return
        if self._saved_steps and not what.found and what.step not in self._saved_steps:
            step = f"step {what.step} in attempt {what.attempt}"
            self._set_error(f"{self.who} committed {step} without a save event of it")
        self.commits.append(what)

    def _add_end(self, what: Done | Stopped | Preempted) -> None:
        self._check_order(what, 3)
        if what.step != self.reached:
            end = f"{type(what).__name__.lower()} at step {what.step} in attempt {what.attempt}"
            self._set_error(f"{self.who} was {end}, but had trained {self.reached} steps")
        self.end, self._checked = what, None

    def _check_order(self, what: What, needed: int, rank: int | None = None, world: int | None = None) -> None:
        self._check_place(what, rank, world)
        if self.end:
            self._set_error(f"{self.who} wrote {named(what)} event after the end of its attempt {self.attempt}")
        written = (self._has_begun, self.plan, self.recover)
        missing = [name for name, event in zip(_FIRST_EVENTS[:needed], written, strict=False) if not event]
        if missing:
            event = f"{named(what)} event in attempt {self.attempt}"
            self._set_error(f"{self.who} wrote {event} before its {' and '.join(missing)} event")

    def _check_place(self, what: What, rank: int | None, world: int | None) -> None:
        attempt: int = what.attempt  # type: ignore[union-attr]
        if self.attempt is None:
            self.attempt = attempt
        if world is not None and self.world is None:
            self.world = world
        if attempt != self.attempt or rank not in (None, self.rank) or world not in (None, self.world):
            step = ""
            if isinstance(what, Step | Commit | Save | Done | Stopped | Preempted):
                step = f" of step {what.step}"
            place = f"attempt {attempt}" + ("" if world is None else f", rank {rank} of {world}")
            mine = f"attempt {self.attempt}, rank {self.rank} of {self.world}"
            self._set_error(f"{self.who} wrote {named(what)} event{step} for {place}, in a session of {mine}")

    def _require_first(self, is_first: bool, what: What) -> None:
        if not is_first:
            self._set_error(f"{self.who} wrote {named(what)} event twice or too late in attempt {self.attempt}")

    def _set_error(self, text: str) -> None:
        self.error = self.error or text


def named(what: What) -> str:
    """Return the type of event `what` in lower case with "a" or "an" before it, for example "a commit"."""
    return with_article(type(what).__name__.lower())


def with_article(word: str) -> str:
    return f"{'an' if word[:1] in 'aeiou' else 'a'} {word:.40}"
