"""All ranks stop before the same window, however far one of them is ahead of another."""

import threading

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]  # they are public

from holdfast import process
from holdfast.distributed.ranks import Ranks
from holdfast.train.stopping import Stopping

STEPS = 100_000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was asked to stop."""
    monkeypatch.setattr(process, "requested", process.StopFlag())
    process.requested.set()


def world(store: HashStore, rank: int, size: int) -> Ranks:
    return Ranks(rank=rank, size=size, store=store, grouped=False, device=torch.device("cpu"), patience=30.0)


class Trainee:
    """A rank that trains windows as if a device did: it may be so many windows ahead of the slowest."""

    def __init__(self, peers: "list[Trainee]", store: HashStore, rank: int, size: int, ahead: int, start: int) -> None:
        self.stopping = Stopping(world(store, rank, size), start)
        self.begun = self.stopped = start
        self._peers, self._ahead = peers, ahead
        self.thread = threading.Thread(target=self._train, args=(start,), daemon=True)

    def _train(self, start: int) -> None:
        for step in range(start, STEPS):
            if self.stopping.is_here(step):
                break
            self.begun = step + 1
            while min(peer.begun for peer in self._peers) < step + 1 - self._ahead:  # its queue is full
                threading.Event().wait(0.0005)
        self.stopped = step
        self.stopping.close()


@pytest.mark.parametrize("ahead", [[0, 0, 0], [40, 0, 7], [0, 40, 3], [1, 2, 40]])
def test_ranks_that_run_ahead_of_each_other_stop_at_one_boundary(ahead: list[int], asked: None) -> None:
    store, peers = HashStore(), list[Trainee]()
    peers.extend(Trainee(peers, store, rank, 3, far, 5) for rank, far in enumerate(ahead))
    for peer in peers:
        peer.thread.start()
    for peer in peers:
        peer.thread.join(60)
        assert not peer.thread.is_alive(), "it never stopped"
    assert len({peer.stopped for peer in peers}) == 1
    assert peers[0].stopped < STEPS - 1


def test_every_rank_hears_of_a_request_before_its_next_boundary(asked: None) -> None:
    store, heard = HashStore(), [threading.Event(), threading.Event()]
    several = [Stopping(world(store, rank, 2), 5, on_request=heard[rank].set) for rank in range(2)]
    assert all(event.wait(60) for event in heard)
    threads = [threading.Thread(target=stopping.is_here, args=(5,)) for stopping in several]
    for thread in threads:
        thread.start()
    for thread, stopping in zip(threads, several, strict=True):
        thread.join(60)
        stopping.close()


class ClosedStore:
    """A store whose server has exited."""

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("Connection reset by peer")


def test_a_rank_whose_store_is_gone_listens_no_more_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    stopping = Stopping(world(ClosedStore(), 0, 2), 0)  # type: ignore[arg-type]  # it knows enough of a store
    stopping._listener.join(30)  # type: ignore[union-attr]  # a world of two has a listener
    assert not stopping._listener.is_alive()  # type: ignore[union-attr]
    assert capfd.readouterr().err == ""
    assert not stopping.is_here(0)


def test_a_rank_alone_stops_at_the_next_boundary(asked: None) -> None:
    assert Stopping(world(HashStore(), 0, 1), 0).is_here(7)
