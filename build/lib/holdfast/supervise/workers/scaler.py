"""Putting workers to sleep and waking them while a run trains, as `holdfast scale` requests it."""

import json
import time
from pathlib import Path

from holdfast.distributed.process_group import SCRIPT_COLLECTIVES
from holdfast.events import Scale
from holdfast.finding import counted
from holdfast.supervise.display import Display, Journal
from holdfast.supervise.scale_request import FILE
from holdfast.supervise.workers.membership_control import MembershipController
from holdfast.supervise.workers.pool import WorkerPool

SCALE_LOOK = 0.1  # seconds between two looks for a scale request


class Scaler:
    """The handler of `holdfast scale` requests in a run on one node; surplus workers are put to sleep."""

    def __init__(self, out: Path, workers: int, journal: Journal, display: Display) -> None:
        self._file, self._workers = out / FILE, workers
        self._file.unlink(missing_ok=True)
        self._changed = 0  # the time of the last request, in nanoseconds
        self._journal, self._display = journal, display
        self._looked = 0.0
        self._pending: float | None = None  # when the request came that is not fulfilled yet
        self.wanted: int | None = None  # the number of workers that should train, once it was requested

    def update(self, controller: MembershipController, pool: WorkerPool, attempt: int) -> None:
        """Put workers to sleep or wake them if the user has requested it. Record an event when the change is complete."""
        now = time.monotonic()
        if now - self._looked >= SCALE_LOOK:
            self._looked = now
            if 1 <= (workers := self._requested()) <= self._workers:
                if not pool.has_script_collectives:
                    controller.members.wanted = self.wanted = workers
                    self._pending = now
                else:
                    line = f"no worker can be put to sleep, and all train: {SCRIPT_COLLECTIVES}"
                    self._display.say(line, style="yellow")
        members = controller.members
        if self._pending is not None and self.wanted and members.is_complete(controller.report().seen):
            self._journal.append(Scale(attempt, self.wanted, members.current.number, time.monotonic() - self._pending))
            self._pending = None
            asleep = self._workers - self.wanted
            self._display.say(f"{counted(self.wanted, 'worker')} of {self._workers} train, {asleep} sleep")

    def _requested(self) -> int:
        """Return the number of workers in a request that came since the last call; 0 if there is none."""
        try:
            before, self._changed = self._changed, self._file.stat().st_mtime_ns
            workers = json.loads(self._file.read_bytes()[:1000])["workers"] if self._changed != before else 0
        except (OSError, ValueError, LookupError, TypeError):
            return 0
        return workers if isinstance(workers, int) else 0
