"""Fewer workers train, or more again, once somebody asks for it while a run goes on: the others sleep meanwhile."""

import time
from pathlib import Path

from holdfast.distributed.script_collectives import SCRIPT_COLLECTIVES
from holdfast.events import Scale
from holdfast.supervise.display import View
from holdfast.supervise.journal import Journal
from holdfast.supervise.scale_request import Wishes
from holdfast.supervise.verdict import count
from holdfast.supervise.workers.agent import WarmAgent

LOOK = 0.1  # seconds between two looks for a wish


class Scaling:
    """How many of the workers of this node are wished for, and whether as many train."""

    def __init__(self, out: Path, workers: int, agent: WarmAgent, record: Journal, view: View) -> None:
        self._wishes, self._workers = Wishes(out), workers
        self._agent, self._record, self._view = agent, record, view
        self._looked = 0.0
        self._wanted: tuple[int, float] | None = None  # how many are wished for, and since when

    def heed(self, attempt: int) -> None:
        """Put workers to sleep, or wake them, if somebody asks for it; and say so once it is done."""
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._looked = now
            if (workers := self._wishes.new()) is not None and 1 <= workers <= self._workers:
                self._scale(workers, now)
        if self._wanted and (found := self._agent.scaled()):
            (workers, began), self._wanted = self._wanted, None
            self._record.note(Scale(attempt, workers, found.number, time.monotonic() - began))
            asleep = self._workers - workers
            self._view.say(f"{count(workers, 'worker')} of {self._workers} train, {asleep} sleep")

    def _scale(self, workers: int, now: float) -> None:
        if self._agent.exchanges:
            self._view.say(f"no worker can be put to sleep, and all train: {SCRIPT_COLLECTIVES}", style="yellow")
            return
        self._agent.scale(workers)
        self._wanted = (workers, now)
