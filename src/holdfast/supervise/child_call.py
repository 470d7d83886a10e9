"""Does a piece of work in a process of its own, for as long as we are willing to wait.

What a supervisor asks of a store it asks from there: a client of an object store runs threads, which a process that
forks workers must not have, and a network file system may never answer.
"""

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


class Aside:
    """Work under way in a process of its own; it is ended with us, however we end."""

    def __init__(self, work: Callable[[], JSON], whom: str) -> None:
        self._whom = whom
        self._answer, writing = os.pipe()
        self._said = b""
        supervisor = os.getpid()
        with process.held_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork: see `agent.py`
            self._pid = os.fork()
            if self._pid == 0:
                _do(work, writing, supervisor)
        os.close(writing)

    def result(self, within: float) -> JSON:
        """What came of it, or the error that it met; StorageFailed if there is no answer in so many seconds."""
        try:
            self._listen(time.monotonic() + within)
        finally:
            self._end()
        if not self._said:
            raise StorageFailed(f"{self._whom} did not answer within {within:g} s: see that it can be reached.")
        told = json.loads(self._said)
        if "error" in told:
            raise getattr(errors, told["error"])(told["because"])
        result: JSON = told["result"]
        return result

    def is_over(self) -> bool:
        """Whether it has ended; what came of it is then forgotten."""
        over = bool(select.select([self._answer], [], [], 0)[0])  # it answers when it is done, and not before
        if over:
            self._end()
        return over

    def _end(self) -> None:
        os.close(self._answer)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _listen(self, deadline: float) -> None:
        while select.select([self._answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self._answer, 1 << 16)
            self._said += data
            if not data:
                return
        self._said = b""


def _do(work: Callable[[], JSON], writing: int, supervisor: int) -> NoReturn:
    """In the process of its own: work, say what came of it, and end without a trace of the supervisor's own end."""
    try:
        entry._die_with(supervisor)
        process.outlast()  # the signals are meant for the supervisor
        told: dict[str, JSON]
        try:
            told = {"result": work()}
        except HoldfastError as error:
            told = {"error": type(error).__name__, "because": str(error)}
        except Exception as error:
            told = {"error": "StorageFailed", "because": f"the storage failed: {type(error).__name__}: {error}"}
        with open(writing, "wb") as answer:
            answer.write(json.dumps(told).encode())
    finally:
        os._exit(0)
