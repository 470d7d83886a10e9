"""Runs on Ray, in which real processes are killed; what is computed, and every other moment, is in test_protocol."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.errors import BadInput, CommitConflict, StorageFailed
from holdfast.faults.schedule import Failure
from holdfast.server.cluster import require_answer
from holdfast.server.driver import _Driver, serve
from holdfast.workloads.mlr import mlr
from server_accounts import assert_accounted
from server_processes import actors, until
from server_runs import loss_of, served, settings, simulated, told

pytestmark = [pytest.mark.xdist_group("ray")]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The iteration at which each controller was started."""
    found: list[int] = []
    new_controller = _Driver._new_controller

    def noted(job: _Driver) -> Any:
        found.append(job._iteration)
        return new_controller(job)

    monkeypatch.setattr(_Driver, "_new_controller", noted)
    return found


@pytest.mark.usefixtures("ray_cluster")
def test_a_node_a_worker_and_one_controller_after_another_are_killed_in_one_run(
    tmp_path: Path, started: list[int]
) -> None:
    failures = [
        Failure(step=2, kind="node", targets=(1,)),
        Failure(step=3, kind="worker", targets=(0,)),
        Failure(step=4, kind="controller", targets=(0,)),
        Failure(step=10, kind="controller", targets=(0,)),
    ]

    outcome = served(tmp_path, *failures, nodes=2, iterations=14)

    workload = mlr("digits")
    assert outcome.iterations == 14
    assert [event.kind for event in told(tmp_path, events.Lost)] == ["node", "worker", "controller", "controller"]
    assert len(started) >= 3, "where one was lost, another is started to wait"
    assert started[0] == 0
    expected = [loss_of(workload, state) for state in simulated(workload, 2)[1:]]
    assert [event.loss for event in told(tmp_path, events.Iterate)][:2] == pytest.approx(expected, rel=1e-5)
    assert_accounted(tmp_path, workload, 14)
    until(lambda: not actors(), "no process of the run is left")


@pytest.mark.usefixtures("ray_cluster")
def test_a_node_that_is_stopped_is_found_by_its_silence(tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop_a_node() -> None:
        history = tmp_path / "history" / "controller.jsonl"
        until(lambda: history.exists() and history.read_text().count('"iterate"') >= 2, "two iterations are done")
        stopped.append(min(actors("ray::ServerNode")))
        os.kill(stopped[0], signal.SIGSTOP)

    thread = threading.Thread(target=stop_a_node)
    thread.start()
    served(tmp_path, nodes=2, workers=1, iterations=30)
    thread.join()

    (lost,) = told(tmp_path, events.Lost)
    assert stopped
    assert (lost.kind, lost.why) == ("node", "it did not answer within 1.25 s")
    assert_accounted(tmp_path, mlr("digits"), 30)
    until(lambda: not actors(), "the stopped process is gone too")


@pytest.mark.usefixtures("ray_cluster")
def test_impossible_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="65 nodes are more than the 64 blocks of mlr-digits"):
        serve(settings(tmp_path, nodes=65))
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match="cannot"):
        serve(settings(tmp_path / "file"))
    (tmp_path / "history").mkdir()
    with pytest.raises(CommitConflict, match="already holds a run"):
        serve(settings(tmp_path))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:many"])
def test_an_address_without_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(BadInput, match=f"there is no Ray cluster at {address}"):
        require_answer(address)
