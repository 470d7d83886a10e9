"""Where the members of a run that recovers live find each other: what each says in the workers' store, and hears there.

The supervisor publishes memberships. Members say where they stand, to settle how they go on, and before which window
they can be joined. Every wait ends when the supervisor publishes the next membership, and the supervisor does so
whenever one of them is lost or stuck.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public

from holdfast import progress
from holdfast.distributed.boundary import BoundaryGate
from holdfast.distributed.gloo_link import Broken, Link
from holdfast.distributed.membership import LIVE, Membership, MembershipWatch
from holdfast.live.settlement import Stand
from holdfast.progress import Phase

EXPELLED = 76  # the exit status of a worker that the supervisor no longer counts as a member
LOOK = 0.001


class Asleep(Exception):
    """This worker is no longer a member, until it is let in again."""


@dataclass(slots=True, eq=False)
class Coordination:
    """One member among the others; `member` is its number as long as it is a member, and `seat` always the same."""

    member: int
    members: tuple[int, ...]
    store: Callable[[], Store]  # a new connection to the store each time: a wait in one would block the others
    seat: int
    is_joining: bool = False  # it waits to become a member
    number: int = 0  # of the membership we are in
    gate: BoundaryGate = field(default_factory=BoundaryGate)
    _nearest: int = 0  # where we can be joined, if that is beyond the boundary that comes next
    _said: int = 0  # the membership for which we have said before which window we can be joined
    _talk: Store | None = None
    _watch: MembershipWatch | None = None

    def listen(self, lost: Callable[[], None]) -> None:
        """Hear of memberships from now on; `lost` is called, in another thread, when members are no more."""
        self._talk = PrefixStore(LIVE, self.store())
        self._watch = MembershipWatch(PrefixStore(LIVE, self.store()), lambda newest: self._heard(newest, lost))

    @property
    def rank(self) -> int:
        """Our place among the members."""
        return self.members.index(self.member) if self.members else self.member

    @property
    def newest(self) -> Membership:
        """The membership that was published last."""
        return self._watch.current if self._watch else Membership()

    @property
    def is_outdated(self) -> bool:
        """Whether a member was lost: there is a membership without it that we are not in yet."""
        return self.newest.number > self.number and self.newest.has_lost(self.members)

    def watch_members(self) -> Callable[[], bool]:
        """Asks, whenever it is called, whether one of the members that there are now was lost since."""
        members, number = self.members, self.number
        return lambda: self.newest.number > number and self.newest.has_lost(members)

    def await_admission(self) -> None:
        """Wait until the supervisor lets us in."""
        while (newest := self.newest).number == self.number or (found := newest.number_of(self.seat)) is None:
            if newest.number == self.number + 1 and self.member in newest.members and self.member not in newest.joining:
                os._exit(EXPELLED)  # it came while we fell asleep, and counts on us: somebody else must come
            time.sleep(LOOK)
        self.member, self.members = found, newest.members

    def leave(self) -> None:
        """We are no member any more, until we are let in again."""
        self.is_joining, self.members = True, ()

    def next(self) -> Membership:
        """Go over to the next membership, once the supervisor has published it. We may be to sleep."""
        while self.newest.number == self.number:
            time.sleep(LOOK)
        with self.gate.lock:
            newest = self.newest
            self.number = newest.number
            self.gate.waiting.discard(self)
        if self.member in newest.asleep:
            raise Asleep
        if self.member not in newest.members or newest.joining.get(self.member, self.seat) != self.seat:
            os._exit(EXPELLED)
        return newest

    def exchange(self, members: tuple[int, ...], stand: Stand) -> Mapping[int, Stand]:
        """Say where we stand, and learn it of every member; all wait for the last."""
        keys = [f"stand/{self.number}/{member}" for member in members]
        self._store.set(f"stand/{self.number}/{self.member}", json.dumps(stand.to_json()))
        if not self._are_there(keys, self.number):
            raise Broken("the membership has changed while its members met")
        said = [Stand.from_json(json.loads(self._store.get(key))) for key in keys]
        return dict(zip(members, said, strict=True))

    def connect(self, link: Link, members: tuple[int, ...]) -> None:
        """Replace the connections by those among these members."""
        number = self.number

        def store() -> Store:
            return PrefixStore(f"{LIVE}/group/{number}", self.store())

        link.connect(store, members.index(self.member), len(members), lambda: self.newest.number > number)

    def has_joiners_at(self, step: int) -> bool:
        """Whether members join before this window: the furthest that any of us comes to next, once all have said."""
        with self.gate.lock:
            number = self.newest.number
            if number == self.number or self._said < number:
                self._nearest = step + 1
                return False
        keys = [f"next/{number}/{member}" for member in self.members]
        with progress.during(Phase.RECOVERING):
            if not self._are_there(keys, number):
                return False  # it is another membership by now
        return step >= max(int(self._store.get(key)) for key in keys)

    @property
    def _store(self) -> Store:
        assert self._talk is not None
        return self._talk

    def _are_there(self, keys: list[str], number: int) -> bool:
        """Wait until all have been said; not if there is a newer membership before."""
        while not self._store.check(keys):
            if self.newest.number > number:
                return False
            time.sleep(LOOK)
        return True

    def _heard(self, newest: Membership, lost: Callable[[], None]) -> None:
        """In the thread that listens: end what waits for members that are no more; or say when others may join."""
        if self.is_joining:
            return
        is_lost = newest.has_lost(self.members)
        with self.gate.lock:
            if newest.number > self.number:
                self.gate.waiting.add(self)
            if not is_lost:
                nearest, self._said = max(self.gate.next, self._nearest), newest.number
        if is_lost:
            lost()
            return
        PrefixStore(LIVE, self.store()).set(f"next/{newest.number}/{self.member}", str(nearest))
