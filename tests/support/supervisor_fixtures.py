"""Fixtures that start supervisors: a warm process that has imported torch, and a function that starts one in it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor_process import TRAINEE, Start, Supervisor, alive, driving


@pytest.fixture(scope="session")
def driver() -> Iterator[subprocess.Popen[str]]:
    """The warm process; whatever a failed test left running dies with it."""
    with driving() as process:
        yield process


@pytest.fixture
def start(driver: subprocess.Popen[str], tmp_path: Path) -> Iterator[Start]:
    """A function that starts a supervisor, by default of `torch_only_script`."""
    started: list[Supervisor] = []

    def run(
        task: dict[str, Any] | None = None,
        *,
        out: str = "out",
        script: Path = TRAINEE,
        nodes: dict[str, Any] | None = None,
        namespace: str | None = None,
        environment: dict[str, str] | None = None,
        **config: Any,
    ) -> Supervisor:
        folder = tmp_path / f"job-{len(started)}"
        folder.mkdir()
        args = [json.dumps(task)] if task is not None else []
        job = {
            "folder": str(folder),
            "out": str(tmp_path / out),
            "config": {"script": str(script), "args": args, "workers": 3, **config},
            "nodes": nodes or {},
            "namespace": namespace,
            "environment": environment or {},
        }
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps(job) + "\n")
        driver.stdin.flush()
        started.append(Supervisor(int(driver.stdout.readline()), folder, tmp_path / out))
        return started[-1]

    yield run
    for supervisor in started:
        if not supervisor.over and alive(supervisor.pid):
            os.kill(supervisor.pid, signal.SIGKILL)
