"""Live recovery of one rank: when members are lost, the others find together again and finish the step they were in.

Everything happens in the thread that trains. A backward whose sums did not come raises, and is caught here; a loss that
is heard of between two windows is dealt with at the boundary. Either way this rank waits for the supervisor's next
membership, says where it stands, connects with the other members, and does what the settlement of all their stands says.

Whether and how a rank recovers live: as its run wants, if what its ranks talk over allows it.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from holdfast import progress
from holdfast.distributed import nccl_link, script_collectives
from holdfast.distributed import ranks as world
from holdfast.distributed.gloo_link import Broken, Link
from holdfast.distributed.process_group import RecoverableGroup, guard_backward
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput
from holdfast.events import Regroup
from holdfast.live import state_transfer
from holdfast.live.coordination import Coordination
from holdfast.live.settlement import NOWHERE, Losses, Settlement, Stand, settled
from holdfast.live.state_transfer import Buffers
from holdfast.progress import IN_RESERVE, Phase, fallen_back
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import SamplePlan
from holdfast.train.state.attempt import Enrolled
from holdfast.train.state.protected import Protected


@dataclass(slots=True, eq=False)
class LiveRecovery:
    """This rank among the members of a run that recovers live."""

    strategy: str
    size: int  # how many members there are when none is lost
    meeting: Coordination
    attempt: int = 0
    record: Enrolled | None = None
    protected: Protected | None = None
    settle: Callable[[], None] = lambda: None  # puts every step on record that was trained by now
    injected: Callable[[int], None] = lambda step: None  # called once it is settled how to go on after a loss
    is_pending: Callable[[], bool] = lambda: False  # whether gradients of earlier windows wait for their optimizer
    buffers: Buffers = field(default_factory=Buffers)
    link: Link = field(default_factory=Link)
    crews: list[RecoverableGroup] = field(default_factory=list)
    step: int = 0
    begun: bool = False
    adds_up: bool = False
    basis: tuple[int, ...] = ()  # the members among whom the window is divided
    _losses: Losses | None = None
    _passes: int = 0
    _whole: int = 1
    _shrinks_at: int | None = None
    _basis_now: tuple[int, ...] | None = None
    _staged: dict[str, Any] | None = None  # what others have after the window that we are in: ours at its end
    _known: tuple[int, ...] = ()  # the members of the last membership that is on record
    _dropped: int | None = None
    _settled: int | None = None
    _checked: int | None = None

    def join(self) -> None:
        """Connect with the members that start together, and listen for changes from now on."""
        self.basis = self._known = self.meeting.members
        if not self.joins:
            self.meeting.connect(self.link, self.basis)
        self.meeting.listen(self.link.hang_up)
        guard_backward(self)

    def crew(self) -> RecoverableGroup:
        """A process group for one more model."""
        self.crews.append(RecoverableGroup(self.link, self.me % self.size, self.size))
        return self.crews[-1]

    @property
    def me(self) -> int:
        """Our number, the same as long as we are a member."""
        return self.meeting.me

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of all that go on together."""
        return self.meeting.members

    @property
    def joins(self) -> bool:
        """Whether we have yet to take the place of one that was lost."""
        return self.meeting.joins

    @property
    def place(self) -> tuple[int, int]:
        """Our rank among how many, in the division of the window that we go on with."""
        basis = self._basis_now or self.members
        return basis.index(self.me), len(basis)

    def arrive(self) -> int:
        """Take the place of a lost member, with the state of another; the window that we begin with."""
        progress.here.enters(Phase.JOINING)
        assert self.record is not None
        while True:
            self.meeting.await_admission()
            self.record.enrol(self.me)
            try:
                found = self._regroup(None, began=perf_counter())
                break
            except Broken:
                self.meeting.leave()
        self.meeting.joins = False
        script_collectives.outlive(self.me, self.size)
        progress.here.enters(Phase.TRAINING)
        progress.here.regroups(self.meeting.number)
        return found.step

    def sleep(self) -> None:
        """Leave the others, with all that this worker holds, until they want it again."""
        assert self.record is not None
        progress.here.regroups(IN_RESERVE)
        self.settle()
        self.record.retire()
        self.link.hang_up()
        self.meeting.leave()
        self._shrinks_at = self._basis_now = self._settled = None

    def begins(self, step: int) -> None:
        """A window is handed out."""
        self.step, self.begun = step, True

    def ends(self, stepped: int) -> None:
        """The window was trained, in so many steps of optimizers; if others were further, what came of it is theirs."""
        self._whole, self._passes, self.buffers.synced = max(1, self._passes), 0, 0
        self.adds_up = not stepped
        if self._staged is not None:
            assert self.protected is not None
            self.protected.take_over(self._staged)
            self._staged = None

    def has_dropped(self, step: int) -> bool:
        """Whether nothing came out of this window."""
        return self._dropped == step

    def boundary(self, step: int, *, last: bool = False) -> bool:
        """We come to the boundary before this window; whether the windows from here on are divided anew.

        At the last one, after which there is no window, nobody is let in.
        """
        self.step, self.begun = step, False
        while self.meeting.is_outdated or (not last and self.meeting.grows_at(step)):
            self.recover(None)
        divides = self._divides(step)
        if self._shrinks_at is None:
            self.meeting.turn.leave(self)
        return divides

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

    def weigh(self, geometry: SamplePlan) -> None:
        """Every rank counts by its share of the window."""
        self._losses = Losses(self.strategy, geometry)
        if not self.joins:
            self._weigh(self.basis)

    def sync_buffers(self, broadcast: Callable[[], None], buffers: list[torch.Tensor]) -> None:
        """Before a forward all ranks take over rank 0's buffers."""
        self.buffers.sync(broadcast, buffers, lambda: self.recover(None))

    def survives(self, crew: RecoverableGroup) -> bool:
        """Whether an error in the backward of this model was the loss of a member, and is mended."""
        if not crew.sums or not (self.link.is_broken or self.meeting.is_outdated or crew.has_failed()):
            return False
        self.recover(crew)
        self.passed(crew)
        return True

    def check_backward(self) -> None:
        """Refuse to add gradients to those of an earlier window: no survivor has those that a lost rank had."""
        first, self._checked = self._checked != self.step, self.step
        if first and self.is_pending():
            raise BadInput(
                "gradients are added to those of an earlier window, which nobody could give back after a failure: with "
                "live recovery step in every window, and accumulate by run.batches(..., micro_batches=N)"
            )

    def passed(self, crew: RecoverableGroup) -> None:
        """A backward of this model has all its sums."""
        if crew.sums:
            crew.end()
            self._passes += 1
            if self._dropped == self.step:
                crew.drop(is_scaled=self.protected is not None and self.protected.is_scaled)

    def recover(self, crew: RecoverableGroup | None) -> None:
        """Find together with the members that are left, and finish what the backward of this model has begun."""
        began = perf_counter()
        progress.here.suspects(self.meeting.number)
        with progress.during(Phase.RECOVERING):
            while True:
                try:
                    self._regroup(crew, began)
                    break
                except Broken:
                    progress.here.suspects(self.meeting.number)
        script_collectives.outlive(self.me, self.size)
        progress.here.regroups(self.meeting.number)

    def _regroup(self, crew: RecoverableGroup | None, began: float) -> Settlement:
        urgent = self.meeting.is_outdated
        newest = self.meeting.next()
        members = newest.members
        if urgent:
            self.link.hang_up()
        if crew:
            crew.drain()
        stands = self.meeting.stands(members, self._stand(crew))
        self.link.hang_up()  # if not before: all are at the boundary now, and need it no more
        self.meeting.connect(self.link, members)
        self.meeting.members = members
        found = settled(stands, newest.asleep)
        if isinstance(found, str):
            raise fallen_back(f"the members cannot go on from where they are ({found})")
        if found.behind:
            self._hand_over(found, crew)  # first: if the giver is lost before somebody has it, it is as if it never was
        # Now: another loss may come before all is done, and what is summed without the lost stays so.
        self._tell(found, perf_counter() - began)
        if found.lost:
            self.injected(found.step)
        self._divide(found)
        if found.joining:
            self._let_in(found, stands)
        if found.synced:
            self._hand_buffers(found)
        self._finish(found, crew)
        return found

    def _stand(self, crew: RecoverableGroup | None) -> Stand:
        if self.joins:
            return Stand(step=NOWHERE)
        if self._staged is not None:  # as good as at the next boundary
            return Stand(
                step=self.step + 1,
                basis=self.basis,
                members=self._known,
                whole=self._passes + 1,
                boundaries=progress.here.boundaries,
                posted=progress.here.posted,
                exchanges=script_collectives.has_exchanged(),
            )
        return Stand(
            step=self.step,
            begun=self.begun,
            basis=self.basis,
            members=self._known,
            passes=self._passes,
            whole=self._whole,
            buckets=tuple(bool(each.is_done) for each in crew.sums) if crew else None,
            synced=self.buffers.synced,
            model=self.crews.index(crew) if crew else 0,
            boundaries=progress.here.boundaries,
            posted=progress.here.posted,
            exchanges=script_collectives.has_exchanged(),
        )

    def _divide(self, found: Settlement) -> None:
        """A window that was begun is finished as it was divided; those after it are divided among the members."""
        self.meeting.turn.wait(self)
        self._shrinks_at = found.step + found.begun
        self._settled = max(self._settled or 0, found.step)
        if found.begun:
            assert self._losses is not None
            self._basis_now = found.basis
            self._count_as(self._losses.weight_left(self.me, found.basis, self.members))

    def _let_in(self, found: Settlement, stands: Mapping[int, Stand]) -> None:
        """Give those that join the whole state of a member; what a window changes before its end comes beside."""
        assert self.protected is not None
        first = (found.basis or self.members)[0]
        if self.strategy == "replay" and first in found.joining and not found.syncs and self.buffers.are_there:
            raise fallen_back("rank 0 is lost, and its buffers with it")
        if self.me == found.giver:
            self.settle()  # whoever joins may outlive us all: what came before it must be on record
        state = self._hand(found.giver, found.joining, self.protected.capture)
        state_transfer.meet(self.link)
        if self.joins:
            self.protected.restore(state)
            progress.here.catches_up(stands[found.giver].boundaries - found.begun, stands[found.giver].posted)
            self.basis = ()

    def _hand(self, giver: int, takers: tuple[int, ...], state: Callable[[], Any]) -> Any:
        """What we got of the giver's state, if we are one of the takers."""
        ranks = [self.members.index(each) for each in takers]
        return state_transfer.hand(self.link, self.meeting.rank, self.members.index(giver), ranks, state)

    def _hand_buffers(self, found: Settlement) -> None:
        values = self._hand(found.syncer, found.synced, self.buffers.values)
        state_transfer.meet(self.link)
        if self.me in found.synced:
            self.buffers.use(values)

    def _finish(self, found: Settlement, crew: RecoverableGroup | None) -> None:
        """Complete the sums of the backward that was interrupted, or take over what came out of it."""
        if found.begun and not found.is_complete and self.strategy == "skip":
            self._dropped = found.step
        self._hand_sums(found, crew)
        if crew and self._staged is None:
            self._sum_again(found, crew)
        if crew:
            crew.unpack()

    def _hand_sums(self, found: Settlement, crew: RecoverableGroup | None) -> None:
        """Whoever has a sum hands it to the others, if some lack it."""
        if self.joins:
            for each in self.crews:
                each.given = {}  # what we were given before a loss interrupted it may be summed again
        for bucket, holder in enumerate(found.given):
            if holder is None or bucket in found.shared:
                continue
            if crew:
                state_transfer.broadcast(self.link, self.members.index(holder), crew.sums[bucket].values)
                crew.sums[bucket].is_done = True
            else:  # we join
                late = self.crews[found.model]
                late.given[bucket] = late.empty(bucket)
                state_transfer.broadcast(self.link, self.members.index(holder), late.given[bucket])

    def _hand_over(self, found: Settlement, crew: RecoverableGroup | None) -> None:
        """Those that are behind get what came out of the window from one that is ahead."""
        assert self.protected is not None
        trained = self.protected.trained
        state = self._hand(found.giver, found.behind, lambda: self._staged or trained())
        if self.me in found.behind and crew:
            self._staged = state
            for bucket, each in enumerate(crew.sums):
                if not each.is_done:
                    crew.pack(bucket)  # anything finite: what comes of it is replaced at the boundary
                    each.is_done = True
        state_transfer.meet(self.link)

    def _sum_again(self, found: Settlement, crew: RecoverableGroup) -> None:
        again = [bucket for bucket, holder in enumerate(found.given) if holder is None]
        for bucket in again:
            crew.pack(bucket)
        for bucket in again:
            crew.post_again(bucket)
        for bucket in again:
            self.link.wait(crew.sums[bucket].work)
            crew.sums[bucket].is_done = True

    def _weigh(self, basis: tuple[int, ...]) -> None:
        assert self._losses is not None
        self._count_as(self._losses.weight(self.me, basis))

    def _count_as(self, weight: float) -> None:
        even = 1.0 / self.size
        for crew in self.crews:
            crew.factor = 1.0 if weight == even else weight * self.size

    def _tell(self, found: Settlement, seconds: float) -> None:
        assert self.record is not None
        assert self._losses is not None
        self._known = self.members
        self.record.append(
            Regroup(
                attempt=self.attempt,
                number=self.meeting.number,
                step=found.step,
                strategy=self.strategy,
                members=self.members,
                lost=found.lost,
                missing=self._losses.missing(found),
                kept=sum(each is not None for each in found.given),
                redone=sum(each is None for each in found.given),
                behind=found.behind,
                seconds=seconds,
                asleep=found.asleep,
            )
        )
        self.record.flush()


logger = logging.getLogger(__name__)


def live_for(config: RunConfig, peers: Ranks) -> LiveRecovery | None:
    """How this rank recovers live, if the run does."""
    if config.recovery == "restart" or not peers.grouped or peers.connect is None:
        return None
    joins = world.JOINS in os.environ
    if why := nccl_link.why_not(peers.backend):
        _say_not_live(config, why, joins=joins)
        return None
    members = () if joins else tuple(range(peers.size))
    meeting = Coordination(peers.rank, members, peers.connect, seat=peers.rank, joins=joins)
    live = LiveRecovery(config.recovery, peers.size, meeting, link=nccl_link.link_for(peers.backend, peers.device))
    live.join()
    peers.has_changed = lambda: meeting.is_outdated
    peers.lost = meeting.lost
    return live


def _say_not_live(config: RunConfig, why: str, *, joins: bool) -> None:
    """Say, to the supervisor too, that a failure is survived by a restart."""
    progress.here.falls_back()
    line = f"--recovery {config.recovery} is not possible here ({why})"
    if joins:
        raise BadInput(f"{line}, and spares have nothing to do: leave them out.")
    if not int(os.environ.get("RANK", "0")):
        logger.warning("%s: after a failure the run starts again from its newest snapshot, as with restart.", line)
