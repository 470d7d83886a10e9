"""Nodes that wait for others hear of the run's end, and say for whom they wait; whoever keeps the store goes last."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from holdfast.checkpoint.terms import Term
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes import multi_node
from holdfast.supervise.nodes.connection import Connection
from holdfast.supervise.nodes.multi_node import Nodes
from holdfast.supervise.nodes.node import Node
from holdfast.supervise.nodes.rendezvous import RunEnded

WITHIN = 30.0


class Terms:
    """The part of the checkpoints that nodes meet by, in memory."""

    wrong: str | None = None

    def __init__(self) -> None:
        self._newest: Term | None = None

    def term(self) -> Term | None:
        return self._newest

    def take(self, term: Term) -> bool:
        self._newest = term
        return True

    def find(self, term: Term) -> None:
        assert self._newest == term


class Job:
    """Two nodes in one process."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self._terms = cast("Checkpoints", Terms())
        self._pool = ThreadPoolExecutor(4)

    def node(self, rank: int) -> Nodes:
        node = Node(rank=rank, of=2, endpoint=self.endpoint, least=1, lost_after=1.0)
        return Nodes(node, {}, self._terms)

    def met(self) -> tuple[Nodes, Nodes]:
        """Both, started together; the first keeps the store."""
        both = self.node(0), self.node(1)
        for each in [self.later(each.next_rendezvous) for each in both]:
            each.result(WITHIN)
        return both

    def later(self, what: Any) -> Future[Any]:
        return self._pool.submit(what)

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def job() -> Iterator[Job]:
    run = Job()
    yield run
    run.end()


def connections() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if isinstance(each, Connection)]


def test_the_keeper_of_the_store_goes_last_and_no_connection_is_left(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper, other = job.met()
    keeper.shutdown()
    leaving = job.later(keeper.leave)
    with pytest.raises(TimeoutError):
        leaving.result(0.5)
    other.shutdown()
    other.leave()
    leaving.result(multi_node._LEAVES_WITHIN / 2)
    assert connections() == []
    del keeper, leaving
    assert "TCPStore" not in capfd.readouterr().err


def test_a_node_that_comes_back_as_the_run_ends_is_told_how_it_ended(job: Job) -> None:
    keeper, other = job.met()
    other.leave()
    back = job.node(1)
    coming = job.later(back.next_rendezvous)
    while not keeper.num_nodes_waiting():
        assert not coming.done()
    keeper.verdict = "as it ended"
    keeper.shutdown()
    leaving = job.later(keeper.leave)
    with pytest.raises(RunEnded, match="as it ended"):
        coming.result(WITHIN)
    with pytest.raises(TimeoutError):
        leaving.result(0.5)
    back.leave()
    leaving.result(multi_node._LEAVES_WITHIN / 2)
    assert connections() == []


def test_a_node_that_waits_in_its_own_store_sees_that_the_run_has_ended_without_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "_SAYS_AFTER", 0.0)
    said: list[str] = []
    ends = iter([None, "as it ended"])
    alone = job.node(1)
    alone.say, alone.ended = said.append, lambda: next(ends)
    with pytest.raises(RunEnded, match="as it ended"):
        job.later(alone.next_rendezvous).result(WITHIN)
    assert said == [f"waiting for node 0 at {job.endpoint}, for 10 minutes at most"]
    alone.leave()
    assert connections() == []


def test_so_does_one_that_finds_nobody_at_the_rendezvous(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_node, "_SAYS_AFTER", 0.0)
    said: list[str] = []
    ends = iter([None, "as it ended"])
    with socket.socket() as taken:  # by somebody who does not listen
        taken.bind(("127.0.0.1", 0))
        job.endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        alone = job.node(1)
        alone.say, alone.ended = said.append, lambda: next(ends)
        with pytest.raises(RunEnded, match="as it ended"):
            job.later(alone.next_rendezvous).result(WITHIN)
    assert said == [f"waiting for node 0 at {job.endpoint}, for 10 minutes at most"]
    alone.leave()
