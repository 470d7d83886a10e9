"""Transfers between the members in one round of recovery: results, states, buffers and sums of gradients.

All members call the same methods of their `Handover` in the same order, because each transfer is between members.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import progress
from holdfast.distributed.gloo_link import Link
from holdfast.distributed.membership import Coordination
from holdfast.distributed.process_group import RecoverableGroup
from holdfast.live import state_transfer
from holdfast.live.boundary_marks import BoundaryMarks
from holdfast.live.rank_values import RankValues
from holdfast.live.settlement import MemberReport, RecoveryPlan
from holdfast.live.training_hooks import TrainingHooks
from holdfast.progress import restart_needed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """This rank's part in the transfers of one recovery `plan`.

    `groups` has the process group of each replicated model. `marks` belong to a run that replays, and `values` to a run
    that replays and protects plain values."""

    plan: RecoveryPlan
    coordination: Coordination
    link: Link
    groups: Sequence[RecoverableGroup]
    buffers: state_transfer.Buffers
    training: TrainingHooks
    marks: BoundaryMarks | None
    values: RankValues | None

    def send_result(self, state: Callable[[], Any]) -> Any:
        """Send the state after a step from a worker that has finished the step to the workers that have not.

        Return the state on the workers that have not finished, and None on all others."""
        plan = self.plan
        if self.training.protected.has_values_of_script:
            raise restart_needed(
                f"not all ranks got the gradients of step {plan.step - 1}, on which values that the script protects may "
                "depend"
            )
        return self._transfer(plan.giver, plan.behind, state)

    def send_state(self, reports: Mapping[int, MemberReport]) -> None:
        """Send the training state of worker `plan.giver` to the joining workers."""
        plan, protected = self.plan, self.training.protected
        first = (plan.basis or self.coordination.members)[0]
        if self.marks and first in plan.joining and not plan.syncs and self.buffers.values:
            raise restart_needed("rank 0 is lost, and its buffers with it")
        if self.coordination.member == plan.giver:
            self._check_marks(is_first_lost=first in plan.joining)
            self.training.record_steps()  # a joining worker may survive this one, and needs the steps before it recorded
        state = self._transfer(plan.giver, plan.joining, protected.capture)
        state_transfer.meet(self.link)
        if self.coordination.is_joining:
            protected.restore(state)
            self._take_values()
            giver = reports[plan.giver]
            progress.here.catch_up(giver.boundaries - giver.begun, giver.posted)

    def send_buffers(self) -> None:
        """Send rank 0's model buffers from worker `plan.syncer` to the workers that lack them."""
        values = self._transfer(self.plan.syncer, self.plan.synced, lambda: self.buffers.values)
        state_transfer.meet(self.link)
        if self.coordination.member in self.plan.synced:
            self.buffers.use(values)

    def send_sums(self, group: RecoverableGroup | None) -> None:
        """Send the sum of each gradient bucket from a worker that has the sum to the workers that lack it.

        `group` has the sums of this rank's interrupted backward pass; it is None on a joining worker."""
        plan, members = self.plan, self.coordination.members
        if self.coordination.is_joining:
            for own in self.groups:
                own.given = {}  # sums received in an interrupted round may be summed again
        for bucket, holder in enumerate(plan.given):
            if holder is None or bucket in plan.shared:
                continue
            if group:
                state_transfer.broadcast(self.link, members.index(holder), group.sums[bucket].values)
                group.sums[bucket].is_done = True
            else:  # this rank joins, and uses the sum in its first backward
                joining = self.groups[plan.model]
                joining.given[bucket] = joining.empty(bucket)
                state_transfer.broadcast(self.link, members.index(holder), joining.given[bucket])

    def _check_marks(self, *, is_first_lost: bool) -> None:
        """Make the run restart if this rank's state may differ from the lost worker's state at the start of the step.

        `is_first_lost` is True if the lost worker was rank 0, whose buffers the other ranks copy."""
        if self.marks and is_first_lost and self.marks.has_own_buffers(self.buffers.ids):
            raise restart_needed("rank 0 is lost, and its buffers with it")
        if self.marks and self.marks.have_changed(self.buffers.ids):
            raise restart_needed("protected state had changed since the step began, before its gradients were summed")

    def _take_values(self) -> None:
        """Give this worker, which replaces a lost one, the plain values (dicts, lists, tensors) of the lost worker."""
        member, step = self.coordination.member, self.plan.step
        is_lost = member in self.plan.lost  # otherwise `holdfast scale` has added a rank, which has none of its own yet
        if self.values and is_lost and not self.values.restore(member, step):
            raise restart_needed(f"rank {member} was lost before the values it protects were known at step {step}")

    def _transfer(self, giver: int, takers: tuple[int, ...], state: Callable[[], Any]) -> Any:
        return state_transfer.transfer_by_member(self.link, self.coordination, giver, takers, state)
