"""Transfers between members in a round of recovery, with the connections replaced by plain values."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.live import state_transfer
from holdfast.live.handover import Handover
from holdfast.live.settlement import RecoveryPlan


def handover(plan: RecoveryPlan, groups: list[Any], *, is_joining: bool = False) -> Handover:
    """Return the transfers of `plan` on member 1 of the members 0 and 1."""
    fakes: dict[str, Any] = {
        "coordination": SimpleNamespace(member=1, members=(0, 1), rank=1, is_joining=is_joining),
        "link": None,
        "training": None,
    }
    return Handover(plan=plan, groups=groups, buffers=state_transfer.Buffers(), marks=None, values=None, **fakes)


def test_a_joining_worker_forgets_the_sums_of_an_interrupted_recovery() -> None:
    group = SimpleNamespace(given={0: torch.zeros(1)})
    plan = RecoveryPlan(step=3, begun=True, joining=(1,), given=(None,))
    handover(plan, [group], is_joining=True).send_sums(None)
    assert group.given == {}


@pytest.mark.parametrize(("shared", "sent"), [(frozenset(), [(0, 0.0), (1, 2.0)]), (frozenset({0}), [(1, 2.0)])])
def test_a_sum_that_a_member_has_is_sent_unless_all_have_it_or_it_is_summed_again(
    shared: frozenset[int], sent: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcasts: list[tuple[int, float]] = []
    monkeypatch.setattr(
        state_transfer, "broadcast", lambda link, root, values: broadcasts.append((root, float(values)))
    )
    group: Any = SimpleNamespace(sums=[SimpleNamespace(values=torch.tensor(float(n)), is_done=False) for n in range(3)])
    handover(RecoveryPlan(step=3, begun=True, given=(0, None, 1), shared=shared), [group]).send_sums(group)
    assert broadcasts == sent
    assert [bucket.is_done for bucket in group.sums] == [0 not in shared, False, True]
