"""Standby workers: the workers of the next attempt of a run that recovers by restart, started early (`--spares 1`).

They run the script as far as `run.protect` and wait there, with their models built. Until they take over, they only use
the run's folder for their logs. Their attempt has a store of its own, so they exchange no messages with the workers
that train.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from holdfast import process
from holdfast.finding import counted
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.runs.logs import LOG_FOLDER, STANDBY
from holdfast.supervise.failure_cause import first_failure
from holdfast.supervise.nodes.rendezvous import Rendezvous
from holdfast.supervise.workers.pool import WorkerPool
from holdfast.supervise.workers.process import WorkerProcess

TRIES = 3  # sets of standby workers that are started in one attempt
FIRST_STEP = 2  # boundaries that a worker has passed after its first step


class Standby:
    """Standby workers, which are started early and wait for the next restart. `say` shows a message to the user."""

    def __init__(
        self, config: RunConfig, out: Path, pool: WorkerPool, nodes: Rendezvous, say: Callable[[str], None]
    ) -> None:
        self._config, self._out, self._pool, self._nodes, self._say = config, out, pool, nodes, say
        self._workers: list[WorkerProcess] = []
        self._lost = 0  # sets in this attempt
        self._is_announced = False

    def update(self, restarts: int) -> None:
        """Start standby workers once all workers have trained a step. End them when training has ended.

        Also replace standby workers that have died. `restarts` is the number of restarts so far."""
        running = self._pool.running
        if any(worker.has_finished for worker in running):
            self.end()
            return
        self._replace_dead()
        has_trained = all(worker.task.progress.boundaries >= FIRST_STEP for worker in running)
        if not self._workers and has_trained and self._lost < TRIES:
            self._start(self._config.workers_at(restarts + 1))
        if not self._is_announced and self._is_ready:
            self._is_announced = True
            self._say(f"{counted(len(self._workers), 'standby worker')} ready to take over")

    def take_over(self) -> list[WorkerProcess]:
        """Let the standby workers begin to train, and return them. If any is not ready, end all of them and return []."""
        for worker in self._workers:
            worker.poll()
        if self._workers and not self._is_ready:
            self._say("the standby workers are not ready, so new workers start")
            self.end()
        workers, self._workers = self._workers, []
        self._lost, self._is_announced = 0, False
        if workers:
            (self._logs / STANDBY).unlink(missing_ok=True)
        for worker in workers:
            process.regain_priority(worker.pid)
            worker.task.progress.is_standby = False
        return workers

    def end(self) -> None:
        """Kill the standby workers, and remove their logs."""
        if self._workers:
            self._pool.end(self._workers)
            shutil.rmtree(self._logs, ignore_errors=True)
        self._workers, self._nodes.prepared, self._is_announced = [], None, False

    @property
    def _logs(self) -> Path:
        return self._out / LOG_FOLDER.format(self._nodes.next_attempt)

    @property
    def _is_ready(self) -> bool:
        phases = {worker.task.progress.phase if worker.exit is None else None for worker in self._workers}
        return phases == {Phase.JOINING}

    def _start(self, count: int) -> None:
        round = self._nodes.prepare(count)
        with self._pool.starting():
            self._workers = [
                self._pool.start(round, local_rank=rank, seat=rank, is_standby=True) for rank in range(count)
            ]

    def _replace_dead(self) -> None:
        for worker in self._workers:
            worker.poll()
        dead = [worker.exit_report(0.0, self._out) for worker in self._workers if worker.exit is not None]
        if not dead:
            return
        self._lost += 1
        then = "others are started" if self._lost < TRIES else f"this attempt goes on without, after {TRIES} losses"
        self._say(f"standby workers were lost ({first_failure(dead).line_with_pid}): {then}")
        self.end()
