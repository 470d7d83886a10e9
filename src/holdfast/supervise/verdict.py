"""How a run ends, and whether a failed one is tried again. Pure."""

from dataclasses import dataclass
from typing import Literal

from holdfast.ddp.preemption import PREEMPTED
from holdfast.supervise.casualty import Casualty

Word = Literal["completed", "gave-up", "preempted", "script-error"]
_EXIT_CODES: dict[Word, int] = {"completed": 0, "gave-up": 1, "preempted": PREEMPTED, "script-error": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a run ended, after how many attempts in the life of its folder, and why."""

    verdict: Word
    attempts: int
    because: str

    @property
    def exit_code(self) -> int:
        """What a command that ends like this returns: 0 completed, 75 preempted, 1 failed."""
        return _EXIT_CODES[self.verdict]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        return f"{self.verdict} after {count(self.attempts, 'attempt')}: {self.because}"


def stop(casualty: Casualty, *, restarts: int, max_restarts: int, progress: bool) -> tuple[Word, str] | None:
    """Why not to try again, or nothing: then try again.

    `progress` is whether a snapshot was committed since the failure before this one. A script that raises will raise
    again, unless it got further: what it met there may have been passing.
    """
    if casualty.is_of_the_script and not progress:
        why = "; it came no further than before, so it would do the same again" if casualty.traceback else ""
        return "script-error", casualty.line + why
    if restarts >= max_restarts:
        return "gave-up", f"{casualty.line}; no more than {count(max_restarts, 'restart')} (--max-restarts)"
    return None


def count(number: int, noun: str) -> str:
    """A number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
