"""The entry point of a worker process: runs the user's script as if Python had started it.

For the script, the process (arguments, import path, signals, threads, exit handlers) is as torchrun would start it,
except that torch is already imported.
"""

import atexit
import ctypes
import faulthandler
import gc
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
from holdfast.supervise.error_record import write_error
from holdfast.supervise.preload import module_file
from holdfast.train import guards

SHOW_STACK = signal.SIGRTMIN + 9  # the worker writes the stack of its main thread, and continues; no script uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that a new worker process needs: settings, environment variables, and its output files."""

    config: RunConfig
    environment: Mapping[str, str]
    supervisor: int
    progress: Progress
    stdout: Path
    stderr: Path
    error: Path
    stack: int  # the descriptor of a file in memory, to which SHOW_STACK makes the worker write its stack


def main(task: Task) -> NoReturn:
    gc.freeze()  # objects of the supervisor are not finalized here: a store of torch would wait for a thread of its own
    die_with(task.supervisor)
    _take_resolver_lock()
    process.set_title(
        f"hf-standby-{task.environment['RANK']}" if task.progress.is_standby else f"hf-{task.stdout.stem}"
    )
    if task.progress.is_standby:
        process.lower_priority()
    task.progress.is_up = True
    _redirect_output(task.stdout, task.stderr, task.stack)
    os.environ.update(task.environment)
    progress.adopt(task.progress)
    config.adopt(task.config)  # not read from the run's folder, whose files may change
    lock.keep_from_children()
    signal.signal(signal.SIGTERM, lambda *_: process.requested.set())  # it requests a last save
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the supervisor sends SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.SIGNALS)
    _undo_inheritance()
    guards.watch_for_own_loop()
    sys.exit(_run(task))


def die_with(supervisor: int) -> None:
    """Make the kernel kill this process when the process with id `supervisor` dies; start a new process group."""
    process.die_with_parent()
    if os.getppid() != supervisor:
        os._exit(1)  # the supervisor died before the request
    os.setpgid(0, 0)


def _take_resolver_lock() -> None:
    """Take and release the C library's resolver lock. If the lock was held during the fork, this worker blocks here.

    The supervisor then forks the worker again. The supervisor's own threads hold the lock briefly when a worker
    connects to its store."""
    if init := getattr(ctypes.CDLL(None), "__res_init", None):
        init()


def _redirect_output(stdout: Path, stderr: Path, stack: int) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # a missing log does not keep a worker from its work
            file = os.open(os.devnull, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(WorkerOutput(number)), line_buffering=True) for number in (1, 2)
    )
    faulthandler.enable()
    faulthandler.register(SHOW_STACK, file=stack, all_threads=False)


class WorkerOutput(io.FileIO):
    """An output stream of a worker that ignores write errors, so that a full disk does not stop the script."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _undo_inheritance() -> None:
    """Reset the exit handlers, numpy's random state and the thread counts that were inherited by the fork."""
    atexit._clear()
    np.random.seed()
    # Like torchrun: several workers on one machine take one thread each, unless the user says otherwise.
    if int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))
        thread_pools().limit(limits=int(threads))  # of loaded libraries; others read the variable


@cache
def thread_pools() -> ThreadpoolController:
    return ThreadpoolController()


def _run(task: Task) -> int:
    pid, config = os.getpid(), task.config
    sys.argv = [config.script, *config.args]
    sys.path.insert(0, str(config.import_folder))
    try:
        if config.module:
            runpy.run_module(config.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(config.script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = _exit_status(end, task) if os.getpid() == pid else int(end.code not in (None, 0))
    except BaseException as error:
        if os.getpid() != pid:
            traceback.print_exc()
            _exit_at_once(1)
        write_error(task.error, task.progress, error, _file(config))
        _exit_at_once(1)
    if os.getpid() != pid:  # a process that the script has forked takes no part in the run
        _exit_at_once(status)
    # What an interpreter does at its end, and a forked child would leave out.
    if status in process.IN_ORDER and not task.progress.is_in_its_loop:
        task.progress.end(status)
    ranks.leave()
    # The interpreter's own function: it tells idle thread pools to end before it waits for threads.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _exit_status(end: SystemExit, task: Task) -> int:
    status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    if status not in process.IN_ORDER:
        message = end.code if isinstance(end.code, str) else f"exited with status {status}"
        why = SystemExit(message).with_traceback(end.__traceback__)
        write_error(task.error, task.progress, why, _file(task.config))
    return status


def _file(config: RunConfig) -> str:
    file = module_file(config.script) if config.module else None
    return str(file or config.script)


def _exit_at_once(status: int) -> NoReturn:
    """Exit without exit handlers, so that peers in a collective notice at once that this worker is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
