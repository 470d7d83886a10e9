"""Tells the user what the workers do if none of them reaches its first step for a minute."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.progress import Phase
from holdfast.supervise.workers.process import WorkerProcess

FIRST_STEP = 60.0  # seconds without a first step after which the user is told
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_DOING = {
    Phase.STARTING: "runs the script, which has not come to its training loop",
    Phase.RESTORING: "restores the newest snapshot",
    Phase.TRAINING: "is about to begin its first step",
    Phase.SAVING: "saves the first state",
    Phase.JOINING: "waits to join the others",
    Phase.RECOVERING: "recovers from a loss",
}


class StartWatch:
    """A watch over one attempt (start of all workers), which began at time `now`; it reports at most once."""

    def __init__(self, script: str, now: float) -> None:
        self._script, self._began, self._is_over = script, now, False

    def report(self, workers: Sequence[WorkerProcess], now: float) -> list[str]:
        """Return lines that say what each worker does, if a minute has passed without a first step; otherwise none."""
        if self._is_over or now - self._began < FIRST_STEP:
            return []
        self._is_over = True
        states = [worker.task.progress for worker in workers]
        if any(state.step is not None or state.is_only_supervised or state.phase not in _DOING for state in states):
            return []
        return [f"no worker has reached its first step for {FIRST_STEP:g} s:", *map(self._line, workers)]

    def _line(self, worker: WorkerProcess) -> str:
        doing = _DOING[worker.task.progress.phase]
        return f"rank {worker.rank} {doing}{where(worker.stack(), self._script)}"


def where(stack: str, script: str) -> str:
    """Return text that names the innermost line of `script` in a stack that faulthandler printed, and the call in it."""
    frames = list(_frames(stack))
    own = next((frame for frame in frames if frame[0] == script), None)
    if not frames:
        return ""
    inner = frames[0]
    place = f"{inner[2]} in {Path(inner[0]).name}:{inner[1]}"
    if own is None:
        return f" ({place})"
    return f" ({Path(own[0]).name}:{own[1]}" + (")" if own == inner else f", which called {place})")


def _frames(stack: str) -> Iterator[tuple[str, int, str]]:
    for match in _FRAME.finditer(stack):
        yield match[1], int(match[2]), match[3]
