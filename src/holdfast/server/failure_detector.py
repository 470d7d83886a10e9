"""Who has not been heard of for too long. Pure: the caller brings the time, asks members whether they live, and tells.

Ray tells of a killed process within milliseconds. It says nothing of one that hangs, and of a machine that is cut off
only after a quarter of a minute or more: so every member is asked again and again, and must answer within a deadline.

Whether the machine's part of Ray that a process depends on still runs.

A process whose raylet was stopped or killed goes on answering small calls for a while, and cannot send or receive
anything large. So a member that is asked whether it lives looks at its raylet too.
"""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

INTERVAL = 0.25  # seconds between an answer and the next question
DEADLINE = 1.25  # seconds for an answer
AT_FIRST = 30.0  # as long as a member has yet to do each of its tasks once, which may mean to compile it


class Detector(Generic[Member]):
    """When each member was last asked and heard."""

    def __init__(self, interval: float = INTERVAL, deadline: float = DEADLINE, at_first: float = AT_FIRST) -> None:
        self._interval, self._deadline, self._at_first = interval, deadline, at_first
        self._asked: dict[Member, float | None] = {}  # when it was asked what it has not answered yet
        self._heard: dict[Member, float] = {}
        self._settled: set[Member] = set()
        self._looked: float | None = None

    def watch(self, member: Member, now: float) -> None:
        """Expect answers of a member from now on."""
        self._asked[member], self._heard[member] = None, now

    def forget(self, member: Member) -> None:
        """Expect nothing of it any more."""
        self._asked.pop(member, None)
        self._heard.pop(member, None)
        self._settled.discard(member)

    def settle(self, member: Member) -> None:
        """It has done all of its tasks once: from now on it has no reason to be slow."""
        if member in self._heard:
            self._settled.add(member)

    def due(self, now: float) -> list[Member]:
        """Those that are to be asked now: each is asked once at a time."""
        return [m for m, asked in self._asked.items() if asked is None and now >= self._heard[m] + self._interval]

    def asked(self, member: Member, now: float) -> None:
        """It was asked just now."""
        if member in self._asked:
            self._asked[member] = now

    def heard(self, member: Member, now: float) -> None:
        """It has answered."""
        if member in self._asked:
            self._asked[member], self._heard[member] = None, now

    def silent(self, now: float) -> dict[Member, str]:
        """Those whose deadline has passed, and a word on it; to be asked often, after `heard` was told of all answers.

        If nobody looked for a while, because we ourselves were stopped, members get that while in addition.
        """
        gap = 0.0 if self._looked is None else now - self._looked - self._interval
        self._looked = now
        if gap > 0:
            self._asked = {member: asked if asked is None else asked + gap for member, asked in self._asked.items()}
        late = {}
        for member, asked in self._asked.items():
            if asked is not None and now - asked > (allowed := self._allowed(member)):
                late[member] = f"it did not answer within {allowed:g} s"
        return late

    def _allowed(self, member: Member) -> float:
        return self._deadline if member in self._settled else self._at_first


RAYLET = "RAY_RAYLET_PID"  # set by Ray in every process that it starts


def raylet_lives() -> bool:
    """Whether our raylet runs and is not stopped; yes where that cannot be seen."""
    pid = os.environ.get(RAYLET)
    if pid is None or not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "TtZX"
