"""A worker that does not begin, because its fork copied a lock that another thread held, is forked again."""

import gc
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.progress import Progress
from holdfast.runs.config import RunConfig
from holdfast.supervise.workers import process
from holdfast.supervise.workers.entry import Task
from holdfast.supervise.workers.process import WorkerProcess


def _task(folder: Path) -> Task:
    return Task(
        config=RunConfig(script="none.py"),
        environment={},
        supervisor=os.getpid(),
        progress=Progress(),
        stdout=folder / "out",
        stderr=folder / "err",
        error=folder / "error",
        stack=2,
    )


def _started(folder: Path) -> int:
    return len((folder / "out").read_text()) if (folder / "out").exists() else 0


def _main(stuck: int) -> object:
    """Return the entry point of a worker whose first `stuck` forks never begin."""

    def main(task: Task) -> None:
        with task.stdout.open("a") as file:
            file.write("x")
        if _started(task.stdout.parent) > stuck:
            task.progress.is_up = True
        time.sleep(60)

    return main


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_a_fork_that_never_begins_is_forked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: int) -> None:
    monkeypatch.setattr(process.entry, "main", _main(stuck))
    monkeypatch.setattr(process, "UP_WITHIN", 0.3)
    worker = WorkerProcess(_task(tmp_path), seat=0, rank=0, local_rank=0)
    try:
        first = worker.pid
        worker.wait_until_up()
        assert worker.task.progress.is_up
        assert (worker.pid != first) is bool(stuck)
        assert _started(tmp_path) == stuck + 1
    finally:
        worker.kill()


def test_a_worker_that_has_ended_is_not_forked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.entry, "main", lambda task: os._exit(3))
    worker = WorkerProcess(_task(tmp_path), seat=0, rank=0, local_rank=0)
    first = worker.pid
    worker.wait_until_up()
    assert worker.pid == first


class Connection:
    """An object of the supervisor, such as a connection whose destructor waits for a thread that a fork lacks."""

    def __init__(self, ended: Path) -> None:
        self.ended, self.itself = ended, self

    def __del__(self) -> None:
        self.ended.write_text(str(os.getpid()))


def test_a_worker_does_not_finalize_unreachable_objects_of_the_supervisor(tmp_path: Path) -> None:
    """A worker of a node that had met the others again waited for ever in its first garbage collection."""
    script = tmp_path / "script.py"
    script.write_text("import gc, os\ngc.collect()\nos._exit(5)\n")
    task = replace(
        _task(tmp_path),
        config=RunConfig(script=str(script)),
        environment={"RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        stack=os.memfd_create("stack"),
    )
    gc.disable()
    try:
        Connection(tmp_path / "ended")
        worker = WorkerProcess(task, seat=0, rank=0, local_rank=0)
    finally:
        gc.enable()
    worker._process.join(30)
    assert worker._process.exitcode == 5
    assert not (tmp_path / "ended").exists()
    gc.collect()
    assert (tmp_path / "ended").read_text() == str(os.getpid())
