"""Live recovery of one rank, with its peers replaced by plain values."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.distributed.gloo_link import GroupBroken
from holdfast.distributed.membership import Membership
from holdfast.distributed.ranks import BoundaryGate
from holdfast.errors import WorkerLost
from holdfast.events import Regroup
from holdfast.live import state_transfer
from holdfast.live.recovery import LiveRecovery
from holdfast.live.settlement import LossEffects, MemberReport, RecoveryPlan, StepState
from holdfast.live.training_hooks import TrainingHooks
from holdfast.sampler.plan import SamplePlan
from holdfast.sampler.run_plan import RunPlan

ALL = (0, 1, 2)
LEFT = (1, 2)
STEP = 5


class FakeCoordination(SimpleNamespace):
    """Member 1, after member 0 was lost and member 2 has passed the next boundary."""

    def next(self) -> Membership:
        return Membership(1, LEFT, {}, ())

    def exchange(self, members: tuple[int, ...], report: Any, decode: Any) -> dict[int, Any]:
        return {1: decode(report), 2: MemberReport(step=STEP + 1, members=ALL, basis=ALL)}

    def connect(self, *_: Any) -> None:
        pass


class FakeRecord(list[Any]):
    def flush(self) -> None:
        pass


@pytest.fixture
def record() -> FakeRecord:
    return FakeRecord()


@pytest.fixture
def live(record: FakeRecord) -> LiveRecovery:
    """Member 1 in the backward of a step that was divided among all three members."""
    coordination: Any = FakeCoordination(
        member=1, members=ALL, number=1, is_joining=False, is_outdated=True, rank=1, gate=BoundaryGate()
    )
    recovery = LiveRecovery("skip", 3, coordination)
    recovery.window = StepState(step=STEP, begun=True, basis=ALL)
    recovery._recorded = ALL
    hooks: Any = {"protected": SimpleNamespace(trained=dict, has_values_of_script=False), "record": record}
    recovery.start(
        TrainingHooks(
            **hooks,
            losses=LossEffects("skip", RunPlan((SamplePlan(samples=90, batch=9, epochs=1, seed=0),))),
            attempt=1,
            record_steps=lambda: None,
            inject=lambda step: None,
            work=SimpleNamespace(has_stepped=False, is_pending=False),
            restore_shard=lambda rank, step: None,
        )
    )
    return recovery


def interrupted_group() -> Any:
    return SimpleNamespace(
        sums=[SimpleNamespace(is_done=False)], drain=lambda: None, pack=lambda _: None, unpack=lambda: None
    )


def fake_transfer(monkeypatch: pytest.MonkeyPatch, transfer: Callable[..., Any], meet: Callable[..., Any]) -> None:
    monkeypatch.setattr(state_transfer, "transfer", transfer)
    monkeypatch.setattr(state_transfer, "meet", meet)


def broken(*_: Any) -> Any:
    raise GroupBroken("the giver is lost")


def test_a_sender_lost_before_any_member_has_its_state_leaves_nothing_recorded(
    live: LiveRecovery, record: FakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the history names the sender's step, while the others finish the step before it."""
    live.groups.append(group := interrupted_group())
    fake_transfer(monkeypatch, broken, broken)
    with pytest.raises(GroupBroken):
        live._recover_once(group, 0.0)
    assert record == []
    assert (stand := live._own_report(group)).step == STEP
    assert stand.members == ALL  # so that the loss of member 0 is recorded with the next membership


def test_a_member_with_the_state_of_one_that_was_ahead_is_ahead_from_then_on(
    live: LiveRecovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.groups.append(group := interrupted_group())
    fake_transfer(monkeypatch, lambda *_: {"model": {}}, broken)
    with pytest.raises(GroupBroken):
        live._recover_once(group, 0.0)
    stand = live._own_report(group)
    assert (stand.step, stand.begun, stand.buckets, stand.is_staged) == (STEP + 1, False, None, True)


def test_a_recovery_is_recorded_once_every_member_has_the_state(
    live: LiveRecovery, record: FakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.groups.append(group := interrupted_group())
    fake_transfer(monkeypatch, lambda *_: {"model": {}}, lambda *_: None)
    live._recover_once(group, 0.0)
    (event,) = record
    assert isinstance(event, Regroup)
    assert (event.step, event.lost, event.behind) == (STEP + 1, (0,), (1,))


def test_protected_values_of_the_script_are_not_computed_from_gradients_that_did_not_arrive(
    live: LiveRecovery, record: FakeRecord
) -> None:
    """An average of the weights would be computed from weights that the member ahead replaces only afterwards."""
    live._training.protected.has_values_of_script = True  # type: ignore[misc]  # it is a fake
    live.groups.append(group := interrupted_group())
    with pytest.raises(WorkerLost, match="not all ranks got the gradients of step 5"):
        live._recover_once(group, 0.0)
    assert record == []


def test_a_window_that_was_begun_is_finished_as_it_was_divided() -> None:
    state = StepState(step=STEP, begun=True, basis=ALL).recovered(RecoveryPlan(step=STEP, begun=True, basis=ALL))
    assert (state.divides_at, state.settled, state.finish_basis) == (STEP + 1, STEP, ALL)
    assert state._replace(begun=False).divided(LEFT)[0].basis == ALL
    after, is_new = state.ended()._replace(step=STEP + 1, begun=False).divided(LEFT)
    assert (after.basis, after.divides_at, is_new) == (LEFT, None, True)
    assert after.divided(LEFT) == (after, False)


def test_a_window_that_was_not_begun_is_divided_among_the_survivors() -> None:
    state = StepState(step=STEP, basis=ALL).recovered(RecoveryPlan(step=STEP, begun=False))
    after, is_new = state.divided(LEFT)
    assert (after.basis, after.divides_at, is_new) == (LEFT, None, True)
