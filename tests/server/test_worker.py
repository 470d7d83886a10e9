"""Workers that wait for a node that does not answer wait no longer once the controller has given it up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.blocks.partition_map import PartitionMap
from holdfast.server import members
from holdfast.server.members import Member, ServerMembers
from holdfast.server.worker import Worker
from holdfast.workloads.divided import RoundId
from server_runs import settings

SILENT = "it did not answer within 1.25 s"


class Silent:
    """Stands in the place of Ray and of an actor: keeps what was called, and nothing ever comes of it."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return _Call(self, method)

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [], refs

    def kill(self, actor: "Silent") -> None:
        """It is gone, and says as much as before."""


class Interrupted(Silent):
    """Run an action during a wait."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self._happens()
        return [], refs


class _Call:
    def __init__(self, actor: Silent, method: str) -> None:
        self._actor, self._method = actor, method

    def remote(self, *arguments: Any) -> object:
        self._actor.called.append((self._method, *arguments))
        return object()


def test_the_controller_notifies_workers_once_of_a_silent_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, worker = [100.0], Silent()
    monkeypatch.setattr(members, "ray", Silent())
    monkeypatch.setattr(members, "raylet_lives", lambda: True)
    monkeypatch.setattr(members.time, "monotonic", lambda: now[0])
    there = ServerMembers()
    there.admit(Member("node", 1), Silent())  # type: ignore[arg-type]
    there.settle()
    there.workers[0] = worker  # type: ignore[assignment] # of which nothing is expected here

    for _ in range(20):
        now[0] += 0.2
        found = there.look()

    assert found == {Member("node", 1): SILENT}
    assert worker.called == [("give_up", 1, SILENT)]
    there.expel(Member("node", 1))
    assert there.look() == {}


def test_a_worker_that_waits_for_a_node_breaks_off_when_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, node = Worker(0, settings(tmp_path, nodes=1, workers=1)), Silent()
    worker.route(PartitionMap(0, _all_of(worker, 0), (0,)), {0: node})  # type: ignore[dict-item]
    monkeypatch.setattr(members, "ray", Interrupted(lambda: worker.give_up(0, SILENT)))

    assert worker.compute(RoundId(0, 0, 0), (0,)).broken == {0: SILENT}
    assert worker.measure((0,)).broken == {0: SILENT}
    worker.close()


def test_a_new_map_without_that_node_ends_it(tmp_path: Path) -> None:
    worker = Worker(0, settings(tmp_path, nodes=2, workers=1))
    worker.give_up(1, SILENT)
    worker.route(PartitionMap(1, _all_of(worker, 0), (0,)), {})
    assert worker._gone == {}
    worker.close()


def _all_of(worker: Worker, node: int) -> Any:
    return np.full(len(worker._workload.blocks), node, np.int32)
