"""How a run ends. Pure."""

from dataclasses import dataclass
from typing import Literal

from holdfast.ddp.preemption import PREEMPTED

Word = Literal["completed", "gave-up", "preempted", "refused", "script-error"]
_EXIT_CODES: dict[Word, int] = {
    "completed": 0,
    "gave-up": 1,
    "preempted": PREEMPTED,
    "refused": 2,
    "script-error": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
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


def count(number: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
