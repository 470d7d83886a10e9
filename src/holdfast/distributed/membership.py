"""The membership of a run with live recovery: the workers that currently train together, as the supervisor decides.

A worker that loses a connection only suspects its peer. The supervisor alone decides which workers are members, because
it alone knows which processes are dead. It publishes every new membership in the workers' store, and does so whenever a
member is lost or hangs. Every wait of a worker ends when that happens.

Members are numbered by their ranks at the start of the run, and keep these numbers. The current rank of a member is its
index among the present members.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.distributed.ranks import BoundaryGate
from holdfast.progress import Phase

LIVE = "live"
EXPELLED = 76  # the exit status of a worker that the supervisor no longer counts as a member
POLL_SECONDS = 0.001


class Membership(NamedTuple):
    """The workers that train together until the next membership is published; `number` grows with each membership.

    `members` are the numbers of its members. `joining` maps the number of each lost member to the worker process that
    replaces it. Workers in `asleep` are suspended: they were members and left between two steps, so none of their work
    is lost."""

    number: int = 0
    members: tuple[int, ...] = ()
    joining: Mapping[int, int] = {}  # member number -> seat (fixed number) of the worker process
    asleep: tuple[int, ...] = ()

    def has_lost(self, members: Collection[int]) -> bool:
        """Return True if any of `members` was removed from the group or replaced by a joining worker.

        A suspended member does not count as lost."""
        return not set(members) <= (set(self.members) - set(self.joining)) | set(self.asleep)

    def number_of(self, seat: int) -> int | None:
        """Return the member number that the worker process `seat` gets by joining; None if it does not join."""
        return next((number for number, joining in self.joining.items() if joining == seat), None)

    def to_json(self) -> list[Any]:
        return [self.number, self.members, list(self.joining.items()), self.asleep]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Membership":
        number, members, joining, asleep = data
        return cls(number, tuple(members), dict(joining), tuple(asleep))


def publish(store: Store, membership: Membership) -> None:
    """Publish `membership` to the workers through `store`."""
    store.set(f"membership/{membership.number}", json.dumps(membership.to_json()))


class MembershipWatch(threading.Thread):
    """A thread that reads every membership as it is published, and calls `changed` with it."""

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
    """Raised in a worker that the supervisor has suspended: it is not a member until it is admitted again."""


@dataclass(slots=True, eq=False)
class Coordination:
    """One worker's view of the membership, the group of workers that train together.

    `member` is the worker's member number, which it keeps for life, and `seat` the number of its process. `members` are
    the member numbers of the group, and `number` is the number of the group itself, which grows with each change.
    `store` opens a new connection to the store in which the supervisor publishes memberships."""

    member: int
    members: tuple[int, ...]
    store: Callable[[], Store]  # opens a new connection each time, because a wait blocks the others of a connection
    seat: int
    is_joining: bool = False  # True while this worker waits to become a member
    rank_for_life: int | None = None  # the member number of this process, which never changes; None for a spare
    number: int = 0  # of the membership that this worker is in
    gate: BoundaryGate = field(default_factory=BoundaryGate)
    _nearest: int = 0  # the step before which others can join, if that is beyond the next boundary
    _answered: int = 0  # the membership for which this worker has posted the step before which others can join
    _connection: Store | None = None
    _watch: MembershipWatch | None = None

    def listen(self, lost: Callable[[], None]) -> None:
        """Start to follow published memberships; `lost` is called in another thread whenever members are lost."""
        self._connection = PrefixStore(LIVE, self.store())
        self._watch = MembershipWatch(PrefixStore(LIVE, self.store()), lambda newest: self._on_change(newest, lost))

    @property
    def rank(self) -> int:
        """The current rank of this worker: its index among the members."""
        return self.members.index(self.member) if self.members else self.member

    @property
    def newest(self) -> Membership:
        """The most recently published membership."""
        return self._watch.current if self._watch else Membership()

    @property
    def is_outdated(self) -> bool:
        """True if a member was lost and this worker has not yet entered the membership without the lost member."""
        return self.newest.number > self.number and self.newest.has_lost(self.members)

    def watch_members(self) -> Callable[[], bool]:
        """Return a function that returns True once any of the present members is lost."""
        members, number = self.members, self.number
        return lambda: self.newest.number > number and self.newest.has_lost(members)

    def await_admission(self) -> None:
        """Wait until the supervisor makes this worker a member, and take the member number that it assigns."""
        while (newest := self.newest).number == self.number or (member := newest.number_of(self.seat)) is None:
            if newest.number == self.number + 1 and self.member in newest.members and self.member not in newest.joining:
                os._exit(EXPELLED)  # published while this worker was being suspended, it counts on a worker that left
            time.sleep(POLL_SECONDS)
        self.member, self.members = member, newest.members
        self.rank_for_life = member

    def await_rank(self) -> int:
        """Return the rank that this process has for life. A spare waits here until it is to replace a lost worker."""
        if self.rank_for_life is None:
            with progress.during(Phase.JOINING), progress.here.asking_for_rank():
                while (rank := progress.here.assigned) is None:
                    time.sleep(POLL_SECONDS)
            self.rank_for_life = rank
        return self.rank_for_life

    def leave(self) -> None:
        """Stop being a member, until the supervisor admits this worker again."""
        self.is_joining, self.members = True, ()

    def next(self) -> Membership:
        """Wait for and return the next membership. Raise Suspended if this worker is suspended; exit if removed."""
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

    def exchange(self, members: tuple[int, ...], report: Mapping[str, Any]) -> dict[int, Any]:
        """Post `report` and wait for the reports of all `members`; return them by member number."""
        keys = [f"stand/{self.number}/{member}" for member in members]
        self._store.set(f"stand/{self.number}/{self.member}", json.dumps(report))
        if not self._wait_for_all(keys, self.number):
            raise GroupBroken("the membership has changed while its members exchanged reports")
        return {member: json.loads(self._store.get(key)) for member, key in zip(members, keys, strict=True)}

    def connect(self, link: Link, members: tuple[int, ...]) -> None:
        """Connect `link` to the processes of `members`, all of which must call this."""
        number = self.number
        link.connect(
            lambda: PrefixStore(f"{LIVE}/group/{number}", self.store()),
            members.index(self.member),
            len(members),
            lambda: self.newest.number > number,
        )

    def has_joiners_at(self, step: int) -> bool:
        """Return True if new workers join before `step`. They join before the first step that no member has begun."""
        with self.gate.lock:
            number = self.newest.number
            if number == self.number or self._answered < number:
                self._nearest = step + 1
                return False
        keys = [f"next/{number}/{member}" for member in self.members]
        with progress.during(Phase.RECOVERING):
            if not self._wait_for_all(keys, number):
                return False  # a newer membership replaces this one
        return step >= max(int(self._store.get(key)) for key in keys)

    @property
    def _store(self) -> Store:
        assert self._connection is not None
        return self._connection

    def _wait_for_all(self, keys: list[str], number: int) -> bool:
        """Wait until all `keys` are set; return False if a membership newer than `number` is published first."""
        while not self._store.check(keys):
            if self.newest.number > number:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _on_change(self, newest: Membership, lost: Callable[[], None]) -> None:
        """Handle a new membership: call `lost` if members were lost, else publish at which step workers can join."""
        if self.is_joining:
            return
        is_lost = newest.has_lost(self.members)
        with self.gate.lock:
            if newest.number > self.number:
                self.gate.waiting.add(self)
            if not is_lost:
                nearest, self._answered = max(self.gate.next, self._nearest), newest.number
        if is_lost:
            lost()
            return
        PrefixStore(LIVE, self.store()).set(f"next/{newest.number}/{self.member}", str(nearest))
