"""Fixtures that start supervisors and commands: a warm process that has imported torch, and functions that use it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor_process import (
    SUPPORT,
    TRAINEE,
    WITHIN,
    Command,
    RunScript,
    Start,
    StartCommand,
    Supervisor,
    alive,
    driving,
    fork,
)


@pytest.fixture(scope="session")
def driver() -> Iterator[subprocess.Popen[str]]:
    """The warm process; whatever a failed test left running dies with it."""
    with driving() as process:
        yield process


@pytest.fixture
def start(driver: subprocess.Popen[str], tmp_path: Path) -> Iterator[Start]:
    """A function that starts a supervisor, by default of `torch_only_script`."""
    started: list[Supervisor] = []

    def run(task: dict[str, Any] | None = None, *, out: str = "out", **how: Any) -> Supervisor:
        folder = tmp_path / f"job-{len(started)}"
        started.append(launch(driver, folder, tmp_path / out, job_settings(task, **how)))
        return started[-1]

    yield run
    end_all(started)


@pytest.fixture(scope="module")
def start_reference(driver: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A function that starts a run without failures, only once for all tests of a module that compare with the same."""
    started: dict[str, Supervisor] = {}

    def run(task: dict[str, Any] | None = None, **how: Any) -> Supervisor:
        wanted = job_settings(task, **how)
        key = json.dumps(wanted, sort_keys=True)
        if key not in started:
            folder = tmp_path_factory.mktemp("reference")
            started[key] = launch(driver, folder / "job", folder / "out", wanted)
        return started[key]

    yield run
    end_all(started.values())


def job_settings(
    task: dict[str, Any] | None = None,
    *,
    script: Path = TRAINEE,
    nodes: dict[str, Any] | None = None,
    namespace: str | None = None,
    environment: dict[str, str] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Return the job of a supervisor, without its folders."""
    args = [json.dumps(task)] if task is not None else []
    return {
        "config": {"script": str(script), "args": args, "workers": 3, **config},
        "nodes": nodes or {},
        "namespace": namespace,
        "environment": environment or {},
    }


def launch(driver: subprocess.Popen[str], folder: Path, out: Path, job: dict[str, Any]) -> Supervisor:
    """Start a supervisor in a fork of the warm process."""
    folder.mkdir()
    return Supervisor(fork(driver, {"folder": str(folder), "out": str(out), **job}), folder, out)


def end_all(started: Iterable[Supervisor]) -> None:
    """Kill the supervisors that have not ended."""
    for supervisor in started:
        if not supervisor.over and alive(supervisor.pid):
            os.kill(supervisor.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def start_command(driver: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> StartCommand:
    """A function that starts a `holdfast` command in a fork of the warm process, which saves it 4 seconds of imports.

    It runs the source text `before` first, or only the text `instead`. Errors and output can be `together` in stdout.
    """

    def run(
        *arguments: object,
        before: str = "",
        instead: str = "",
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        together: bool = False,
    ) -> Command:
        folder = tmp_path_factory.mktemp("command")
        job = {
            "folder": str(folder),
            "arguments": [str(argument) for argument in arguments],
            "before": before,
            "instead": instead,
            "cwd": str(cwd or folder),
            "environment": environment or {},
            "together": together,
        }
        return Command(fork(driver, job), folder)

    return run


@pytest.fixture(scope="session")
def run_script(start_command: StartCommand) -> RunScript:
    """A function that runs a script of tests/support in a fork of the warm process, and waits for its end."""

    def run(name: str, *arguments: object, within: float = WITHIN) -> None:
        source = f"import runpy, sys\nsys.path.insert(0, {str(SUPPORT)!r})\n"
        source += f"runpy.run_path({str(SUPPORT / name)!r}, run_name='__main__')"
        ran = start_command(*arguments, instead=source)
        assert ran.wait(within) == 0, ran.stderr

    return run
