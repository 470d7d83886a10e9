"""Rank sessions: the events of one process of a rank, from one `open` event in its file up to the next.

    open  attempt  [commit found]  plan  {regroup}  recover  step, save, commit, order, regroup ...  [done, stopped or preempted]

A session may end anywhere, because processes are killed. The `attempt` event gives the rank and world size of the
process, and each later `regroup` event may change them. A process that joins a running attempt writes `regroup` before
`recover`.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from holdfast.events import (
    Attempt,
    Commit,
    Done,
    Malformed,
    Open,
    Order,
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
from holdfast.sampler.digest import Samples

Numbers = NDArray[np.int64]
_FIRST_EVENTS = ("attempt", "plan", "recover")


def shared_part(state: str) -> int:
    """Return a hash (never 0) of the first half of the fingerprint `state`, which covers the state of all ranks."""
    return hash(state[: len(state) // 2]) or 1


class _Column:
    """A descriptor that returns a column of `StepColumns` as a NumPy array: the attribute `step` reads `_step`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._array = f"_{name}"

    def __get__(self, steps: "StepColumns", owner: type) -> Numbers:
        return np.frombuffer(getattr(steps, self._array), np.int64)


class StepColumns:
    """The step events of one worker process, stored as one array for each field, because there may be millions.

    A row is the index of a step in these arrays. State fingerprints are stored as hashes; 0 means that none was
    recorded."""

    step, epoch, cursor = _Column(), _Column(), _Column()
    count = _Column()  # samples
    state = _Column()  # the whole fingerprint
    shared = _Column()  # the half of the fingerprint that covers the state that all ranks share
    reduced = _Column()  # backward passes that were all-reduced

    def __init__(self) -> None:
        self._step, self._epoch, self._cursor = array("q"), array("q"), array("q")
        self._count, self._digest = array("q"), bytearray()
        self._state, self._shared, self._loss = array("q"), array("q"), array("d")
        self._reduced, self._worked = array("q"), bytearray()

    def add(self, step: Step) -> None:
        self._step.append(step.step)
        self._epoch.append(step.epoch)
        self._cursor.append(step.cursor)
        self._count.append(step.samples.count)
        self._digest += bytes.fromhex(step.samples.digest)
        state = step.state
        self._state.append(0 if state is None else hash(state) or 1)
        self._shared.append(0 if state is None else shared_part(state))
        self._loss.append(math.nan if step.loss is None else step.loss)
        self._reduced.append(step.reduced)
        self._worked.append((step.reduced + step.held > 0) + 2 * (step.stepped > 0))

    def __len__(self) -> int:
        return len(self._step)

    @property
    def last(self) -> int | None:
        return self._step[-1] if self._step else None

    @cached_property
    def is_consecutive(self) -> bool:
        """True if step numbers increase by 1 from row to row. The result is cached, so read it after the last `add`."""
        return bool((np.diff(self.step) == 1).all())

    @property
    def digest(self) -> NDArray[np.uint64]:
        """The 128-bit digest of the sample ids of each step, as an array of shape (steps, 2)."""
        return np.frombuffer(self._digest, ">u8").reshape(-1, 2).astype(np.uint64)

    @property
    def loss(self) -> NDArray[np.float64]:
        return np.frombuffer(self._loss, np.float64)

    @property
    def had_backward(self) -> NDArray[np.bool_]:
        """Mask of the steps that had a backward pass, with or without an all-reduce of the gradients."""
        return (np.frombuffer(self._worked, np.uint8) & 1) > 0

    @property
    def worked(self) -> NDArray[np.bool_]:
        """Mask of the steps that had a backward pass or an optimizer step."""
        return np.frombuffer(self._worked, np.uint8) > 0

    @property
    def stepped(self) -> NDArray[np.bool_]:
        return np.frombuffer(self._worked, np.uint8) > 1

    def samples(self, row: int) -> Samples:
        """Return the count and the digest of the samples that were trained in the step at index `row`."""
        return Samples(self._count[row], self._digest[16 * row : 16 * row + 16].hex())


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
        self.commits: list[Commit] = []
        self.end: Done | Stopped | Preempted | None = None
        self.steps = StepColumns()
        self.regroups: list[tuple[Regroup, int]] = []  # each with the number of step events before it
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
        elif not isinstance(what, Strike | Other | Malformed):
            self._set_error(f"{self.who} wrote {named(what)} event, which only a supervisor writes")

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
