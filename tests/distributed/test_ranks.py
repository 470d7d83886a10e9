"""How ranks wait for each other: for as long as the other is alive, and no longer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public

from holdfast.distributed import ranks as module
from holdfast.distributed.ranks import Ranks
from holdfast.errors import WorkerLost


def pair(patience: float) -> tuple[Ranks, Ranks]:
    store, cpu = HashStore(), torch.device("cpu")
    first, second = (
        Ranks(rank=rank, size=2, store=store, grouped=False, device=cpu, patience=patience) for rank in (0, 1)
    )
    return first, second


def test_nobody_takes_a_slow_rank_0_for_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save twice as long as anybody would wait for a silent peer, and that long enough for a loaded machine."""
    monkeypatch.setattr(module, "BEAT", 0.02)
    first, second = pair(patience=1.0)
    with ThreadPoolExecutor(1) as peer, first.busy():
        heard = peer.submit(second.hear, "saved")
        threading.Event().wait(2.0)  # the save
        assert not heard.done()
        first.tell("saved", "yes")
        assert heard.result(30) == "yes"


def test_a_peer_that_says_nothing_is_given_up_in_one_line() -> None:
    _, second = pair(patience=0.2)
    with pytest.raises(WorkerLost, match=r"waited 0\.2 s for a peer \(saved\)"):
        second.hear("saved")


def test_a_wait_of_one_thread_does_not_keep_another_from_the_store() -> None:
    first, second = pair(patience=30.0)
    with ThreadPoolExecutor(1) as thread:
        heard = thread.submit(second.hear, "late")
        second.tell("early", "1")
        assert first.hear("early") == "1"
        first.tell("late", "2")
        assert heard.result(30) == "2"


def test_what_all_ranks_say_reaches_rank_0_in_order_and_is_forgotten() -> None:
    first, second = pair(patience=30.0)
    assert second.gather("states", "b") is None
    assert first.gather("states", "a") == ["a", "b"]
    assert not first.is_told("states/1")
