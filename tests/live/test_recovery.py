"""What one rank does when members are lost, told apart from its peers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.distributed.boundary import BoundaryGate
from holdfast.distributed.gloo_link import Broken
from holdfast.distributed.membership import Membership
from holdfast.events import Regroup
from holdfast.live import state_transfer
from holdfast.live.recovery import LiveRecovery
from holdfast.live.settlement import Losses, Stand
from holdfast.sampler.plan import SamplePlan

ALL = (0, 1, 2)
LEFT = (1, 2)
STEP = 5


class Meeting(SimpleNamespace):
    """Member 1, among members of whom 2 has passed the next boundary, after member 0 was lost."""

    def next(self) -> Membership:
        return Membership(1, LEFT, {}, ())

    def stands(self, members: tuple[int, ...], stand: Stand) -> dict[int, Stand]:
        self.said = stand
        return {1: stand, 2: Stand(step=STEP + 1, members=ALL, basis=ALL)}

    def connect(self, *_: Any) -> None:
        pass


@pytest.fixture
def live() -> LiveRecovery:
    meeting = Meeting(me=1, members=ALL, number=1, joins=False, is_outdated=True, rank=1, turn=BoundaryGate())
    found = LiveRecovery("skip", 3, meeting)
    found.record = SimpleNamespace(told=[], flush=lambda: None)  # type: ignore[assignment]
    found.record.append = found.record.told.append  # type: ignore[union-attr, method-assign]
    found.protected = SimpleNamespace(trained=dict)  # type: ignore[assignment]
    found._losses = Losses("skip", SamplePlan(samples=90, batch=9, epochs=1, seed=0))
    found.step, found.begun, found.basis, found._known = STEP, True, ALL, ALL
    return found


def crew() -> Any:
    return SimpleNamespace(
        sums=[SimpleNamespace(is_done=False)], drain=lambda: None, pack=lambda _: None, unpack=lambda: None
    )


def handing(monkeypatch: pytest.MonkeyPatch, hand: Callable[..., Any], meet: Callable[..., Any]) -> None:
    monkeypatch.setattr(state_transfer, "hand", hand)
    monkeypatch.setattr(state_transfer, "meet", meet)


def broken(*_: Any) -> Any:
    raise Broken("the giver is lost")


def test_a_giver_that_is_lost_before_anybody_has_its_state_leaves_nothing_on_record(
    live: LiveRecovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others were said to go on from its step, finished the one before otherwise, and the audit saw both."""
    live.crews = [model := crew()]
    handing(monkeypatch, broken, broken)
    with pytest.raises(Broken):
        live._regroup(model, 0.0)
    assert live.record.told == []  # type: ignore[union-attr]
    assert (stand := live._stand(model)).step == STEP
    assert stand.members == ALL  # so that the loss of member 0 is told with the next


def test_who_has_the_state_of_one_that_was_ahead_is_ahead_from_then_on(
    live: LiveRecovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.crews = [model := crew()]
    handing(monkeypatch, lambda *_: {"model": {}}, broken)
    with pytest.raises(Broken):
        live._regroup(model, 0.0)
    stand = live._stand(model)
    assert (stand.step, stand.begun, stand.buckets) == (STEP + 1, False, None)


def test_once_all_have_the_state_that_is_on_record(live: LiveRecovery, monkeypatch: pytest.MonkeyPatch) -> None:
    live.crews = [model := crew()]
    handing(monkeypatch, lambda *_: {"model": {}}, lambda *_: None)
    live._regroup(model, 0.0)
    (told,) = live.record.told  # type: ignore[union-attr]
    assert isinstance(told, Regroup)
    assert (told.step, told.lost, told.behind) == (STEP + 1, (0,), (1,))
