"""NCCL's place in live recovery, as far as that can be tried without NCCL: what counts as done, and what is refused."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.distributed.nccl_link import NCCL, _Sums, link_for, why_not


class Work:
    """As NCCL's: it is complete when the device has done with it, also if that was an abort."""

    def __init__(self) -> None:
        self.is_there = threading.Event()

    def is_completed(self) -> bool:
        return self.is_there.is_set()

    def is_success(self) -> bool:
        return True


class Communicator:
    def __init__(self) -> None:
        self.works: list[Work] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self.works.append(Work())
        return self.works[-1]

    def abort(self) -> None:
        for each in self.works:
            each.is_there.set()


@pytest.fixture
def sums() -> Any:
    found = _Sums()
    found._group = Communicator()  # type: ignore[assignment]
    threading.Thread(target=found._watch, daemon=True).start()
    return found


def test_a_sum_is_done_once_the_device_has_finished_it(sums: Any) -> None:
    values = [torch.ones(2)]
    first, second = sums.allreduce(values), sums.allreduce(values)
    sums._group.works[0].is_there.set()
    assert first.get_future().wait() is values
    assert not second.is_completed()


def test_an_aborted_sum_has_failed_although_nccl_reports_it_as_complete(sums: Any) -> None:
    done, lost = sums.allreduce([torch.ones(1)]), sums.allreduce([torch.ones(1)])
    sums._group.works[0].is_there.set()
    done.wait()
    sums.abort()
    with pytest.raises(RuntimeError):
        lost.wait()
    assert lost.is_completed()
    assert done.get_future().done()
    assert done.wait()
    with pytest.raises(RuntimeError, match=GroupBroken("the membership has changed").args[0]):
        lost.get_future().value()


def test_a_backend_that_cannot_abort_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert why_not("gloo") is None
    assert why_not(NCCL) == "this NCCL cannot abort operations whose peer is lost"
    assert why_not("ucc") == "the backend ucc is not known to end operations whose peer is lost"
    assert type(link_for("gloo", torch.device("cpu"))) is Link


@pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a device and NCCL")
def test_a_communicator_of_one_is_aborted_and_replaced() -> None:
    link, store = link_for(NCCL, torch.device("cuda", 0)), dist.HashStore()
    for number in range(2):
        link.connect(lambda number=number: dist.PrefixStore(str(number), store), 0, 1, lambda: False)  # type: ignore[misc]
        values = torch.ones(1 << 20, device="cuda")
        link.do("allreduce", [values])
        assert not link.is_broken
        link.hang_up()
        with pytest.raises(GroupBroken):
            link.do("allreduce", [values])


def test_a_member_without_peers_has_its_sums_at_once_and_in_place() -> None:
    link, values = Link(), torch.ones(2)
    link.connect(lambda: pytest.fail("it asks nobody"), 0, 1, lambda: False)
    work = link.post("allreduce", [values])
    assert (work.is_completed(), work.get_future().wait()[0] is values) == (True, True)
