"""Which worker failed first, and of what. Pure: how the workers of a group ended comes in, the casualty comes out.

When one worker fails, its peers fail with it: their collectives end in connection errors. Those are its consequence,
and the casualty is whoever has a cause of its own; or whoever the others waited for until they gave up.
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.supervise.error_file import Origin, Raised

_MISTAKES = ("NameError", "UnboundLocalError", "SyntaxError", "IndentationError")
Kind = Literal["exit", "signal", "hang", "error", "storage", "peer"]

# What gloo, NCCL and the store say when the process at the other end is gone; none of them has a type for it.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|closed by (remote )?peer|reset by peer|broken pipe"
    r"|socket timeout|timed out waiting|pair closure|remote process exited|communicator was aborted"
    r"|ncclRemoteError|ncclSystemError|DistNetworkError|DistStoreError|failed to recv",
    re.IGNORECASE,
)
_WAITED = re.compile(r"time(d )?out", re.IGNORECASE)  # as against a connection that broke
# What torch says when a process that loads is killed: as when a worker is, it need not be the script's doing.
_LOST_LOADER = re.compile(r"DataLoader worker.*(killed by signal|exited unexpectedly)", re.DOTALL)
_VARYING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
_EXITED = re.compile(r"exited with status \d+")
_MIDWAY = "in the middle of its loop"
STILL = 1.0  # seconds without progress after which a worker is one that others waited for, not one about to fail, too


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How one worker ended: its exit status (minus the signal), nothing while it runs, and what it raised.

    `midway` is whether it ended in order before its loop did, `hung` why it was found stuck, if it was; `place` is how far
    it came, `idle` for how long it came no further, and `log` is where it printed.
    """

    rank: int
    local_rank: int
    exit: int | None
    midway: bool = False
    hung: str = ""
    raised: Raised | None = None
    step: int | None = None
    place: tuple[int, int] = (0, 0)
    idle: float = 0.0
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Casualty:
    """The worker that failed first: its own cause is the cause of all."""

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

    @property
    def line(self) -> str:
        """Who failed, and of what."""
        if self.rank < 0:  # it was on another node, which tells more
            return self.message
        if self.kind not in ("error", "storage"):
            return f"rank {self.rank} {self.message}"
        return f"rank {self.rank} raised {self.message}" if self.traceback else f"rank {self.rank}: {self.message}"

    @property
    def is_an_error(self) -> bool:
        """Whether the script raised it, or left its loop by an exit, and not somebody who killed a process of its."""
        if self.kind == "exit":
            return _MIDWAY in self.message
        return self.kind == "error" and not _LOST_LOADER.search(self.message)

    @property
    def is_a_mistake(self) -> bool:
        """Whether no machine, however broken, raises such an error: it is in the text of the program."""
        return self.is_an_error and self.message.startswith(_MISTAKES)

    @property
    def error(self) -> tuple[str, str, int | None]:
        """What makes two errors the same: their text but for its numbers, the line that raised, and the step.

        A status that a script chose to exit with is no number that varies.
        """
        text = self.message if _EXITED.fullmatch(self.message) else _VARYING.sub("#", self.message)
        return text, self.place, None if self.is_a_mistake else self.step


def casualty(deaths: Sequence[WorkerExit]) -> Casualty:
    """Whoever of these has a cause of its own; the earliest of several that raised."""
    causes = {death.rank: _cause(death) for death in deaths} | dict.fromkeys(_awaited(deaths), "hang")
    first = min(deaths, key=lambda death: (_ORDER.index(causes[death.rank]), _moment(death), death.rank))
    cause = causes[first.rank]
    return Casualty(
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
    )


def lost_peer(message: str, rank: int = -1) -> Casualty:
    """A failure of which this node knows only what is said here: those that were lost were not its own."""
    return Casualty(kind="peer", rank=rank, local_rank=-1, exit=None, signal=None, message=message)


# An abort is what C++ makes of an exception that nobody caught, such as a lost connection: mostly a consequence.
_ORDER = ("hang", "signal", "storage", "error", "exit", "abort", "peer")
_Cause = Literal["exit", "signal", "hang", "error", "storage", "peer", "abort"]


def _cause(death: WorkerExit) -> _Cause:
    if death.hung and not death.raised:  # whoever raised and then did not end has said why
        return "hang"
    if death.raised:
        if death.raised.origin in ("storage", "peer"):
            return death.raised.origin
        return "peer" if _LOST_PEER.search(death.raised.message) else "error"
    if death.exit is None:
        return "peer"  # it waits for another
    if death.exit < 0:
        return "abort" if death.exit == -signal.SIGABRT else "signal"
    return "exit"


def _awaited(deaths: Sequence[WorkerExit]) -> list[int]:
    """Those that still run, and are further behind than all that gave up waiting: it was they who were waited for."""
    gave_up = [death for death in deaths if _gave_up(death)]
    if not gave_up or any(_cause(death) not in ("peer", "abort") for death in deaths):
        return []
    first = min(death.place for death in gave_up)
    running = [death for death in deaths if death.exit is None and not death.raised]
    return [death.rank for death in running if death.place < first and death.idle >= STILL]


def _gave_up(death: WorkerExit) -> bool:
    if death.raised:
        return bool(_WAITED.search(death.raised.message))
    return death.exit == -signal.SIGABRT  # what NCCL's watchdog does


def _moment(death: WorkerExit) -> float:
    return death.raised.time if death.raised else math.inf


def _message(death: WorkerExit, cause: _Cause) -> str:
    if cause == "hang":
        why = death.hung or f"came no further for {death.idle:.0f} s, and its peers gave up waiting for it"
        return f"{why}; the stacks of its threads are in {death.log}" if death.log else why
    if death.raised:
        text = " ".join(death.raised.message.split())
        if death.raised.origin == "peer":
            return f"cannot go on: {text}"
        return f"lost a peer ({text[:100]})" if cause == "peer" else text
    if death.midway:
        return f"exited with status {death.exit} {_MIDWAY}, at step {death.step}"
    if name := _signal_name(death.exit):
        return f"was killed by {name}"
    return f"exited with status {death.exit}" if death.exit is not None else "lost a peer"


def _signal_name(status: int | None) -> str | None:
    if status is None or status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
