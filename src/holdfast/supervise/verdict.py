"""How a run ends. Pure."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast.events import Judged, Launch, Restart, What
from holdfast.history.tail import Finish
from holdfast.process import PREEMPTED

Word = Literal["completed", "gave-up", "preempted", "refused", "script-error"]
_EXIT_CODES: dict[Word, int] = {
    "completed": 0,
    "gave-up": 1,
    "preempted": PREEMPTED,
    "refused": 2,
    "script-error": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """How a run ended, after how many attempts in the life of its folder, and why."""

    verdict: Word
    attempts: int
    because: str

    @property
    def exit_code(self) -> int:
        """What a command that ends like this returns: 0 completed, 75 preempted, 2 refused, 1 failed."""
        return _EXIT_CODES[self.verdict]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        return f"{self.verdict} after {count(self.attempts, 'attempt')}: {self.because}"

    def to_text(self) -> str:
        """For the other nodes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "RunVerdict":
        """Another node's verdict, as ours."""
        told = json.loads(text)
        return cls(verdict=told["verdict"], attempts=told["attempts"], because=told["because"])


def done_before(end: Finish, newest: int | None) -> RunVerdict:
    """The verdict on a run that had come to its end before, and of which this is the newest snapshot."""
    because = f"this run is done, {end}: nothing was started (--extend trains it for longer)"
    if (newest or 0) < end.step:
        left = "none is left" if newest is None else f"the newest that is left is of step {newest}"
        because += f"; its last snapshot is gone, {left}"
    return RunVerdict(verdict="completed", attempts=end.attempt, because=because)


def done_elsewhere(attempts: int, because: str) -> RunVerdict:
    """The verdict on a run that other nodes have completed, as they say."""
    return RunVerdict(
        verdict="completed", attempts=attempts, because=f"this run is done, {because}: nothing was started"
    )


def completion(told: Iterable[What]) -> Judged | None:
    """By what supervisors told: the verdict on the newest attempt, if one of them says that it was completed."""
    newest, found = 0, None
    for what in told:
        match what:
            case Launch(attempt=number) | Restart(attempt=number):
                newest = max(newest, number)
            case Judged(verdict="completed") if found is None or what.attempts > found.attempts:
                found = what
    return found if found and found.attempts >= newest else None


def count(number: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
