"""Reports slow workers and nodes to the user and the history. `--replace-slow` ends slow workers: a spare takes over."""

import time
from collections.abc import Mapping

from holdfast.events import Straggler
from holdfast.supervise.display import Display, Journal
from holdfast.supervise.slow_nodes import NodeSteps, SlowNodes, latest_steps
from holdfast.supervise.stragglers import SlowSteps, StragglerDetector
from holdfast.supervise.workers.pool import WorkerPool
from holdfast.supervise.workers.process import WorkerProcess

LOOK = 0.1  # seconds between two looks


class StragglerReports:
    """The supervisor's watch over the speed of its workers, and on the node that decides for all, of the other nodes.

    `replace_from` is the ratio from which a slow worker is replaced, or None to replace none."""

    def __init__(self, pool: WorkerPool, journal: Journal, display: Display, replace_from: float | None) -> None:
        self._pool, self._journal, self._display = pool, journal, display
        self._replace_from = replace_from
        self._detector, self._nodes = StragglerDetector(), SlowNodes()
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
        members = self._members
        self._ranks |= {seat: worker.rank for seat, worker in members.items()}
        own_times = {seat: worker.task.progress.own_time for seat, worker in members.items()}
        for slow in self._detector.look(own_times, self._reached):
            self._report_rank(slow)
            if not slow.is_over and self._is_replaced(slow):
                self._replace(members[slow.seat], slow)

    def latest_steps(self) -> NodeSteps | None:
        """Return the own times of the latest steps of this node, to compare it with other nodes."""
        return latest_steps([worker.task.progress.own_time for worker in self._members.values()], self._reached)

    def look_at_nodes(self, latest: Mapping[int, NodeSteps]) -> None:
        """Compare the latest steps of all nodes, and report each slow node when it becomes slow, and later on."""
        for slow in self._nodes.look(latest):
            self._report_node(slow)

    def end(self) -> None:
        """Report for how long the workers and nodes that were slow at last were slow, because all workers have ended."""
        for slow in self._detector.end():
            self._report_rank(slow)
        for slow in self._nodes.end():
            self._report_node(slow)

    @property
    def _members(self) -> dict[int, WorkerProcess]:
        return {w.seat: w for w in self._pool.running if not (w.is_in_reserve or w.has_failed)}

    @property
    def _reached(self) -> int:
        return min((worker.task.progress.step or 0 for worker in self._members.values()), default=0)

    def _report_rank(self, slow: SlowSteps) -> None:
        self._report(slow, "workers", rank=self._ranks[slow.seat])

    def _report_node(self, slow: SlowSteps) -> None:
        self._report(slow, "nodes", node=slow.seat)

    def _report(self, slow: SlowSteps, others: str, rank: int | None = None, node: int | None = None) -> None:
        times = round(slow.ratio, 3), round(slow.seconds, 3)
        straggler = Straggler(self._attempt, rank, slow.since, slow.until, *times, node)
        self._journal.append(straggler)
        if not slow.is_over:
            self._display.say(
                f"{straggler.name} is {slow.ratio:.1f} times as slow as the other {others} since step {slow.since}; they "
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
