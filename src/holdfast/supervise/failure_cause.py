"""The first failure of a group of workers, and its cause.

When one worker fails, its peers fail with it: their collectives end in connection errors. The worker that failed first
has another cause, or is the worker that its peers waited for in vain.
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.supervise.error_record import Origin, RaisedException

_MISTAKES = ("NameError", "UnboundLocalError", "SyntaxError", "IndentationError")
Kind = Literal["exit", "signal", "hang", "error", "storage", "peer", "return", "corruption"]

# Texts of gloo, NCCL and the store when the process at the other end is gone; none of them has a type for it.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|closed by (remote )?peer|reset by peer|broken pipe"
    r"|socket timeout|timed out waiting|pair closure|remote process exited|communicator was aborted"
    r"|ncclRemoteError|ncclSystemError|DistNetworkError|DistStoreError|failed to recv",
    re.IGNORECASE,
)
_WAITED = re.compile(r"time(d )?out", re.IGNORECASE)  # as opposed to a connection that broke
# Text of torch when a loader process is killed: like the kill of a worker, it need not be the script's fault.
_LOST_LOADER = re.compile(r"DataLoader worker.*(killed by signal|exited unexpectedly)", re.DOTALL)
# Texts of the operating system and of libraries when a limit of the machine is reached.
_SYSTEM_LIMIT = re.compile(
    r"too many open files|cannot allocate memory|can't start new thread|resource temporarily unavailable"
    r"|no space left on device|disk quota exceeded|^MemoryError",
    re.IGNORECASE,
)
_VARYING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
_EXITED = re.compile(r"exited with status \d+")
_MIDWAY = "in the middle of its loop"
STILL = 1.0  # seconds without progress after which peers wait for a worker; before, it may be about to fail, too


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The exit of one worker, or its state if it still runs (`exit` is None)."""

    rank: int
    local_rank: int
    exit: int | None
    midway: bool = False  # it exited with 0 before its training loop ended
    hung: str = ""  # the reason why it counts as hung
    raised: RaisedException | None = None
    step: int | None = None
    place: tuple[int, int] = (0, 0)  # steps finished, and collectives begun since
    idle: float = 0.0
    log: str = ""  # its stderr file
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The failure of one worker that caused all other failures; `place` is the file and line of an exception."""

    kind: Kind
    rank: int
    local_rank: int
    exit: int | None
    signal: str | None
    message: str
    traceback: str = ""
    step: int | None = None
    origin: Origin = "script"
    place: str = ""
    pid: int | None = None

    @property
    def line(self) -> str:
        return self._line(f"rank {self.rank}")

    @property
    def worker(self) -> str:
        return f"rank {self.rank} (pid {self.pid})" if self.pid else f"rank {self.rank}"

    @property
    def line_with_pid(self) -> str:
        return self._line(self.worker)

    def _line(self, worker: str) -> str:
        if self.rank < 0 or self.kind == "corruption":  # another node reports more; a corruption names its ranks
            return self.message
        if self.kind not in ("error", "storage"):
            return f"{worker} {self.message}"
        return f"{worker} raised {self.message}" if self.traceback else f"{worker}: {self.message}"

    @property
    def is_error(self) -> bool:
        """True if the script raised an error or exited within its training loop; False if a process was killed."""
        if self.kind == "exit":
            return _MIDWAY in self.message
        return self.kind == "error" and not (_LOST_LOADER.search(self.message) or self.is_system_limit)

    @property
    def is_system_limit(self) -> bool:
        """True if a worker reached a limit of its machine, such as open files or memory."""
        return self.kind == "error" and bool(_SYSTEM_LIMIT.search(self.message))

    def with_stacks(self, log: str) -> "FirstFailure":
        """Return a copy of this failure. Its message adds that the stacks of the worker's threads are in the file `log`."""
        return replace(self, message=f"{self.message}; {_STACKS}{log}") if log else self

    @property
    def is_mistake(self) -> bool:
        """True if the error is always a bug in the script, such as an undefined name."""
        return self.is_error and self.message.startswith(_MISTAKES)

    @property
    def error(self) -> tuple[str, str, int | None]:
        """A key that is equal for two occurrences of the same error: (message without numbers, file and line, step).

        The step is None for an error that is always a bug, such as an undefined name."""
        text = self.message if _EXITED.fullmatch(self.message) else _VARYING.sub("#", self.message)
        return text, self.place, None if self.is_mistake else self.step


def first_failure(exits: Sequence[WorkerExit]) -> FirstFailure:
    """Return the failure that caused all other failures. If several workers raised exceptions, it is the earliest."""
    if corrupted := next(
        (worker.raised for worker in exits if worker.raised and worker.raised.origin == "corruption"), None
    ):
        return _corruption(corrupted, exits)
    causes = {worker.rank: _cause(worker) for worker in exits} | dict.fromkeys(_awaited(exits), "hang")

    def order(worker: WorkerExit) -> tuple[int, float, int]:
        return _ORDER.index(causes[worker.rank]), _moment(worker), worker.rank

    first = min(exits, key=order)
    return _failure_of(first, causes[first.rank])


def surrender(exits: Sequence[WorkerExit]) -> FirstFailure | None:
    """Return the failure of the first worker that could not recover from the loss of another and said why, if any."""
    gave_up = [worker for worker in exits if worker.raised and worker.raised.origin == "peer"]
    return _failure_of(min(gave_up, key=_moment), "peer") if gave_up else None


def _moment(worker: WorkerExit) -> float:
    return worker.raised.time if worker.raised else math.inf


def _failure_of(first: WorkerExit, cause: "_Cause") -> FirstFailure:
    return FirstFailure(
        kind="signal" if cause == "abort" else cause,
        rank=first.rank,
        local_rank=first.local_rank,
        exit=first.exit,
        signal=_signal_name(first.exit),
        message=_message(first, cause),
        traceback=first.raised.traceback if first.raised else "",
        step=first.step,
        origin=first.raised.origin if first.raised else "script",
        place=first.raised.place if first.raised else "",
        pid=first.pid,
    )


def _corruption(raised: RaisedException, exits: Sequence[WorkerExit]) -> FirstFailure:
    """Return the failure of the rank whose state is wrong, whichever rank reported it; rank -1 if that is not known."""
    wrong = next((worker for worker in exits if worker.rank == raised.culprit), None)
    return FirstFailure(
        kind="corruption",
        rank=-1 if raised.culprit is None else raised.culprit,
        local_rank=wrong.local_rank if wrong else -1,
        exit=None,
        signal=None,
        message=raised.message,
        step=wrong.step if wrong else None,
        origin="corruption",
        pid=wrong.pid if wrong else None,
    )


def lost_peer(message: str, rank: int = -1) -> FirstFailure:
    """Return the failure of a worker on another node. Only its `message` is known, and perhaps its `rank`."""
    return FirstFailure(kind="peer", rank=rank, local_rank=-1, exit=None, signal=None, message=message)


def returned_node(message: str) -> FirstFailure:
    """Return the reason of a restart for nodes that come back; it is recorded like a failure."""
    return FirstFailure(kind="return", rank=-1, local_rank=-1, exit=None, signal=None, message=message)


_STACKS = "the stacks of its threads are in "
# C++ aborts on an exception that is not caught, such as a lost connection: mostly a consequence.
_ORDER = ("hang", "signal", "storage", "error", "exit", "abort", "peer")
_Cause = Literal["exit", "signal", "hang", "error", "storage", "peer", "abort"]


def _cause(worker: WorkerExit) -> _Cause:
    if worker.hung and not worker.raised:  # a worker that raised and then did not end has said why
        return "hang"
    if worker.raised:
        if worker.raised.origin in ("storage", "overwritten"):
            return "storage"
        if worker.raised.origin == "peer":
            return "peer"
        return "peer" if _LOST_PEER.search(worker.raised.message) else "error"
    if worker.exit is None:
        return "peer"  # it waits for another one
    if worker.exit < 0:
        return "abort" if worker.exit == -signal.SIGABRT else "signal"
    return "exit"


def _awaited(exits: Sequence[WorkerExit]) -> list[int]:
    """Return the ranks that did not take part in a collective, so that every other rank timed out waiting for them."""
    gave_up = [
        worker
        for worker in exits  # NCCL's watchdog gives up by SIGABRT
        if (_WAITED.search(worker.raised.message) if worker.raised else worker.exit == -signal.SIGABRT)
    ]
    if not gave_up or any(_cause(worker) not in ("peer", "abort") for worker in exits):
        return []
    first = min(worker.place for worker in gave_up)
    running = [worker for worker in exits if worker.exit is None and not worker.raised]
    return [worker.rank for worker in running if worker.place < first and worker.idle >= STILL]


def _message(worker: WorkerExit, cause: _Cause) -> str:
    if cause == "hang":
        why = worker.hung or f"made no progress for {worker.idle:.0f} s, and its peers gave up waiting for it"
        return f"{why}; {_STACKS}{worker.log}" if worker.log else why
    if worker.raised:
        text = " ".join(worker.raised.message.split())
        if worker.raised.origin == "peer":
            return f"cannot continue: {text}"
        return _lost_peer(text) if cause == "peer" else text
    if worker.midway:
        return (
            f"exited with status {worker.exit} {_MIDWAY}, at step {worker.step} (to end a run early, call run.stop() and let "
            "the loop end by itself, without break, return or exit)"
        )
    if name := _signal_name(worker.exit):
        return f"was killed by {name}"
    return f"exited with status {worker.exit}" if worker.exit is not None else "lost a peer"


def _lost_peer(text: str) -> str:
    """Return `text`, the error of a library about a broken connection, in a few words; the whole text is in the log."""
    words = found.group() if (found := _LOST_PEER.search(text)) else ""
    return f"lost a peer: {words.lower() if ' ' in words else words}"


def _signal_name(status: int | None) -> str | None:
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
