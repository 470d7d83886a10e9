"""The membership of a run with live recovery: the workers that currently train together, as the supervisor decides.

A worker that loses a connection only suspects its peer. The supervisor alone decides which workers are members, because
it alone knows which processes are dead. Whenever a member is lost or hangs, the supervisor publishes a new membership
in the workers' store, and that ends every wait of a worker for its peers.

Members are numbered by their ranks at the start of the run, and keep these numbers. The current rank of a member is its
index among the present members.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.distributed.ranks import BoundaryGate
from holdfast.progress import Phase

LIVE = "live"
EXPELLED = 76  # the exit status of a worker that the supervisor no longer counts as a member
POLL_SECONDS = 0.001
Report = TypeVar("Report")
_LAST_POLL, _POLL_GROWTH = 0.02, 1.2  # a message is noticed at most a fifth of its waiting time late


class Membership(NamedTuple):
    """A group of workers that train together. When a worker is lost or joins, a group with the next `number` follows.

    `members` are the member numbers of these workers. `joining` maps the member number of each lost worker to the
    process that replaces it. Workers in `asleep` were suspended between two steps, so none of their work is lost."""

    number: int = 0
    members: tuple[int, ...] = ()
    joining: Mapping[int, int] = {}  # member number -> seat (fixed number) of the worker process
    asleep: tuple[int, ...] = ()

    def has_lost(self, members: Collection[int]) -> bool:
        """Return True if any of `members` (member numbers) has left this group or is replaced by a joining worker.

        A suspended worker does not count as lost."""
        return not set(members) <= (set(self.members) - set(self.joining)) | set(self.asleep)

    def number_of(self, seat: int) -> int | None:
        """Return the member number of the joining worker process `seat`; None if that process does not join."""
        return next((number for number, joining in self.joining.items() if joining == seat), None)

    def to_json(self) -> list[Any]:
        return [self.number, to_spans(self.members), list(self.joining.items()), to_spans(self.asleep)]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Membership":
        number, members, joining, asleep = data
        return cls(number, from_spans(members), dict(joining), from_spans(asleep))


def to_spans(numbers: Iterable[int]) -> list[list[int]]:
    """Return `numbers`, in their order, as pairs of the first and last number of each ascending run.

    All workers read every membership. As a list of thousands of numbers, its traffic would grow with their square."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def from_spans(spans: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the numbers that `to_spans` has written."""
    return tuple(number for first, last in spans for number in range(first, last + 1))


def publish(store: Store, membership: Membership) -> None:
    store.set(f"membership/{membership.number}", json.dumps(membership.to_json()))


def _post(store: Store, key: str, member: int, text: str) -> None:
    """Write the message of `member` under `key`, and then count it, so that a look at the number needs one request."""
    store.set(f"{key}/{member}", text)
    store.add(f"{key}/count", 1)


def _posts(store: Store, key: str) -> int:
    return int(store.add(f"{key}/count", 0))


class MembershipWatch(threading.Thread):
    """A thread that calls `changed` with every membership (group of workers) that is published in `store`."""

    def __init__(self, store: Store, changed: Callable[[Membership], None]) -> None:
        super().__init__(name="holdfast-membership", daemon=True)
        self._store, self._changed = store, changed
        self.current = Membership()
        self.start()

    def run(self) -> None:
        while True:
            key = f"membership/{self.current.number + 1}"
            try:
                self._store.wait([key], timedelta(days=365))
                membership = Membership.from_json(json.loads(self._store.get(key)))
            except (RuntimeError, ValueError):
                return  # the store is gone, and the run with it
            self.current = membership  # before the call: other threads read it
            self._changed(membership)


class Suspended(Exception):
    """Raised in a worker that the supervisor has suspended, until the supervisor lets it train again."""


@dataclass(slots=True, eq=False)
class Coordination:
    """One worker's view of the membership (the group of workers that train together).

    `member` is the number of this worker in the group, and `seat` the number of its process. `members` are the numbers
    of all workers in the group, and `number` counts the changes of the group. `store` opens a connection to the store
    in which the supervisor publishes memberships."""

    member: int
    members: tuple[int, ...]
    store: Callable[[], Store]  # opens a new connection each time, because a wait blocks the others of a connection
    seat: int
    is_joining: bool = False  # True while this worker waits to become a member
    rank_for_life: int | None = None  # the member number of this process, which never changes; None for a spare
    number: int = 0  # of the membership that this worker is in
    gate: BoundaryGate = field(default_factory=BoundaryGate)
    _nearest: int = 0  # the step before which others can join, if that is beyond the next boundary
    agreed: int = 0  # the newest membership that all members have agreed to enter at the same boundary
    _answered: int = 0  # the membership for which this worker has posted the step before which others can join
    _connection: Store | None = None
    _watch: MembershipWatch | None = None

    def listen(self, lost: Callable[[], None]) -> None:
        """Start a thread that follows changes of the group, and calls `lost` whenever workers are lost."""
        self._connection = PrefixStore(LIVE, self.store())
        self._watch = MembershipWatch(PrefixStore(LIVE, self.store()), lambda newest: self._on_change(newest, lost))

    @property
    def rank(self) -> int:
        """The current rank of this worker: its index among the workers that train."""
        return self.members.index(self.member) if self.members else self.member

    @property
    def newest(self) -> Membership:
        """The most recently published membership (group of workers that train together)."""
        return self._watch.current if self._watch else Membership()

    @property
    def is_outdated(self) -> bool:
        """True if a worker was lost and this worker has not yet joined the group of the remaining workers."""
        return self.newest.number > self.number and self.newest.has_lost(self.members)

    def watch_members(self) -> Callable[[], bool]:
        """Return a function that returns True once any of the workers that train now is lost."""
        members, number = self.members, self.number
        return lambda: self.newest.number > number and self.newest.has_lost(members)

    def await_admission(self) -> None:
        """Wait until the supervisor lets this worker train, and take the member number that the supervisor assigns."""
        while (newest := self.newest).number == self.number or (member := newest.number_of(self.seat)) is None:
            if newest.number == self.number + 1 and self.member in newest.members and self.member not in newest.joining:
                os._exit(EXPELLED)  # published while this worker was being suspended, it counts on a worker that left
            time.sleep(POLL_SECONDS)
        self.member, self.members = member, newest.members
        self.rank_for_life = member

    def await_rank(self) -> int:
        """Return the rank that this process keeps for life. A spare first waits until it replaces a lost worker."""
        if self.rank_for_life is None:
            with progress.during(Phase.JOINING), progress.here.asking_for_rank():
                while (rank := progress.here.assigned) is None:
                    time.sleep(POLL_SECONDS)
            self.rank_for_life = rank
        return self.rank_for_life

    def leave(self) -> None:
        """Mark this worker as not training, until the supervisor admits it again."""
        self.is_joining, self.members = True, ()

    def next(self) -> Membership:
        """Wait for and return the next membership (group of workers).

        Raise Suspended if this worker is suspended; exit the process if this worker is not in the group."""
        while self.newest.number == self.number:
            time.sleep(POLL_SECONDS)
        with self.gate.lock:
            newest = self.newest
            self.number = newest.number
            self.gate.waiting.discard(self)
        if self.member in newest.asleep:
            raise Suspended
        if self.member not in newest.members or newest.joining.get(self.member, self.seat) != self.seat:
            os._exit(EXPELLED)
        return newest

    def exchange(
        self, members: tuple[int, ...], report: Mapping[str, Any], decode: Callable[[Any], Report]
    ) -> dict[int, Report]:
        """Post `report`, wait for the reports of all `members`, and return these reports by member number.

        The first member collects them, and writes equal reports once, with the members that sent them. So each member
        reads one message, whose length hardly depends on their number. `decode` is called once for equal reports."""
        key, store = f"stand/{self.number}", self._store
        _post(store, key, self.member, json.dumps(report))
        if self.member == members[0]:
            self._await(lambda: _posts(store, key) == len(members), self.number)
            store.set(f"{key}/all", json.dumps(self._collected(key, members)))
        self._await(lambda: bool(store.check([f"{key}/all"])), self.number)
        decoded = [(decode(json.loads(text)), spans) for text, spans in json.loads(store.get(f"{key}/all"))]
        return {member: report for report, spans in decoded for member in from_spans(spans)}

    def _collected(self, key: str, members: tuple[int, ...]) -> list[tuple[str, list[list[int]]]]:
        """Return the different reports under `key`, each with the members that sent it."""
        senders: dict[str, list[int]] = {}
        texts = self._store.multi_get([f"{key}/{member}" for member in members])
        for member, text in zip(members, texts, strict=True):
            senders.setdefault(text.decode(), []).append(member)
        return [(text, to_spans(numbers)) for text, numbers in senders.items()]

    def connect(self, link: Link, members: tuple[int, ...], name: str = "all") -> None:
        """Connect `link` to the processes of `members`. All of these processes must call this, with the same `name`."""
        number = self.number
        link.connect(
            lambda: PrefixStore(f"{LIVE}/group/{number}/{name}", self.store()),
            members.index(self.member),
            len(members),
            lambda: self.newest.number > number,
        )

    def has_joiners_at(self, step: int) -> bool:
        """Return True if new workers wait to join, and no worker has begun `step` or a later step.

        After False, this worker begins `step`; for any membership it has not answered yet, it answers a later step."""
        while (number := self._answered_before(step)) is not None:
            first = self._first_step_to_join(number)
            if first is not None and step >= first:
                self.agreed = number
                return True
            if first is not None and self._begins(step, number):
                return False
        return False  # a newer membership replaces the answered one, or there is none

    def _answered_before(self, step: int) -> int | None:
        """Return the newest membership if this worker has answered it; if not, let it answer a step after `step`."""
        with self.gate.lock:
            number = self.newest.number
            if number != self.number and self._answered >= number:
                return number
            self._nearest = step + 1
            return None

    def _first_step_to_join(self, number: int) -> int | None:
        """Wait for the step before which workers can join in membership `number`; None if a newer one replaces it."""
        store, key = self._store, f"next/{number}/all"
        with progress.during(Phase.RECOVERING):
            known = self._wait_until(lambda: bool(store.check([key])), number)
        return int(store.get(key)) if known else None

    def _begins(self, step: int, number: int) -> bool:
        """Let this worker begin `step`, unless it has answered a newer membership than `number`."""
        with self.gate.lock:
            if self._answered > number:
                return False
            self._nearest = step + 1
            return True

    @property
    def _store(self) -> Store:
        assert self._connection is not None
        return self._connection

    def _await(self, is_true: Callable[[], bool], number: int) -> None:
        if not self._wait_until(is_true, number):
            raise GroupBroken("the membership has changed while its members exchanged reports")

    def _wait_until(self, is_true: Callable[[], bool], number: int) -> bool:
        """Wait until `is_true()`; return False if a membership newer than `number` is published first."""
        pause = POLL_SECONDS
        while not is_true():
            if self.newest.number > number:
                return False
            time.sleep(pause)
            pause = min(_POLL_GROWTH * pause, _LAST_POLL)
        return True

    def _on_change(self, newest: Membership, lost: Callable[[], None]) -> None:
        """Handle a new membership: call `lost` if members were lost, else post the step before which workers can join.

        If this worker has entered the membership already, it has connections for it, which `lost` would break."""
        if self.is_joining:
            return
        is_lost = newest.has_lost(self.members)
        with self.gate.lock:
            if newest.number > self.number:
                self.gate.waiting.add(self)
                if is_lost:
                    lost()  # with the lock, without which this worker does not enter the membership
            if not is_lost:
                nearest, self._answered = max(self.gate.next, self._nearest), newest.number
        if is_lost:
            return
        _post(self._store, f"next/{newest.number}", self.member, str(nearest))
        if self.member == self.members[0]:
            # In a thread of its own: this one must see a still newer membership.
            collect = threading.Thread(target=self._collect_nearest, args=(newest.number, self.members))
            collect.daemon = True
            collect.start()

    def _collect_nearest(self, number: int, members: tuple[int, ...]) -> None:
        """Post the first step before which no worker has to be waited for, once all `members` have posted theirs."""
        key, store = f"next/{number}", self._store
        with suppress(RuntimeError):  # the store is gone, and the run with it
            if self._wait_until(lambda: _posts(store, key) == len(members), number):
                values = store.multi_get([f"{key}/{member}" for member in members])
                store.set(f"{key}/all", str(max(map(int, values))))
