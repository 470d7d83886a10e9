"""Live recovery of one rank: when members are lost, the others find together again and finish the step they were in.

Everything happens in the thread that trains. A backward whose sums did not come raises, and is caught here; a loss that
is heard of between two windows is dealt with at the boundary. Either way this rank waits for the supervisor's next
membership, says where it stands, connects with the other members, and does what the settlement of all their stands says.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public

from holdfast import progress, salvage
from holdfast.ddp import handover
from holdfast.ddp.crew import Crew
from holdfast.ddp.link import Broken, Link
from holdfast.ddp.membership import LIVE, Membership, Watch
from holdfast.ddp.protected import Protected
from holdfast.ddp.record import Record
from holdfast.ddp.settlement import NOWHERE, Settlement, Stand, settled
from holdfast.errors import WorkerLost
from holdfast.events import Regroup
from holdfast.geometry import Geometry
from holdfast.progress import Phase

EXPELLED = 76  # the exit status of a worker that the supervisor no longer counts as a member
LOOK = 0.001
TIMES = 9  # that buffers are asked for: so many losses in one forward


@dataclass(slots=True, eq=False)
class Live:
    """This rank among the members of a run that recovers live; `me` is its number, which never changes."""

    strategy: str
    me: int
    size: int  # how many members there are when none is lost
    members: tuple[int, ...]
    store: Callable[[], Store]  # a new connection to the store each time: a wait in one would block the others
    attempt: int = 0
    record: Record | None = None
    protected: Protected | None = None
    geometry: Geometry | None = None
    settle: Callable[[], None] = lambda: None  # puts every step on record that was trained by now
    link: Link = field(default_factory=Link)
    crews: list[Crew] = field(default_factory=list)
    number: int = 0  # of the membership we are in
    joins: bool = False  # in the place of one that was lost
    step: int = 0
    begun: bool = False
    basis: tuple[int, ...] = ()  # the members among whom the window is divided
    _passes: int = 0
    _whole: int = 1
    _shrinks_at: int | None = None
    _synced: int = 0
    _buffers: list[torch.Tensor] = field(default_factory=list)  # as they came from rank 0 in this window
    _spared: tuple[int, tuple[int, ...]] = (-1, ())  # a window, and those lost in it whose gradients are in all sums
    _given: bool = False  # they came from another, and the next forward uses them
    _basis_now: tuple[int, ...] | None = None
    _next_boundary: int = 0
    _staged: dict[str, Any] | None = None
    _dropped: int | None = None
    _settled: int | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)  # to pass a boundary, or to say which comes next
    _said: int = 0  # the membership for which we have said that
    _talk: Store | None = None
    _watch: Watch | None = None

    def join(self) -> None:
        """Connect with the members that start together, and listen for changes from now on."""
        self.basis = self.members
        self._talk = PrefixStore(LIVE, self.store())
        if not self.joins:
            self._connect(self.members)
        self._watch = Watch(PrefixStore(LIVE, self.store()), self._heard)
        _guard_backward(self)

    def crew(self) -> Crew:
        """A process group for one more model."""
        self.crews.append(Crew(self.link, self.me, self.size))
        return self.crews[-1]

    @property
    def rank(self) -> int:
        """Our place among the members."""
        return self.members.index(self.me) if self.members else self.me

    @property
    def is_outdated(self) -> bool:
        """Whether a member was lost: there is a membership without it that we are not in yet."""
        assert self._watch is not None
        newest = self._watch.current
        return newest.number > self.number and newest.has_lost(self.members)

    def lost(self) -> Callable[[], bool]:
        """Asks, whenever it is called, whether one of the members that there are now was lost since."""
        members, number, watch = self.members, self.number, self._watch
        return lambda: watch is not None and watch.latest > number and watch.current.has_lost(members)

    def arrive(self) -> int:
        """Take the place of a lost member, with the state of another; the window that we begin with."""
        began = perf_counter()
        progress.here.enters(Phase.JOINING)
        assert self._watch is not None
        while True:
            while not (self._watch.latest > self.number and self.me in self._watch.current.joining):
                time.sleep(LOOK)
            self.members = self._watch.current.members
            try:
                found = self._regroup(None, began)
                break
            except Broken:
                self.members = ()
        self.joins = False
        progress.here.enters(Phase.TRAINING)
        progress.here.regroups(self.number)
        return found.step

    def begins(self, step: int) -> None:
        """A window was handed out."""
        self.step, self.begun = step, True

    def ends(self) -> None:
        """The window was trained; if others were further, what came out of it is theirs."""
        if self._staged is not None:
            assert self.protected is not None
            self.protected.take_over(self._staged)
            self._staged = None

    def has_dropped(self, step: int) -> bool:
        """Whether nothing came out of this window."""
        return self._dropped == step

    def boundary(self, step: int) -> bool:
        """We come to the boundary before this window; whether the windows from here on are divided anew."""
        if self.begun:
            self._whole = max(1, self._passes)
        self.step, self.begun, self._passes, self._synced = step, False, 0, 0
        while self.is_outdated or self._grows_here(step):
            self.recover(None)
        return self._divides(step)

    def _grows_here(self, step: int) -> bool:
        """Whether members join before this window: the furthest that any of us comes to next, once all have said."""
        assert self._watch is not None
        assert self._talk is not None
        with self._turn:
            number = self._watch.latest
            if number == self.number or self._said < number:
                self._next_boundary = step + 1
                return False
        keys = [f"next/{number}/{member}" for member in self.members]
        with progress.during(Phase.RECOVERING):
            while not self._talk.check(keys):
                if self._watch.latest > number:
                    return False  # it is another membership by now
                time.sleep(LOOK)
        return step >= max(int(self._talk.get(key)) for key in keys)

    def _divides(self, step: int) -> bool:
        """Whether the windows from this one on are divided otherwise than those before."""
        if self._shrinks_at is None:
            return False
        if step >= self._shrinks_at:
            self._shrinks_at, basis = None, self.members
            self._weigh(basis)
        elif self._basis_now is not None:
            basis = self._basis_now
        else:
            return False
        self._basis_now = None
        divides, self.basis = basis != self.basis, basis
        return divides

    def take_settled(self) -> int | None:
        """The window that members were settled in since this was asked last, if any were."""
        settled, self._settled = self._settled, None
        return settled

    def weigh(self, geometry: Geometry) -> None:
        """Every rank counts by its share of the window."""
        self.geometry = geometry
        if not self.joins:
            self._weigh(self.basis)

    def survives(self, crew: Crew) -> bool:
        """Whether an error in the backward of this model was the loss of a member, and is mended."""
        if not crew.sums or not (self.link.is_broken or self.is_outdated or crew.has_failed()):
            return False
        self.recover(crew)
        self.passed(crew)
        return True

    def passed(self, crew: Crew) -> None:
        """A backward of this model has all its sums."""
        if crew.sums:
            crew.sums = []
            self._passes += 1
            if self._dropped == self.step:
                crew.drop()

    def recover(self, crew: Crew | None) -> None:
        """Find together with the members that are left, and finish what the backward of this model has begun."""
        began = perf_counter()
        progress.here.suspects(self.number)
        with progress.during(Phase.RECOVERING):
            while True:
                try:
                    self._regroup(crew, began)
                    break
                except Broken:
                    progress.here.suspects(self.number)
        progress.here.regroups(self.number)

    def _regroup(self, crew: Crew | None, began: float) -> Settlement:
        urgent = self.is_outdated
        members = self._next()
        if urgent:
            self.link.hang_up()
        if crew:
            crew.drain()
        stands = self._meet(members, self._stand(crew))
        self.link.hang_up()  # if not before: all are at the boundary now, and need it no more
        self._connect(members)
        self.members = members
        found = settled(stands)
        if isinstance(found, str):
            raise WorkerLost(f"the members cannot go on from where they are ({found})")
        # At once: another loss may come before all is done, and what is summed without the lost stays so.
        self._tell(found, perf_counter() - began)
        self._shrinks_at = found.step + found.begun
        self._settled = max(self._settled or 0, found.step)
        if found.begun:
            self._basis_now = found.basis
            self._weigh_survivors(found.basis)
        if found.joining:
            self._let_in(found, stands)
        if found.synced:
            self._hand_buffers(found)
        if found.begun and not found.is_complete and self.strategy == "skip":
            self._dropped = found.step
        self._hand_over(found, crew)
        if crew and self.me not in found.behind:
            self._sum_again(found, crew)
        if crew:
            crew.unpack()
        return found

    def sync_buffers(self, broadcast: Callable[[], None], buffers: list[torch.Tensor]) -> None:
        """Before a forward all ranks take over rank 0's buffers; if members are lost meanwhile, those of the new one."""
        for again in range(TIMES):
            if self._given:
                break
            try:
                broadcast()
                break
            except RuntimeError:  # gloo has no type for a peer that is gone
                if again == TIMES - 1:
                    raise
                self.recover(None)
        if self._given:
            torch._foreach_copy_(buffers, self._buffers)
            self._given = False
        elif len(self._buffers) == len(buffers):
            torch._foreach_copy_(self._buffers, buffers)
        else:
            self._buffers = [each.clone() for each in buffers]
        self._synced += 1

    def _hand_buffers(self, found: Settlement) -> None:
        giver = self.members.index(found.syncer)
        if self.me == found.syncer:
            handover.give(self.link, giver, self._buffers)
            return
        state = handover.take(self.link, giver)
        if self.me in found.synced:
            self._buffers, self._given = state, True

    def _next(self) -> tuple[int, ...]:
        """The next membership, once the supervisor has published it."""
        assert self._watch is not None
        while self._watch.latest == self.number:
            time.sleep(LOOK)
        newest = self._watch.current
        self.number = newest.number
        if self.me not in newest.members or (self.me in newest.joining and not self.joins):
            os._exit(EXPELLED)
        return newest.members

    def _stand(self, crew: Crew | None) -> Stand:
        if self.joins:
            return Stand(step=NOWHERE)
        return Stand(
            step=self.step,
            begun=self.begun,
            basis=self.basis,
            members=self.members,
            passes=self._passes,
            whole=self._whole,
            buckets=tuple(bool(each.is_done) for each in crew.sums) if crew else None,
            synced=self._synced,
            model=self.crews.index(crew) if crew else 0,
            boundaries=progress.here.boundaries,
            posted=progress.here.posted,
        )

    def _let_in(self, found: Settlement, stands: Mapping[int, Stand]) -> None:
        """Give those that join the whole state of a member; what a window changes before its end comes beside."""
        assert self.protected is not None
        first = (found.basis or self.members)[0]
        if self.strategy == "replay" and first in found.joining and not found.syncs and self._buffers:
            raise WorkerLost("rank 0 is lost, and its buffers with it: the run starts again from its newest snapshot")
        giver = self.members.index(found.giver)
        if self.me == found.giver:
            self.settle()  # whoever joins may outlive us all: what came before it must be on record
            handover.give(self.link, giver, self.protected.capture())
            return
        state = handover.take(self.link, giver)
        if self.joins:
            self.protected.restore(state)
            progress.here.catches_up(stands[found.giver].boundaries - found.begun, stands[found.giver].posted)
            self.basis = ()

    def _meet(self, members: tuple[int, ...], stand: Stand) -> Mapping[int, Stand]:
        """Where every member stands; all wait for the last."""
        assert self._talk is not None
        assert self._watch is not None
        self._talk.set(f"stand/{self.number}/{self.me}", json.dumps(stand.to_json()))
        keys = [f"stand/{self.number}/{member}" for member in members]
        while not self._talk.check(keys):
            if self._watch.latest > self.number:
                raise Broken("the membership has changed while its members met")
            time.sleep(LOOK)
        said = [Stand.from_json(json.loads(self._talk.get(key))) for key in keys]
        return dict(zip(members, said, strict=True))

    def _connect(self, members: tuple[int, ...]) -> None:
        number = self.number

        def store() -> Store:
            return PrefixStore(f"{LIVE}/group/{number}", self.store())

        self.link.connect(store, members.index(self.me), len(members), lambda: self._is_behind(number))

    def _is_behind(self, number: int) -> bool:
        return self._watch is not None and self._watch.latest > number

    def _heard(self, newest: Membership) -> None:
        """In the thread that listens: end what waits for members that are no more; or say when others may join."""
        if self.joins:
            return
        if newest.has_lost(self.members):
            self.link.hang_up()
            return
        number = newest.number
        assert self._talk is not None
        with self._turn:
            nearest, self._said = self._next_boundary, number
        PrefixStore(LIVE, self.store()).set(f"next/{number}/{self.me}", str(nearest))

    def _hand_over(self, found: Settlement, crew: Crew | None) -> None:
        for bucket, holder in enumerate(found.given):
            if holder is None:
                continue
            if crew:
                handover.broadcast(self.link, self.members.index(holder), crew.sums[bucket].values)
                crew.sums[bucket].is_done = True
            else:  # we join
                late = self.crews[found.model]
                late.given[bucket] = late.empty(bucket)
                handover.broadcast(self.link, self.members.index(holder), late.given[bucket])
        if not found.behind:
            return
        assert self.protected is not None
        if self.me == found.giver:
            handover.give(self.link, self.rank, self._staged or self.protected.trained())
            return
        state = handover.take(self.link, self.members.index(found.giver))
        if self.me in found.behind and crew:
            self._staged = state
            for bucket, each in enumerate(crew.sums):
                if not each.is_done:
                    crew.pack(bucket)  # anything finite: what comes of it is replaced at the boundary
                    each.is_done = True

    def _sum_again(self, found: Settlement, crew: Crew) -> None:
        again = [bucket for bucket, holder in enumerate(found.given) if holder is None]
        for bucket in again:
            crew.pack(bucket)
        for bucket in again:
            crew.post_again(bucket)
        for bucket in again:
            try:
                crew.sums[bucket].work.wait()
            except RuntimeError as error:
                self.link.hang_up()
                raise Broken(str(error)) from error
            crew.sums[bucket].is_done = True

    def _samples(self, basis: tuple[int, ...]) -> list[int]:
        assert self.geometry is not None
        return [self.geometry.share_size(rank, len(basis)) for rank in range(len(basis))]

    def _weigh(self, basis: tuple[int, ...]) -> None:
        self._count_as(salvage.normal(self._samples(basis))[basis.index(self.me)])

    def _weigh_survivors(self, basis: tuple[int, ...]) -> None:
        lost = [rank for rank, member in enumerate(basis) if member not in self.members]
        found = salvage.weights("forward", completed=False, samples=self._samples(basis), casualties=lost)
        assert found is not None
        self._count_as(found[basis.index(self.me)])

    def _count_as(self, weight: float) -> None:
        even = 1.0 / self.size
        for crew in self.crews:
            crew.factor = 1.0 if weight == even else weight * self.size

    def _tell(self, found: Settlement, seconds: float) -> None:
        assert self.record is not None
        self.record.append(
            Regroup(
                attempt=self.attempt,
                number=self.number,
                step=found.step,
                strategy=self.strategy,
                members=self.members,
                lost=found.lost,
                missing=self._missing(found),
                kept=sum(each is not None for each in found.given),
                redone=sum(each is None for each in found.given),
                behind=found.behind,
                seconds=seconds,
            )
        )
        self.record.flush()

    def _missing(self, found: Settlement) -> tuple[int, ...]:
        """The samples that the window lacks for good."""
        before = self._spared[1] if self._spared[0] == found.step else ()
        lost = [*before, *(member for member in found.lost if member in found.basis and member not in before)]
        if found.is_complete:  # for now: whoever has a sum that others lack may be lost before it is handed over
            self._spared = (found.step, tuple(lost))
            return ()
        self._spared = (found.step, ())
        if not found.begun or not lost or self.strategy == "replay":
            return ()
        assert self.geometry is not None
        at, world = self.geometry.position(found.step), len(found.basis)
        if self.strategy == "skip":
            return tuple(self.geometry.window(at).tolist())
        ranks = [found.basis.index(member) for member in lost]
        return tuple(int(each) for rank in ranks for each in self.geometry.share(at, rank, world))


def _guard_backward(live: Live) -> None:
    """Catch what backward raises where a member was lost; `Tensor.backward` looks it up at every call."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **options: Any) -> None:
        try:
            plain(*args, **options)
        except RuntimeError:
            if not any(live.survives(crew) for crew in live.crews):
                raise
        else:
            for crew in live.crews:
                if not (live.link.is_broken and crew.has_failed() and live.survives(crew)):
                    live.passed(crew)

    torch.autograd.backward = backward
