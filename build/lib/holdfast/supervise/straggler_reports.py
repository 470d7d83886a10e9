"""Reports slow workers to the user and the history, and with `--replace-slow` ends them, so that a spare takes over."""

import time

from holdfast.events import Straggler
from holdfast.supervise.display import Display, Journal
from holdfast.supervise.stragglers import SlowSteps, StragglerDetector
from holdfast.supervise.workers.pool import WorkerPool
from holdfast.supervise.workers.process import WorkerProcess

LOOK = 0.1  # seconds between two looks


class StragglerReports:
    """The supervisor's watch over the speed of its workers.

    `replace_from` is the ratio from which a slow worker is replaced, or None to replace none."""

    def __init__(self, pool: WorkerPool, journal: Journal, display: Display, replace_from: float | None) -> None:
        self._pool, self._journal, self._display = pool, journal, display
        self._replace_from = replace_from
        self._detector = StragglerDetector()
        self._looked = 0.0
        self._attempt = 0
        self._ranks: dict[int, int] = {}  # by process number
        self._replaced: set[int] = set()  # ranks; if a replacement is slow too, the cause is not the process

    def look(self, attempt: int) -> None:
        """Compare the latest steps of the workers, and report each slow one when it becomes slow, and later on."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        if attempt != self._attempt:
            self.end()
            self._attempt, self._replaced = attempt, set()
        members = {w.seat: w for w in self._pool.running if not (w.is_in_reserve or w.has_failed)}
        self._ranks |= {seat: worker.rank for seat, worker in members.items()}
        progress = {seat: worker.task.progress for seat, worker in members.items()}
        reached = min((memory.step or 0 for memory in progress.values()), default=0)
        for slow in self._detector.look({seat: memory.own_time for seat, memory in progress.items()}, reached):
            self._report(slow)
            if not slow.is_over and self._is_replaced(slow):
                self._replace(members[slow.seat], slow)

    def end(self) -> None:
        """Report for how long the workers that were slow at last were slow, because all workers have ended."""
        for slow in self._detector.end():
            self._report(slow)

    def _report(self, slow: SlowSteps) -> None:
        rank = self._ranks[slow.seat]
        place = self._attempt, rank, slow.since, slow.until
        self._journal.append(Straggler(*place, round(slow.ratio, 3), round(slow.seconds, 3)))
        if not slow.is_over:
            self._display.say(
                f"rank {rank} is {slow.ratio:.1f} times as slow as the other workers since step {slow.since}; they "
                f"have waited {slow.seconds:.1f} s for it",
                style="yellow",
            )

    def _is_replaced(self, slow: SlowSteps) -> bool:
        has_spare = any(worker.is_in_reserve and worker.is_ready for worker in self._pool.running)
        is_slow = self._replace_from is not None and slow.ratio >= self._replace_from
        return is_slow and has_spare and self._ranks[slow.seat] not in self._replaced

    def _replace(self, worker: WorkerProcess, slow: SlowSteps) -> None:
        self._replaced.add(worker.rank)
        worker.hung = (
            f"was {slow.ratio:.1f} times as slow as the other workers since step {slow.since} (limit "
            f"{self._replace_from:g}, from --replace-slow): a spare replaces it"
        )
