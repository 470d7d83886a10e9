"""Nodes that wait for others learn of the run's end and say for which nodes they wait; the host leaves last."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from holdfast.checkpoint.terms import Term
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes import multi_node
from holdfast.supervise.nodes.connection import Connection
from holdfast.supervise.nodes.multi_node import MultiNodeRendezvous, RunEndWatch
from holdfast.supervise.nodes.rendezvous import Node, RunEnded
from holdfast.supervise.verdict import RunVerdict

WITHIN = 30.0
VERDICT = RunVerdict(verdict="completed", attempts=1, because="as it ended")


class Terms:
    """The terms in a checkpoint store, in memory."""

    wrong: str | None = None

    def __init__(self) -> None:
        self._newest: Term | None = None

    def term(self) -> Term | None:
        return self._newest

    def take(self, term: Term) -> bool:
        self._newest = term
        return True

    def take_attempt(self, number: int) -> int:
        return number

    def require_term(self, term: Term) -> None:
        assert self._newest == term


class RunEnd:
    """The end of a run, as successive looks find it."""

    def __init__(self, *verdicts: RunVerdict | None) -> None:
        self._verdicts = iter(verdicts)

    def look(self) -> RunVerdict | None:
        return next(self._verdicts, None)


class Job:
    """Two nodes in one process."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        self._terms = cast("Checkpoints", Terms())
        self._pool = ThreadPoolExecutor(4)

    def node(self, rank: int, say: Callable[[str], None] = str, run_end: RunEnd | None = None) -> MultiNodeRendezvous:
        node = Node(rank=rank, of=2, endpoint=self.endpoint, least=1, lost_after=1.0)
        watch = cast("RunEndWatch", run_end or RunEnd())
        return MultiNodeRendezvous(node, {}, self._terms, attempt=1, say=say, run_end=watch)

    def two_nodes(self) -> tuple[MultiNodeRendezvous, MultiNodeRendezvous]:
        """Return two nodes that have met; the first one keeps the store."""
        nodes = self.node(0), self.node(1)
        for future in [self.submit(node.meet, 1) for node in nodes]:
            future.result(WITHIN)
        return nodes

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pool.submit(function, *args)

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def job() -> Iterator[Job]:
    run = Job()
    yield run
    run.end()


def connections() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, Connection)]


def _leave(node: MultiNodeRendezvous) -> None:
    """Let a node leave without ending the run."""
    node.round = None
    node.close("")


def test_the_host_waits_for_the_other_nodes_to_leave_and_no_connection_is_left(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    host, other = job.two_nodes()
    closing = job.submit(host.close, "")
    with pytest.raises(TimeoutError):
        closing.result(0.5)
    other.close("")
    closing.result(multi_node._LEAVES_WITHIN / 2)
    assert connections() == []
    del host, closing
    assert "TCPStore" not in capfd.readouterr().err


def test_a_node_that_comes_back_as_the_run_ends_gets_the_verdict(job: Job) -> None:
    host, other = job.two_nodes()
    _leave(other)
    back = job.node(1)
    meeting = job.submit(back.meet, 1)
    while not host.waiting_nodes():
        assert not meeting.done()
    closing = job.submit(host.close, "as it ended")
    with pytest.raises(RunEnded, match="as it ended"):
        meeting.result(WITHIN)
    with pytest.raises(TimeoutError):
        closing.result(0.5)
    back.close("")
    closing.result(multi_node._LEAVES_WITHIN / 2)
    assert connections() == []


def test_a_node_that_waits_in_its_own_store_sees_that_the_run_has_ended_without_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "_SAYS_AFTER", 0.0)
    lines: list[str] = []
    alone = job.node(1, lines.append, RunEnd(None, VERDICT))
    with pytest.raises(RunEnded, match="as it ended"):
        job.submit(alone.meet, 1).result(WITHIN)
    assert lines == [f"waiting for node 0 at {job.endpoint}, for 10 minutes at most"]
    alone.close("")
    assert connections() == []


def test_a_node_that_finds_no_rendezvous_sees_that_the_run_has_ended_without_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "_SAYS_AFTER", 0.0)
    lines: list[str] = []
    with socket.socket() as taken:  # by a process that does not listen
        taken.bind(("127.0.0.1", 0))
        job.endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        alone = job.node(1, lines.append, RunEnd(None, VERDICT))
        with pytest.raises(RunEnded, match="as it ended"):
            job.submit(alone.meet, 1).result(WITHIN)
    assert lines == [f"waiting for node 0 at {job.endpoint}, for 10 minutes at most"]
    alone.close("")
