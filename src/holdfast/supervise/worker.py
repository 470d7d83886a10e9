"""The life of one worker, from the fork to its last exit handler: it runs the user's script as if Python had started it.

Whatever the script finds in its process (arguments, import path, signals, threads, exit handlers) is as a fresh
interpreter under torchrun would have it, only that torch is already imported.
"""

import atexit
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from holdfast.ddp import preemption, world
from holdfast.supervise import errorfile, heartbeat

_PR_SET_PDEATHSIG = 1
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
"""What the supervisor blocks while it forks, so that a worker meets them with handlers of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one worker is to run, in which environment, and where it leaves its traces."""

    script: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    supervisor: int
    heartbeat: Path
    stdout: Path
    stderr: Path
    error: Path


def main(task: Task) -> NoReturn:
    """Run the task in this process, which was forked for it."""
    _die_with(task.supervisor)
    _print_to(task.stdout, task.stderr)
    os.environ.update(task.environment)
    heartbeat.start(task.heartbeat)
    _listen()
    _be_fresh()
    sys.exit(_run(task))


def _die_with(supervisor: int) -> None:
    """Be killed by the kernel when the supervisor dies, however it dies; and lead a group that can be killed as one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # it died before we could ask
    os.setpgid(0, 0)


def _print_to(stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, number)
        os.close(file)
    # Whole lines at once: a worker may be killed at any time, and what it said before is wanted.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open until we exit
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()


def _listen() -> None:
    """SIGTERM asks for a last save. Ctrl-C reaches the supervisor, which passes it on as SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: preemption.requested.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _be_fresh() -> None:
    """Undo what a fork inherits and a new interpreter would not have."""
    atexit._clear()
    np.random.seed()
    # As torchrun: several workers on one machine take one thread each, unless the user says otherwise.
    if int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))
        pools().limit(limits=int(threads))  # those that are loaded; others read the variable


@cache
def pools() -> ThreadpoolController:
    """The thread pools of numerical libraries, to be found before the fork: looking for them takes as long as a fork."""
    return ThreadpoolController()


def _run(task: Task) -> int:
    sys.argv = [task.script, *task.args]
    sys.path.insert(0, str(Path(task.script).parent))
    try:
        runpy.run_path(task.script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = _status(end, task)
    except BaseException as error:
        errorfile.write(task.error, error, task.script)
        _leave_at_once(1)
    _leave_in_order()
    return status


def _status(end: SystemExit, task: Task) -> int:
    """The status that a script's `sys.exit` asks for; a failure it chose itself is recorded like one it raised."""
    status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    if status not in (0, preemption.PREEMPTED):
        message = end.code if isinstance(end.code, str) else f"exited with status {status}"
        errorfile.write(task.error, SystemExit(message), task.script)
    return status


def _leave_at_once(status: int) -> NoReturn:
    """Peers wait for us in a collective: closing our connections is how they learn of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_in_order() -> None:
    """What an interpreter does at its end, and a forked child would leave out."""
    world.leave()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
