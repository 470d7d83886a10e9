"""Which worker failed first, and of what. Pure: how the workers of a group ended comes in, the casualty comes out.

When one worker fails, its peers fail with it: their collectives end in connection errors. Those are its consequence,
and the casualty is whoever has a cause of its own.
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.supervise.errorfile import Raised

Kind = Literal["exit", "signal", "hang", "error", "peer"]

# What gloo, NCCL and the store say when the process at the other end is gone; none of them has a type for it.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|closed by (remote )?peer|reset by peer|broken pipe"
    r"|socket timeout|timed out waiting|pair closure|remote process exited|communicator was aborted"
    r"|ncclRemoteError|ncclSystemError|DistNetworkError|DistStoreError|failed to recv",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How one worker ended: its exit status (minus the signal), nothing while it runs, and what it raised."""

    rank: int
    local_rank: int
    exit: int | None
    hung: bool = False
    raised: Raised | None = None


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

    @property
    def line(self) -> str:
        """Who failed, and of what."""
        if self.rank < 0:  # it was on another node, which tells more
            return self.message
        if self.kind != "error":
            return f"rank {self.rank} {self.message}"
        return f"rank {self.rank} raised {self.message}" if self.traceback else f"rank {self.rank}: {self.message}"

    @property
    def is_of_the_script(self) -> bool:
        """Whether the script chose to end: doing the same again would end the same."""
        return self.kind == "error"


def casualty(deaths: Sequence[Death]) -> Casualty:
    """Whoever of these has a cause of its own; the earliest of several that raised."""
    first = min(
        deaths, key=lambda death: (_ORDER.index(_cause(death)), death.raised.time if death.raised else math.inf)
    )
    cause = _cause(first)
    return Casualty(
        kind="signal" if cause == "abort" else cause,
        rank=first.rank,
        local_rank=first.local_rank,
        exit=first.exit,
        signal=_signal_name(first.exit),
        message=_message(first, cause),
        traceback=first.raised.traceback if first.raised else "",
    )


# An abort is what C++ makes of an exception that nobody caught, such as a lost connection: mostly a consequence.
_ORDER = ("hang", "signal", "error", "exit", "abort", "peer")
_Cause = Literal["exit", "signal", "hang", "error", "peer", "abort"]


def _cause(death: Death) -> _Cause:
    if death.hung:
        return "hang"
    if death.raised:
        return "peer" if _LOST_PEER.search(death.raised.message) else "error"
    if death.exit is None:
        return "peer"  # it waits for another
    if death.exit < 0:
        return "abort" if death.exit == -signal.SIGABRT else "signal"
    return "exit"


def _message(death: Death, cause: _Cause) -> str:
    if cause == "hang":
        return "gave no sign of life"
    if death.raised:
        text = " ".join(death.raised.message.split())
        return f"lost a peer ({text[:100]})" if cause == "peer" else text
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
