"""The verdict on a run: how it ended, and why. No I/O."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast.events import Judged, Launch, Restart, What
from holdfast.finding import counted
from holdfast.history.tail import Finish
from holdfast.process import PREEMPTED

Word = Literal["completed", "gave-up", "preempted", "refused", "script-error"]
_EXIT_CODES: dict[Word, int] = {"completed": 0, "gave-up": 1, "preempted": PREEMPTED, "refused": 2, "script-error": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """The outcome of a run (`verdict`), the reason (`because`), and the number of attempts (starts of all workers)."""

    verdict: Word
    attempts: int
    because: str

    @property
    def exit_code(self) -> int:
        """The exit status of `holdfast run`, apart from the audit.

        It is 0 if the run completed, 75 if it was preempted, 2 if holdfast refused it (bad input, or a script that would
        not train exactly), and 1 if it failed. If the run completed, but its audit failed, `holdfast run` exits with 3."""
        return _EXIT_CODES[self.verdict]

    @property
    def line(self) -> str:
        return f"{self.verdict} after {counted(self.attempts, 'attempt')}: {self.because}"

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "RunVerdict":
        return cls(**json.loads(text))


def done_before(end: Finish, newest: int | None) -> RunVerdict:
    """Return the verdict for a run that had ended before this command; `newest` is the step of its newest snapshot."""
    because = f"this run is done, {end}: nothing was started (--extend trains it for longer)"
    if (newest or 0) < end.step:
        left = "none is left" if newest is None else f"the newest that is left is of step {newest}"
        because += f"; its last snapshot is gone, {left}"
    return RunVerdict(verdict="completed", attempts=end.attempt, because=because)


def done_elsewhere(attempts: int, because: str) -> RunVerdict:
    """Return the verdict for a run that other nodes have completed; `because` is their explanation."""
    return RunVerdict(
        verdict="completed", attempts=attempts, because=f"this run is done, {because}: nothing was started"
    )


def completion(events: Iterable[What]) -> Judged | None:
    """Return the last `completed` verdict in `events`; None if there is none, or if workers were started after it."""
    newest, verdict = 0, None
    for event in events:
        match event:
            case Launch(attempt=number) | Restart(attempt=number):
                newest = max(newest, number)
            case Judged(verdict="completed") if verdict is None or event.attempts > verdict.attempts:
                verdict = event
    return verdict if verdict and verdict.attempts >= newest else None
