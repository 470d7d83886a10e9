"""Detect members that are lost because they no longer answer heartbeats.

The caller sends the heartbeats and provides the time. Ray reports a killed process at once, but not a process that
hangs, and a machine that is cut off only after 15 s or more. A process without its raylet still answers small calls for
a while, so a member that is asked also checks its raylet.
"""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

INTERVAL = 0.25  # seconds between an answer and the next question
DEADLINE = 1.25  # seconds for an answer
AT_FIRST = 30.0  # seconds for an answer until `settle`: a task may compile code when it first runs


class FailureDetector(Generic[Member]):
    """A heartbeat failure detector: for each member (monitored process), it stores the last heartbeat and answer."""

    def __init__(self, interval: float = INTERVAL, deadline: float = DEADLINE, at_first: float = AT_FIRST) -> None:
        self._interval, self._deadline, self._at_first = interval, deadline, at_first
        self._asked: dict[Member, float | None] = {}  # the time of the heartbeat that a member has not answered yet
        self._heard: dict[Member, float] = {}
        self._settled: set[Member] = set()
        self._looked: float | None = None

    def watch(self, member: Member, now: float) -> None:
        self._asked[member], self._heard[member] = None, now

    def forget(self, member: Member) -> None:
        self._asked.pop(member, None)
        self._heard.pop(member, None)
        self._settled.discard(member)

    def settle(self, member: Member) -> None:
        """End the longer deadline that `member` had as a new process; from now on the normal deadline holds."""
        if member in self._heard:
            self._settled.add(member)

    def due(self, now: float) -> list[Member]:
        """Return the members to which a heartbeat should be sent at time `now`."""
        return [m for m, asked in self._asked.items() if asked is None and now >= self._heard[m] + self._interval]

    def asked(self, member: Member, now: float) -> None:
        if member in self._asked:
            self._asked[member] = now

    def heard(self, member: Member, now: float) -> None:
        if member in self._asked:
            self._asked[member], self._heard[member] = None, now

    def silent(self, now: float) -> dict[Member, str]:
        """Return the members that did not answer a heartbeat in time, with the reasons.

        Time in which the calling process itself was suspended does not count."""
        gap = 0.0 if self._looked is None else now - self._looked - self._interval
        self._looked = now
        if gap > 0:
            self._asked = {member: asked if asked is None else asked + gap for member, asked in self._asked.items()}
        late = {}
        for member, asked in self._asked.items():
            allowed = self._deadline if member in self._settled else self._at_first
            if asked is not None and now - asked > allowed:
                late[member] = f"it did not answer within {allowed:g} s"
        return late


RAYLET = "RAY_RAYLET_PID"  # set by Ray in every process that it starts


def raylet_lives() -> bool:
    """Return True unless the raylet of this process (Ray's daemon on this machine) has exited or is stopped."""
    pid = os.environ.get(RAYLET)
    if pid is None or not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "TtZX"
