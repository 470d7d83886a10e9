"""Messages among ranks: a rank waits as long as its peer is alive, and no longer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]  # they are public

from holdfast.distributed import ranks as module
from holdfast.distributed.ranks import Ranks
from holdfast.errors import WorkerLost


def pair(patience: float) -> tuple[Ranks, Ranks]:
    store, cpu = HashStore(), torch.device("cpu")
    first, second = (
        Ranks(rank=rank, size=2, store=store, grouped=False, device=cpu, patience=patience) for rank in (0, 1)
    )
    return first, second


def test_a_busy_rank_0_is_not_taken_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save takes twice the patience, which is long enough for a loaded machine."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    first, second = pair(patience=1.0)
    with ThreadPoolExecutor(1) as peer, first.busy():
        message = peer.submit(second.wait_for, "saved")
        threading.Event().wait(2.0)  # the save
        assert not message.done()
        first.post("saved", "yes")
        assert message.result(30) == "yes"


def test_a_busy_rank_0_whose_store_is_gone_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.001)
    asked = threading.Event()

    class ClosedStore(HashStore):
        def add(self, key: str, number: int) -> int:
            asked.set()
            raise DistNetworkError("Connection reset by peer")

    first, _ = pair(patience=1.0)
    first.store = ClosedStore()
    with first.busy():
        assert asked.wait(30)
    assert capfd.readouterr().err == ""


def test_a_silent_peer_is_given_up_in_one_line() -> None:
    _, second = pair(patience=0.2)
    with pytest.raises(WorkerLost, match=r"waited 0\.2 s for a message of a peer \(saved\)"):
        second.wait_for("saved")


def test_a_wait_of_one_thread_does_not_keep_another_from_the_store() -> None:
    first, second = pair(patience=30.0)
    with ThreadPoolExecutor(1) as thread:
        message = thread.submit(second.wait_for, "late")
        second.post("early", "1")
        assert first.wait_for("early") == "1"
        first.post("late", "2")
        assert message.result(30) == "2"


def test_values_are_gathered_on_rank_0_in_order_and_removed_from_the_store() -> None:
    first, second = pair(patience=30.0)
    assert second.gather("states", "b") is None
    assert first.gather("states", "a") == ["a", "b"]
    assert not first.is_posted("states/1")
