"""Plan how the surviving members continue after a loss, from the step and backward pass that each has reached. No I/O.

Members recover either in a backward pass in which some sums of gradients did not arrive, or at a step boundary. If any
member has a sum, the sum contains the gradients of all members, including the lost members, and is sent to the members
that lack it. If no member has the sum, it is computed again. Some members may already have passed a step boundary when
others have not. These members had every sum of the step before, so the members behind take over their parameters.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from holdfast.distributed.membership import from_spans, to_spans
from holdfast.distributed.process_group import SCRIPT_COLLECTIVES
from holdfast.live import lossy_gradient
from holdfast.sampler.run_plan import RunPlan

NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """A report on how far one worker has trained. The worker sends it to all other workers when a recovery begins."""

    step: int  # the step that the member trains or reaches next; NOWHERE for a worker that is to join
    begun: bool = False  # the member has begun `step`
    basis: tuple[int, ...] = ()  # the members among whom the samples of `step` are divided
    members: tuple[int, ...] = ()  # the last membership that this member has recorded
    boundaries: int = 0  # with `posted`, the numbers by which the supervisor compares members (see progress.py)
    posted: int = 0
    synced: int = 0  # the times that rank 0's buffers arrived in this step
    model: int = 0  # the number of the model whose backward was interrupted
    passes: int = 0  # the backward passes of this step whose sums are complete
    whole: int = 1  # the backward passes of the step before
    buckets: tuple[bool, ...] | None = None  # whether each gradient bucket is summed; None outside of a backward
    has_stepped: bool = False  # an optimizer has stepped in this step, with gradients
    exchanges: bool = False  # the script calls torch.distributed itself
    is_staged: bool = False  # it is still in the step before `step`, whose result it got from another member

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"basis": to_spans(self.basis), "members": to_spans(self.members)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "MemberReport":
        buckets = None if data["buckets"] is None else tuple(data["buckets"])
        numbers = {name: from_spans(data[name]) for name in ("basis", "members")}
        return cls(**{**data, **numbers, "buckets": buckets})

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.passes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The plan by which the remaining workers recover from a loss, and then finish or begin `step` together."""

    step: int
    begun: bool  # True if a member has begun the step: then it is finished as it was divided, among `basis`
    basis: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    asleep: tuple[int, ...] = ()  # members that were suspended
    joining: tuple[int, ...] = ()  # workers that get the whole state of `giver`
    behind: tuple[int, ...] = ()  # members that have not finished the step before, and get the parameters of `giver`
    giver: int = -1
    synced: tuple[int, ...] = ()  # members that get rank 0's buffers from `syncer`
    syncer: int = -1
    syncs: int = 0  # the times that `syncer` got the buffers in this step
    model: int = 0  # the number of the model whose backward was interrupted
    given: tuple[int | None, ...] = ()  # the sender of each bucket's sum; None if it is summed again
    shared: frozenset[int] = frozenset()  # buckets whose sum every member has

    def drops(self, strategy: str) -> bool:
        """Return True if the step is dropped: if `strategy` is "skip", and gradients of the step were lost."""
        return self.begun and not self.is_complete and strategy == "skip"

    @property
    def is_complete(self) -> bool:
        """True if no gradients of the step are lost: for every bucket of gradients, some worker has the complete sum."""
        return bool(self.given) and None not in self.given


def make_plan(reports: Mapping[int, MemberReport], asleep: tuple[int, ...] = ()) -> RecoveryPlan | str:
    """Return the plan of the recovery, or a string that says why the run must restart instead.

    `reports` has the report of each worker, by member number. `asleep` are the numbers of the workers that were
    suspended between two steps."""
    joining = tuple(member for member, report in reports.items() if report.step == NOWHERE)
    reports = {member: report for member, report in reports.items() if member not in joining}
    if any(report.exchanges for report in reports.values()):
        return SCRIPT_COLLECTIVES
    top = max(report.place for report in reports.values())
    ahead = {member: report for member, report in reports.items() if report.place == top}
    behind = tuple(member for member in reports if member not in ahead)
    for member in behind:
        report = reports[member]
        is_last = any(report.passes == leader.whole - 1 for leader in ahead.values())
        if not (top == (report.step + 1, 0) and report.buckets is not None and is_last):
            # It cannot take over the state of a member ahead, because it is not in the last backward before `top`.
            place = f"backward pass {report.passes} of step {report.step}"
            return f"member {member} is in {place}, others in {top[1]} of step {top[0]}"
    if joining and top[1]:
        return "a worker that joins cannot repeat the backward passes of this step that are complete"
    finished = [member for member, report in ahead.items() if not report.is_staged]
    if joining and not finished:
        return f"the member that had finished step {top[0] - 1} is lost, and the others have only its parameters"
    buckets = [report.buckets for report in ahead.values() if report.buckets is not None]
    if len(set(map(len, buckets))) > 1:
        return "the survivors reduce different buckets"
    given = tuple(
        next((member for member, report in ahead.items() if report.buckets and report.buckets[number]), None)
        for number in range(len(buckets[0]) if buckets else 0)
    )
    if any(holder is not None for holder in given) and len(buckets) < len(reports):
        return "a sum is done that not all survivors have begun"
    bases = [report.basis for report in reports.values() if report.step == top[0] and report.begun]
    if len(set(bases)) > 1:
        return "the survivors disagree about how this step's samples were divided"
    syncs = {member: report.synced if report.step == top[0] else 0 for member, report in reports.items()}
    most = max(syncs.values())
    lacking = tuple(member for member, count in syncs.items() if count < most) + (joining if most else ())
    if lacking and (most > 1 or top[1]):
        return "the survivors are in different forward passes of a step"
    different = {id(report): report for report in reports.values()}.values()  # members with equal reports share one
    recorded = {member for report in different for member in report.members}
    return RecoveryPlan(
        step=top[0],
        begun=bool(bases),
        basis=bases[0] if bases else (),
        asleep=asleep,
        lost=tuple(sorted(recorded - set(reports) - set(asleep))),  # a joining worker may have a lost member's number
        joining=joining,
        behind=behind,
        giver=min(finished or ahead),
        synced=lacking,
        syncs=most,
        syncer=max(syncs, key=lambda member: (syncs[member], -member)),
        model=max((report.model for report in ahead.values() if report.buckets is not None), default=0),
        given=given,
        shared=frozenset(
            number
            for number in range(len(given))
            if not joining and all(report.buckets and report.buckets[number] for report in reports.values())
        ),
    )


class StepState(NamedTuple):
    """The progress of one rank in its current step, and the effects of recoveries from lost workers on the step."""

    step: int = 0
    begun: bool = False  # this rank has begun `step`
    basis: tuple[int, ...] = ()  # the members among whom the samples of the step are divided
    passes: int = 0  # backward passes of this step whose sums are complete
    passes_before: int = 1  # backward passes of the step before
    # The result of this step from a member that has finished it; it replaces this rank's own at the boundary.
    staged: dict[str, Any] | None = None
    divides_at: int | None = None  # after a recovery: the step from which windows are divided among the present members
    finish_basis: tuple[int, ...] | None = None  # after a recovery in a window: the members among whom it was divided
    settled: int | None = None  # the last step in which members recovered since the last boundary
    dropped: int | None = None  # the last step that was dropped (--recovery skip)

    def ended(self) -> "StepState":
        """Return the state at the end of the step, with the number of backward passes set back to 0."""
        return self._replace(passes=0, passes_before=max(1, self.passes), staged=None)

    def recovered(self, plan: RecoveryPlan) -> "StepState":
        """Return the state after the recovery `plan`. Samples of a step that has begun stay divided as they were."""
        return self._replace(
            divides_at=plan.step + plan.begun,
            settled=max(self.settled or 0, plan.step),
            finish_basis=plan.basis if plan.begun else self.finish_basis,
        )

    def divided(self, members: tuple[int, ...]) -> tuple["StepState", bool]:
        """Return the state for the coming step, and True if that step begins a new division of samples among `members`.

        After a recovery, samples are divided among the remaining workers as soon as the interrupted step is finished.
        """
        if self.divides_at is None:
            return self, False
        if self.step >= self.divides_at:
            return self._replace(divides_at=None, finish_basis=None, basis=members), True
        return self._replace(basis=self.finish_basis or self.basis, finish_basis=None), False


@dataclass(slots=True, eq=False)
class LossEffects:
    """The effects of lost workers on a step: the weights of the gradients, and the samples that are not trained."""

    strategy: str
    plan: RunPlan
    _spared: tuple[int, tuple[int, ...]] = (-1, ())  # a step, and members lost in it whose gradients are in all sums

    def weight(self, step: int, member: int, basis: tuple[int, ...], members: tuple[int, ...]) -> float:
        """Return the weight of the gradients of `member` in `step`, whose samples were divided among `basis`.

        Of these, only `members` are left. The weights of their gradients add up to 1."""
        samples = [self.plan.share_size(step, rank, len(basis)) for rank in range(len(basis))]
        lost = [rank for rank, other in enumerate(basis) if other not in members]
        weights = lossy_gradient.weights("forward", completed=False, samples=samples, casualties=lost)
        assert weights is not None
        return weights[basis.index(member)]

    def missing(self, plan: RecoveryPlan) -> tuple[int, ...]:
        """Return the ids of the samples that step `plan.step` does not train, because workers were lost."""
        before = self._spared[1] if self._spared[0] == plan.step else ()
        lost = [*before, *(member for member in plan.lost if member in plan.basis and member not in before)]
        if plan.is_complete:  # for now: a member may be lost before it has sent a sum that others lack
            self._spared = (plan.step, tuple(lost))
            return ()
        self._spared = (plan.step, ())
        if not plan.begun or not lost or self.strategy == "replay":
            return ()
        if self.strategy == "skip":
            return tuple(self.plan.window(plan.step).tolist())
        ranks = [plan.basis.index(member) for member in lost]
        return tuple(int(sample) for rank in ranks for sample in self.plan.share(plan.step, rank, len(plan.basis)))
