"""Calls a function in a forked child process, with a timeout.

The supervisor accesses checkpoint stores only through such calls. The client of an object store runs threads, which a
process that forks workers must not have, and a network file system may never answer.
"""

import gc
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from holdfast import errors, process
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.events import JSON
from holdfast.supervise.workers import entry


class ChildCall:
    """A call of `function` in a forked child process; `name` is used in error messages."""

    def __init__(self, function: Callable[[], JSON], name: str) -> None:
        self._name = name
        self._reading, writing = os.pipe()
        supervisor = os.getpid()
        with process.held_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork: see `workers/pool.py`
            self._pid = os.fork()
            if self._pid == 0:
                _call(function, writing, supervisor)
        os.close(writing)

    def result(self, within: float) -> JSON:
        """Wait for the result of the call, or raise its error; raise StorageFailed after `within` seconds."""
        text, deadline = b"", time.monotonic() + within
        try:
            while select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (data := os.read(self._reading, 1 << 16)):
                    break
                text += data
            else:
                text = b""  # it is not complete
        finally:
            self._end()
        if not text:
            raise StorageFailed(f"{self._name} did not answer within {within:g} s: see that it can be reached.")
        answer = json.loads(text)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["because"])
        result: JSON = answer["result"]
        return result

    def is_done(self) -> bool:
        """Return True if the call has ended. Its result or error is then discarded: do not call `result` afterwards."""
        done = bool(select.select([self._reading], [], [], 0)[0])  # it writes only when it is done
        if done:
            self._end()
        return done

    def _end(self) -> None:
        os.close(self._reading)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _call(function: Callable[[], JSON], writing: int, supervisor: int) -> NoReturn:
    gc.freeze()  # objects of the parent are not finalized here
    try:
        entry.die_with(supervisor)
        process.outlast()  # signals are meant for the supervisor
        answer: dict[str, JSON]
        try:
            answer = {"result": function()}
        except HoldfastError as error:
            answer = {"error": type(error).__name__, "because": str(error)}
        except Exception as error:
            answer = {"error": "StorageFailed", "because": f"the storage failed: {type(error).__name__}: {error}"}
        with open(writing, "wb") as file:
            file.write(json.dumps(answer).encode())
    finally:
        os._exit(0)
