"""Live recovery of one rank: when members are lost, the survivors complete the interrupted step and continue.

A round of recovery has four parts, all in the training thread: wait for the supervisor's next membership, report this
rank's position to the other members (`MemberReport`), connect with them, and carry out the plan that `make_plan` derives
from all reports. If another member is lost meanwhile, a new round begins. A rank recovers at a step boundary if the
membership has changed, or within a step if backward, or the exchange of buffers before a forward, has failed. A worker
that is to be suspended raises `Suspended` at a boundary, and the training loop calls `suspend`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.distributed.membership import Coordination
from holdfast.distributed.process_group import RecoverableGroup, has_script_collectives, replace_default_group
from holdfast.distributed.ranks import Ranks
from holdfast.events import Regroup
from holdfast.live import state_transfer
from holdfast.live.backward_guard import BackwardGuard, check_accumulation
from holdfast.live.boundary_marks import BoundaryMarks
from holdfast.live.handover import Handover
from holdfast.live.rank_values import RankValues
from holdfast.live.settlement import NOWHERE, MemberReport, RecoveryPlan, StepState, make_plan
from holdfast.live.training_hooks import TrainingHooks
from holdfast.progress import IN_RESERVE, Phase, restart_needed
from holdfast.train.state.protected import Copies


@dataclass(slots=True, eq=False)
class LiveRecovery:
    """One rank's part in live recovery: when workers are lost, training continues without a restart.

    `size` is the number of members (workers that train) when none is lost."""

    strategy: str
    size: int
    coordination: Coordination
    link: Link = field(default_factory=Link)
    groups: list[RecoverableGroup] = field(default_factory=list, init=False)
    buffers: state_transfer.Buffers = field(default_factory=state_transfer.Buffers, init=False)
    window: StepState = field(default_factory=StepState, init=False)
    guard: BackwardGuard = field(init=False)
    _hooks: TrainingHooks | None = field(default=None, init=False)
    _recorded: tuple[int, ...] = field(default=(), init=False)  # the members of the last recorded membership
    _may_accumulate: bool = field(default=False, init=False)  # the last step ended without an optimizer step
    _averages: Copies = field(default_factory=list, init=False)  # of a dropped step, which is not to change them
    _marks: BoundaryMarks | None = field(default=None, init=False)  # of a run that replays
    _values: RankValues | None = field(default=None, init=False)  # of a run that replays and protects plain values

    def __post_init__(self) -> None:
        self.guard = BackwardGuard(self.coordination, self.link, self.groups, self)

    def connect(self) -> None:
        """Connect to the workers that start with this one, and watch for workers that are lost or join later."""
        self._recorded = self.members
        self.window = StepState(basis=self.members)
        if not self.is_joining:
            self.coordination.connect(self.link, self.members)
        self.coordination.listen(self.link.hang_up)

    def start(self, hooks: TrainingHooks) -> None:
        """Enable recovery once the training loop is built. If a worker is lost before this call, the run restarts."""
        self._hooks = hooks
        if self.strategy == "replay":
            self._marks = BoundaryMarks(hooks.protected)
            self._values = RankValues(self.coordination, hooks.protected) if hooks.protected.has_plain_values else None
        if not self.is_joining:
            self._set_weight(self.window.basis, self.window.step)

    def watch(self, peers: Ranks) -> Ranks:
        """Return a copy of `peers` that raises RanksChanged if a worker is lost while it waits for messages."""
        coordination = self.coordination
        return replace(peers, has_changed=lambda: coordination.is_outdated, watch_members=coordination.watch_members)

    def new_group(self, all_posted: Callable[[], None]) -> RecoverableGroup:
        """Return a new process group that all-reduces the gradients of one model. Call this once for each model.

        Each backward pass calls `all_posted` when it has started its last all-reduce."""
        self.groups.append(RecoverableGroup(self.link, self.member % self.size, self.size, all_posted))
        return self.groups[-1]

    @property
    def member(self) -> int:
        return self.coordination.member

    @property
    def members(self) -> tuple[int, ...]:
        return self.coordination.members

    @property
    def is_joining(self) -> bool:
        return self.coordination.is_joining

    @property
    def place(self) -> tuple[int, int]:
        """The rank and the world size that determine this worker's samples in the current step."""
        basis = self.window.finish_basis or self.members
        return basis.index(self.member), len(basis)

    def join(self) -> int:
        """Join a run in progress: receive the training state from another worker. Return the first step to train."""
        progress.here.phase = Phase.JOINING
        while True:
            self.coordination.await_admission()
            self._training.record.enrol(self.member)
            try:
                plan = self._recover_once(None, began=perf_counter())
                break
            except GroupBroken:
                self.coordination.leave()
        self.coordination.is_joining = False
        self._renew_default_group()
        progress.here.phase = Phase.TRAINING
        progress.here.membership = self.coordination.number
        return plan.step

    def suspend(self) -> None:
        """Stop training with the other workers, and keep all state in memory until `join` is called."""
        progress.here.membership = IN_RESERVE
        self._training.record_steps()
        self._training.record.retire()
        self.link.hang_up()
        self.coordination.leave()
        self.window = self.window._replace(divides_at=None, finish_basis=None, settled=None)

    def reach_boundary(self, step: int) -> None:
        """Under `replay`, store this rank's plain values before `step`, and begin to detect changes of other state."""
        if self._marks:
            self._marks.take(self.buffers.ids)
        if self._values:
            self._values.keep(self.member, step)

    def begin_step(self, step: int) -> None:
        """Remember that `step` has begun: its batch is about to be handed to the script."""
        self.window = self.window._replace(step=step, begun=True)

    def end_step(self, optimizer_steps: int) -> None:
        """End the current step, in which the script's optimizers made `optimizer_steps` steps.

        If this rank could not finish the step, load the parameters that another worker has sent."""
        if self.window.staged is not None:
            self._training.protected.take_over(self.window.staged)
        for tensor, before in self._averages:
            tensor.copy_(before)
        self._averages = []
        self.window = self.window.ended()
        self.buffers.synced = 0
        self._may_accumulate = not optimizer_steps

    def take_waited(self) -> float | None:
        """Return the seconds in collectives since the last call; None if they are not measured, as for replicas."""
        return None

    def is_dropped(self, step: int) -> bool:
        """Return True if `step` was dropped because a worker was lost (--recovery skip)."""
        return self.window.dropped == step

    def at_boundary(self, step: int, *, last: bool = False) -> tuple[bool, int | None]:
        """Recover from lost workers and let new workers join, just before `step`. If `last`, no worker joins.

        Return two values: True if the samples are now divided among other workers than before, and the last step in
        which workers recovered since the previous boundary (None if they did not recover)."""
        self.window = self.window._replace(step=step, begun=False)
        while self.coordination.is_outdated or (not last and self.coordination.has_joiners_at(step)):
            self.recover(None)
        basis = self.window.basis
        self.window, is_weight_new = self.window.divided(self.members)
        if is_weight_new or (self._has_phases and self.member in self.window.basis):
            self._set_weight(self.window.basis, step)
        if self.window.divides_at is None:
            self.coordination.gate.leave(self)
        settled, self.window = self.window.settled, self.window._replace(settled=None)
        return self.window.basis != basis, settled

    def sync_buffers(self, broadcast: Callable[[], None], buffers: list[torch.Tensor]) -> None:
        """Set `buffers` to rank 0's values by calling `broadcast`; if a worker is lost meanwhile, recover and retry."""
        self.buffers.sync(broadcast, buffers, lambda: self.recover(None))

    def recover(self, group: RecoverableGroup | None) -> None:
        """Recover together with the remaining workers.

        Complete the gradient sums of `group` if its backward pass was interrupted; `group` is None between two steps."""
        began = perf_counter()
        progress.here.suspected = self.coordination.number
        with progress.during(Phase.RECOVERING):
            while True:
                try:
                    self._recover_once(group, began)
                    break
                except GroupBroken:
                    progress.here.suspected = self.coordination.number
        self._renew_default_group()
        progress.here.membership = self.coordination.number

    def _renew_default_group(self) -> None:
        replace_default_group(self.member, self.size)

    def begin_backward(self) -> None:
        """Check that the script does not accumulate gradients over several steps, before the first backward of a step."""
        if self._may_accumulate:
            self._may_accumulate = False  # the first backward of a step decides
            check_accumulation(self._training.work)

    def end_backward(self, group: RecoverableGroup) -> None:
        """Count a backward pass of `group`, whose gradient sums are complete; if the step is dropped, drop them."""
        self.window = self.window._replace(passes=self.window.passes + 1)
        if self.is_dropped(self.window.step):
            group.drop(is_scaled=self._training.protected.is_scaled)
            self._averages = self._averages or self._training.protected.copy_averages()

    @property
    def _training(self) -> TrainingHooks:
        assert self._hooks is not None, "live recovery has not started"
        return self._hooks

    def _recover_once(self, group: RecoverableGroup | None, began: float) -> RecoveryPlan:
        """Try to recover, and return the plan of all workers. Raise GroupBroken if another worker is lost meanwhile."""
        if self._hooks is None:
            raise restart_needed("a worker was lost before training began")
        is_urgent = self.coordination.is_outdated
        membership = self.coordination.next()
        if is_urgent or membership.number != self.coordination.agreed:  # others may train on, and wait for this one
            self.link.hang_up()
        if group:
            group.drain()
        report = self._own_report(group).to_json()
        reports = self.coordination.exchange(membership.members, report, MemberReport.from_json)
        self.link.hang_up()  # if not done before: every member is at the boundary now and needs the link no more
        self.coordination.connect(self.link, membership.members)
        self.coordination.members = membership.members
        plan = make_plan(reports, membership.asleep)
        if isinstance(plan, str):
            raise restart_needed(f"the surviving workers cannot continue from where they are ({plan})")
        if plan.drops(self.strategy) and any(report.has_stepped for report in reports.values()):
            raise restart_needed("a step cannot be dropped once an optimizer has stepped in it")
        self._apply(plan, reports, group, began)
        return plan

    def _own_report(self, group: RecoverableGroup | None) -> MemberReport:
        """Return the report on how far this rank has trained, for the other workers in a recovery.

        `group` has the gradient sums of the interrupted backward pass, or is None if there was none."""
        if self.is_joining:
            return MemberReport(step=NOWHERE)
        window = self.window
        is_ahead = window.staged is not None  # then this rank is as good as at the next boundary
        return MemberReport(
            step=window.step + is_ahead,
            begun=window.begun and not is_ahead,
            basis=window.basis,
            members=self._recorded,
            passes=0 if is_ahead else window.passes,
            whole=window.passes + 1 if is_ahead else window.passes_before,
            buckets=tuple(bool(bucket.is_done) for bucket in group.sums) if group and not is_ahead else None,
            synced=0 if is_ahead else self.buffers.synced,
            model=self.groups.index(group) if group and not is_ahead else 0,
            boundaries=progress.here.boundaries,
            posted=progress.here.posted,
            exchanges=has_script_collectives(),
            is_staged=is_ahead,
            has_stepped=self._training.work.has_stepped and not is_ahead and not self.is_dropped(window.step),
        )

    def _apply(
        self, plan: RecoveryPlan, reports: dict[int, MemberReport], group: RecoverableGroup | None, began: float
    ) -> None:
        """Carry out this rank's part of the recovery `plan`, and complete the backward pass of `group`, if any.

        `reports` has the report of each worker, by member number. `began` is the time at which the recovery began."""
        handover = Handover(
            plan=plan,
            coordination=self.coordination,
            link=self.link,
            groups=self.groups,
            buffers=self.buffers,
            training=self._training,
            marks=self._marks,
            values=self._values,
        )
        if plan.behind:
            # First, because a result whose sender is lost before any member has it never existed.
            self._hand_over_result(handover, group)
        # Recorded now, because what is summed without the lost members stays so if another one is lost before the end.
        self._record(plan, perf_counter() - began)
        if plan.lost:
            self._training.inject(plan.step)
        self.coordination.gate.wait(self)
        self.window = self.window.recovered(plan)
        if plan.begun:
            self._set_weight(plan.basis, plan.step)
        if plan.joining:
            handover.send_state(reports)
            if self.is_joining:
                self.window = self.window._replace(basis=())
        if plan.synced:
            handover.send_buffers()
        if plan.drops(self.strategy):
            self.window = self.window._replace(dropped=plan.step)
        handover.send_sums(group)
        if group:
            if self.window.staged is None:
                group.sum_again([bucket for bucket, holder in enumerate(plan.given) if holder is None])
            group.unpack()

    def _hand_over_result(self, handover: Handover, group: RecoverableGroup | None) -> None:
        """Send the members behind the result of the step that they have not finished. They use it at the boundary."""
        finished = self._training.protected.trained
        state = handover.send_result(lambda: self.window.staged or finished())
        if self.member in handover.plan.behind and group:
            self.window = self.window._replace(staged=state)
            for number, bucket in enumerate(group.sums):
                if not bucket.is_done:
                    group.pack(number)  # any finite values: the result replaces what comes of them at the boundary
                    bucket.is_done = True
        state_transfer.meet(self.link)

    def _record(self, plan: RecoveryPlan, seconds: float) -> None:
        self._recorded = self.members
        self._training.record.append(
            Regroup(
                attempt=self._training.attempt,
                number=self.coordination.number,
                step=plan.step,
                strategy=self.strategy,
                members=self.members,
                lost=plan.lost,
                missing=self._training.losses.missing(plan),
                kept=sum(holder is not None for holder in plan.given),
                redone=sum(holder is None for holder in plan.given),
                behind=plan.behind,
                seconds=seconds,
                asleep=plan.asleep,
            )
        )
        self._training.record.flush()

    @property
    def _has_phases(self) -> bool:
        """True if the script has several training loops (phases), which may differ in their batch size."""
        return len(self._training.losses.plan.phases) > 1

    def _set_weight(self, basis: tuple[int, ...], step: int) -> None:
        """Set the weight of this rank's gradients in `step`, whose samples were divided among the members `basis`."""
        weight = self._training.losses.weight(step, self.member, basis, self.members)
        even = 1.0 / self.size  # DDP divides by the full world size, whatever the number of members
        for group in self.groups:
            group.factor = 1.0 if weight == even else weight * self.size
