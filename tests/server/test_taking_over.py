"""Who drives a run: one controller at a time, and members that die while they start are started again."""

import os
import signal
from pathlib import Path

import pytest
from served import served, settings

from holdfast.server import members
from holdfast.server.controller import Controller
from holdfast.server.job import _Job
from holdfast.server.members import Members


def test_a_controller_that_waits_touches_neither_history_nor_store(tmp_path: Path) -> None:
    Controller(settings(tmp_path / "run"))

    assert not (tmp_path / "run").exists()


def test_a_controller_whose_raylet_is_gone_ends_so_that_no_two_drive_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(members, "raylet_lives", lambda: False)
    monkeypatch.setattr(os, "kill", lambda *told: ended.append(told))

    Members().look()

    assert ended == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_a_member_that_dies_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = _Job._start

    def started(job: _Job, kind: str, count: int) -> list[int]:
        numbers = start(job, kind, count)
        job._actors[kind][numbers[0]].die.remote()
        return numbers

    monkeypatch.setattr(_Job, "_start", started)

    assert served(tmp_path, nodes=2, iterations=2).iterations == 2
