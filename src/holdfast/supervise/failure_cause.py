"""The first failure of a group of workers and its cause, and the record of a worker's exception.

When one worker fails, its peers fail with it: their collectives end in connection errors. The worker that failed first
has another cause, or is the worker that its peers waited for in vain. An exception is recorded as JSON in the format of
torch's `record`: in a file, and in memory shared with the supervisor, because the disk may have failed.
"""

import json
import math
import re
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import HoldfastError, InitialWeightsLost, StateCorrupted, StorageFailed, WorkerLost
from holdfast.finding import counted
from holdfast.progress import WORDS, Progress
from holdfast.supervise.verdict import Word

_MISTAKES = ("NameError", "UnboundLocalError", "SyntaxError", "IndentationError")
Kind = Literal["exit", "signal", "hang", "error", "storage", "peer", "return", "corruption"]
Origin = Literal["script", "refused", "storage", "peer", "overwritten", "corruption"]
"""The source of an error: the script, a refusal by holdfast (which a restart would repeat), storage, a lost peer,
damaged snapshots that have overwritten the initial weights of a sharded model, or a wrong state."""

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


@dataclass(frozen=True, slots=True)
class RaisedException:
    """An exception that a worker raised, its kind of error (`origin`), and its file and line (`place`)."""

    message: str  # type and text, as one line
    traceback: str  # empty for errors of holdfast itself and for `sys.exit` with a text
    time: float
    origin: Origin = "script"
    place: str = ""
    culprit: int | None = None  # the rank whose state is wrong, if that is known


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


def write_error(path: Path, memory: Progress, error: BaseException, script: str) -> None:
    """Record an exception of `script` in shared `memory`, and also in the file `path` if the disk accepts it."""
    record = _error_record(error, script)
    with suppress(OSError):
        path.write_text(json.dumps(record))
    memory.leave_words(_shortened(record))


def read_error(path: Path, memory: Progress) -> RaisedException | None:
    """Return the exception recorded in the file `path`, or else in shared `memory`; None if there is none."""
    with suppress(OSError, ValueError):
        if raised := _parse_error(path.read_text()):
            return raised
    return _parse_error(memory.last_words)


def _error_record(error: BaseException, script: str) -> dict[str, Any]:
    is_self_explanatory = isinstance(error, HoldfastError | SystemExit)
    message = str(error) if is_self_explanatory else f"{type(error).__name__}: {error}"
    message += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != script:  # the frames that run the script
        trace = trace.tb_next
    cut, now = error.with_traceback(trace), time.time()
    extra = {
        "py_callstack": "" if is_self_explanatory else "".join(traceback.format_exception(cut)),
        "timestamp": str(int(now)),  # torch writes whole seconds
        "time": now,
        "origin": _origin(error),
        "culprit": error.rank if isinstance(error, StateCorrupted) else None,
        "place": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
    }
    return {"message": {"message": message, "extraInfo": extra}}


def _shortened(record: dict[str, Any]) -> str:
    message, extra = record["message"], record["message"]["extraInfo"]
    room = WORDS
    while len(text := json.dumps(record)) > WORDS:
        room //= 2
        message["message"], extra["py_callstack"] = message["message"][:room], extra["py_callstack"][-room:]
    return text


def _parse_error(text: str) -> RaisedException | None:
    try:
        message = json.loads(text)["message"]
        extra = message["extraInfo"]
        moment = float(extra.get("time", extra["timestamp"]))
        name = extra.get("origin", "script")
        origin: Origin = name if name in ("refused", "storage", "peer", "overwritten", "corruption") else "script"
        culprit = extra.get("culprit") if origin == "corruption" else None
        place = str(extra.get("place", ""))
        return RaisedException(str(message["message"]), str(extra["py_callstack"]), moment, origin, place, culprit)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _origin(error: BaseException) -> Origin:
    if isinstance(error, InitialWeightsLost):
        return "overwritten"
    if isinstance(error, StorageFailed):
        return "storage"
    if isinstance(error, StateCorrupted):
        return "corruption"
    if isinstance(error, WorkerLost):
        return "peer"
    return "refused" if isinstance(error, HoldfastError) else "script"


class RestartPolicy:
    """A policy that decides whether a run is restarted: at most `limit` times until there is a newer snapshot.

    An error that comes again at the same step is a bug, and ends the run. The restart after damaged snapshots have
    overwritten the initial weights of a sharded model is not counted, unless the one before was such a restart, too."""

    def __init__(self, limit: int, newest: int | None) -> None:
        self.limit = limit
        self._used = 0
        self._was_overwritten = False  # True if the last failure was that of damaged snapshots
        self._best = newest or 0  # a snapshot of the first state, step 0, is not progress
        self._errors: set[tuple[str, str, int | None]] = set()
        self._mistakes: set[tuple[str, str, int | None]] = set()  # which no progress excuses

    def left(self, newest: int | None) -> int:
        """Return the number of restarts left: all of them if `newest`, the step of the newest snapshot, has grown."""
        return self.limit - (0 if (newest or 0) > self._best else self._used)

    def after(self, failure: FirstFailure, newest: int | None) -> tuple[Word, str] | None:
        """Return (verdict, reason) if `failure` ends the run, otherwise count the restart and return None.

        `newest` is the step of the newest snapshot."""
        if newest is not None and newest > self._best:
            passed = {error for error in self._errors - self._mistakes if error[2] is None or error[2] < newest}
            self._used, self._best, self._errors = 0, newest, self._errors - passed
        was_overwritten, self._was_overwritten = self._was_overwritten, failure.origin == "overwritten"
        if self._was_overwritten and not was_overwritten:
            return None
        if failure.is_error and failure.origin == "refused":
            return "refused", failure.line
        if failure.is_error and failure.error in self._errors:
            where = "before the first step" if failure.step is None else f"at step {failure.step}"
            return "script-error", f"{failure.line}; it came again {where}, so another restart would not help"
        if failure.is_error:
            self._errors.add(failure.error)
        if failure.is_mistake:
            self._mistakes.add(failure.error)
        if self._used >= self.limit:
            limit = f"no more than {counted(self.limit, 'restart')} without progress (--max-restarts)"
            advice = "; this is a limit of the machine, not an error of the script" if failure.is_system_limit else ""
            return "gave-up", f"{failure.line}{advice}; {limit}"
        self._used += 1
        return None
