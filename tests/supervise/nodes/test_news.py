"""What a supervisor acts on first, if it learns several things of the other nodes."""

from typing import Any

import pytest

from holdfast.supervise.nodes import news
from holdfast.supervise.nodes.news import AllNodesFinished, NodesSilent, NodesWaiting, StoppedElsewhere
from holdfast.supervise.nodes.rendezvous import Peers, Rendezvous


class Others(Peers):
    """The other nodes, whose workers have finished, and of which node 1 is silent, and node 2 has exited."""

    def lost(self, *, suspected: bool = False) -> list[int]:
        return [1, 2] if suspected else [1]


class Waiting(Rendezvous):
    """A rendezvous at which the nodes `waiting` wait, and of which another node says the `verdict`."""

    def __init__(self, waiting: list[int], verdict: str | None) -> None:
        super().__init__(1)
        self.peers, self._waiting, self._verdict = Others(), waiting, verdict

    def waiting_nodes(self) -> list[int]:
        return self._waiting

    def stopped(self) -> str | None:
        return self._verdict


@pytest.mark.parametrize(
    ("waiting", "verdict", "asked", "expected"),
    [
        ([2], "it failed", {"have_finished": True, "is_suspicious": False}, AllNodesFinished()),
        ([2], "it failed", {"have_finished": False, "is_suspicious": False}, StoppedElsewhere("it failed")),
        ([2], None, {"have_finished": False, "is_suspicious": False}, NodesWaiting([2])),
        ([], None, {"have_finished": False, "is_suspicious": False}, NodesSilent([1])),
        ([], None, {"have_finished": False, "is_suspicious": True}, NodesSilent([1, 2])),
    ],
)
def test_an_end_comes_before_a_start_and_a_start_before_a_loss(
    waiting: list[int], verdict: str | None, asked: dict[str, bool], expected: Any
) -> None:
    assert news.ask(Waiting(waiting, verdict), **asked) == expected


def test_a_single_node_has_no_news_until_its_workers_have_finished() -> None:
    assert news.ask(Rendezvous(1), have_finished=False, is_suspicious=True) is None
    assert news.ask(Rendezvous(1), have_finished=True, is_suspicious=False) == AllNodesFinished()
