"""The search for the node at which the others meet does not wait again and again for one that is stopped."""

import types
from typing import Any, cast

import pytest

from holdfast.checkpoint.terms import Term
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes import find_host
from holdfast.supervise.nodes.connection import Unreachable
from holdfast.supervise.nodes.find_host import HostFinder
from holdfast.supervise.nodes.rendezvous import Node, Peers

STOPPED, OWN = "10.0.0.1:1", "10.0.0.2:1"


class Silent:
    """A connection to a stopped process: the kernel accepts it, and nobody answers."""

    tried: list[str]

    def __init__(self, where: str, who: str, patience: float) -> None:
        self.tried.append(where)

    def ask(self, question: Any, within: float) -> Any:
        raise Unreachable("it did not answer")

    def end(self) -> None:
        pass


def test_a_stopped_host_is_asked_once_in_several_looks_so_that_the_others_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(find_host, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(find_host, "is_listening", lambda _: True)
    monkeypatch.setattr(find_host, "Connection", Silent)
    Silent.tried = []
    term = Term(1, "token", STOPPED, (0, 1))
    checkpoints = cast("Checkpoints", types.SimpleNamespace(term=lambda: term))
    last = cast("Peers", types.SimpleNamespace(term=term, where={0: STOPPED, 1: OWN}))
    node = Node(rank=1, of=2, endpoint=STOPPED, least=1, lost_after=5.0)
    finder = HostFinder(node, "1-a", OWN, checkpoints)
    for _ in range(3):
        assert finder.elsewhere(OWN, last) is None
        now[0] += finder.look_every
    assert Silent.tried == [STOPPED]
    now[0] += 2 * finder.look_every  # it may have been continued since
    finder.elsewhere(OWN, last)
    assert Silent.tried == [STOPPED, STOPPED]


def test_a_host_that_was_silent_in_training_is_not_asked_again_before_the_others_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(find_host, "is_listening", lambda _: True)
    Silent.tried = []

    class Answering(Silent):
        def ask(self, question: Any, within: float) -> Any:
            return True

    monkeypatch.setattr(find_host, "Connection", Answering)
    term = Term(1, "token", STOPPED, (0, 1))
    checkpoints = cast("Checkpoints", types.SimpleNamespace(term=lambda: term))
    last = cast("Peers", types.SimpleNamespace(term=term, where={0: STOPPED, 1: OWN}))
    finder = HostFinder(Node(rank=1, of=2, endpoint=STOPPED, least=1, lost_after=5.0), "1-a", OWN, checkpoints)
    finder.avoid(STOPPED)
    finder.find(last, lambda: None)
    assert Silent.tried == [OWN]
