"""One controller drives a run at a time, and members that die while they start are started again."""

import os
import signal
import threading
from pathlib import Path

import pytest

from holdfast import events
from holdfast.server import members
from holdfast.server.controller import Controller
from holdfast.server.driver import _Driver
from holdfast.server.members import ServerMembers
from holdfast.workloads.mlr import mlr
from server_accounts import assert_accounted
from server_processes import actors, until
from server_runs import served, settings, told


def test_a_controller_that_waits_touches_neither_history_nor_store(tmp_path: Path) -> None:
    Controller(settings(tmp_path / "run"))

    assert not (tmp_path / "run").exists()


def test_a_controller_without_its_raylet_ends_so_that_only_one_drives_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(members, "raylet_lives", lambda: False)
    monkeypatch.setattr(os, "kill", lambda *told: ended.append(told))

    ServerMembers().look()

    assert ended == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_a_member_that_dies_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = _Driver._start

    def started(job: _Driver, kind: str, count: int) -> list[int]:
        numbers = start(job, kind, count)
        if numbers:
            job._actors[kind][numbers[0]].die.remote()
        return numbers

    monkeypatch.setattr(_Driver, "_start", started)

    assert served(tmp_path, nodes=2, iterations=2).iterations == 2


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_outlives_both_controllers_killed_at_once(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_controllers() -> None:
        history = tmp_path / "history" / "controller.jsonl"
        until(lambda: history.exists() and history.read_text().count('"iterate"') >= 2, "two iterations are done")
        until(lambda: len(actors("ray::Controller")) == 2, "one controller trains and one waits")
        for pid in actors("ray::Controller"):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    thread = threading.Thread(target=kill_controllers)
    thread.start()
    outcome = served(tmp_path, nodes=2, workers=1, iterations=60)
    thread.join()

    assert len(killed) == 2
    assert outcome.iterations == 60
    assert [event.kind for event in told(tmp_path, events.Lost)] == ["controller"]
    assert_accounted(tmp_path, mlr("digits"), 60)
