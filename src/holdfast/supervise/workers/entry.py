"""The life of one worker, from the fork to its last exit handler: it runs the user's script as if Python had started it.

Whatever the script finds in its process (arguments, import path, signals, threads, exit handlers) is as a fresh
interpreter under torchrun would have it, only that torch is already imported.
"""

import atexit
import ctypes
import faulthandler
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from holdfast import process, progress
from holdfast.distributed import ranks
from holdfast.progress import Progress
from holdfast.runs import config, lock
from holdfast.runs.config import RunConfig
from holdfast.supervise import error_file
from holdfast.train import loop_checks, stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one worker is to run, in which environment, and where it leaves its traces."""

    config: RunConfig
    environment: Mapping[str, str]
    supervisor: int
    progress: Progress
    stdout: Path
    stderr: Path
    error: Path


def main(task: Task) -> NoReturn:
    """Run the task in this process, which was forked for it."""
    _die_with(task.supervisor)
    _resolve()
    task.progress.set_up()
    _print_to(task.stdout, task.stderr)
    os.environ.update(task.environment)
    progress.adopt(task.progress)
    config.adopt(task.config)  # not from the run's folder: what becomes of a file there is no matter of ours
    lock.keep_from_children()
    _listen()
    _be_fresh()
    loop_checks.watch()
    sys.exit(_run(task))


def _die_with(supervisor: int) -> None:
    """Be killed by the kernel when the supervisor dies, however it dies; and lead a group that can be killed as one."""
    process.die_with_parent()
    if os.getppid() != supervisor:
        os._exit(1)  # it died before we could ask
    os.setpgid(0, 0)


def _resolve() -> None:
    """Take the lock of the C library's resolver once.

    The thread that keeps the workers' store in the supervisor holds it for a moment whenever somebody connects. A fork
    in that moment takes it along held, with nobody to release it, and we would wait for it when we connect (glibc frees
    most of its locks in a fork, and not this one). Here the supervisor sees it, and forks again.
    """
    if init := getattr(ctypes.CDLL(None), "__res_init", None):
        init()


def _print_to(stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        file = _opened(path)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(WorkerOutput(number)), line_buffering=True) for number in (1, 2)
    )
    faulthandler.enable()


def _opened(path: Path) -> int:
    """The file to print to; one that cannot be had does not keep a worker from its work."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


class WorkerOutput(io.FileIO):
    """Where a worker prints: what a full disk refuses is lost, and no reason for a script to fail.

    Python writes whole lines there at once: a worker may be killed at any time, and what it said before is wanted.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _listen() -> None:
    """SIGTERM asks for a last save. Ctrl-C reaches the supervisor, which passes it on as SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: process.requested.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.SIGNALS)


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
    script, me = task.config.script, os.getpid()
    stopping.tell(lambda error: error_file.leave(task.error, task.progress, error, script))
    sys.argv = [script, *task.config.args]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = _status(end, task) if os.getpid() == me else int(end.code not in (None, 0))
    except BaseException as error:
        if os.getpid() != me:
            traceback.print_exc()
            _leave_at_once(1)
        error_file.leave(task.error, task.progress, error, script)
        _leave_at_once(1)
    if os.getpid() != me:  # a process that the script has forked has no part in the run
        _leave_at_once(status)
    _leave_in_order(status, task.progress)
    return status


def _status(end: SystemExit, task: Task) -> int:
    """The status that a script's `sys.exit` asks for; a failure it chose itself is recorded like one it raised."""
    status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    if status not in process.IN_ORDER:
        message = end.code if isinstance(end.code, str) else f"exited with status {status}"
        why = SystemExit(message).with_traceback(end.__traceback__)
        error_file.leave(task.error, task.progress, why, task.config.script)
    return status


def _leave_at_once(status: int) -> NoReturn:
    """Peers wait for us in a collective: closing our connections is how they learn of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_in_order(status: int, memory: Progress) -> None:
    """What an interpreter does at its end, and a forked child would leave out."""
    if status in process.IN_ORDER and not memory.is_in_its_loop:
        memory.end(status)
    ranks.leave()
    # The interpreter's own: before it waits for threads, it tells idle pools to end, which would wait for ever.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
