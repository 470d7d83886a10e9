"""The worker processes of one node: starting, watching and killing them.

Workers are forked from the supervisor, which has imported torch already, so a restart does not wait for imports.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.distributed.ranks import JOINS, NODE, TERM
from holdfast.errors import WorkerLost
from holdfast.process import IN_ORDER, held_back
from holdfast.progress import IN_RESERVE, Phase, Progress
from holdfast.runs.config import RunConfig
from holdfast.runs.logs import LOG_FOLDER, STANDBY
from holdfast.supervise.error_record import read_error
from holdfast.supervise.failure_cause import WorkerExit
from holdfast.supervise.hang_detection import HangDetector, RemoteProgress, WorkerLook
from holdfast.supervise.nodes.rendezvous import RoundInfo, interface
from holdfast.supervise.workers import entry
from holdfast.supervise.workers.entry import Task
from holdfast.supervise.workers.process import WorkerProcess, cpu_seconds, innermost_call

REAPED_WITHIN = 60.0
STACKS_WITHIN = 5.0
FIRST_STEP = 60.0  # seconds without a first step after which the user is told
_DOING = {
    Phase.STARTING: "runs the script, which has not come to its training loop",
    Phase.RESTORING: "restores the newest snapshot",
    Phase.TRAINING: "is about to begin its first step",
    Phase.SAVING: "saves the first state",
    Phase.JOINING: "waits to join the others",
    Phase.RECOVERING: "recovers from a loss",
}
STACKS_SOON = 1.0  # where other workers wait: it takes some hundredths of a second unless the machine is overloaded


class WorkerPool:
    """The worker processes of this node, from one start of all workers to the next."""

    def __init__(self, config: RunConfig, out: Path) -> None:
        self._config, self._out = config, out
        self.running: list[WorkerProcess] = []
        self._forked: list[WorkerProcess] = []  # since `starting` began
        self._leaving: list[WorkerProcess] = []  # lost workers of which something may be left
        self.hangs = HangDetector(config.hang_timeout, live=config.recovery != "restart")
        self._looked = self._began = 0.0
        self._reports_start = True
        self._stack = os.memfd_create("holdfast-stack")  # one file for all workers, which are asked one after another
        self.has_script_collectives = False  # the script calls torch.distributed itself: every loss needs a restart
        entry.thread_pools()  # before any fork

    def begin_attempt(self) -> None:
        """Forget the workers of the last start, which have exited."""
        self.has_script_collectives |= any(
            worker.task.progress.has_exchanged for worker in [*self.running, *self._leaving]
        )
        self.running = []
        self._began, self._reports_start = time.monotonic(), True
        self.hangs.begin()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Return a context manager for calls of `start`. At the end of the `with` block, wait until the processes run."""
        try:
            with held_back(), warnings.catch_warnings():
                # Python warns of forks beside threads. Ours serve the store, hold no Python lock, and workers need none.
                warnings.simplefilter("ignore", DeprecationWarning)
                yield
                for worker in self._forked:
                    worker.wait_until_up()
                self._forked = []
        except OSError as error:
            raise WorkerLost(f"cannot start a worker: {error.strerror or error}. Run fewer at once.") from error

    def start(
        self,
        round: RoundInfo,
        *,
        local_rank: int,
        seat: int,
        joins: bool = False,
        rank: int | None = None,
        is_standby: bool = False,
    ) -> WorkerProcess:
        """Fork a worker process with the unique number `seat`, which is also its rank unless `joins`.

        If `joins` is True, the worker begins to train later, with the given `rank` (None for a spare). A standby worker
        waits for the next start of all workers."""
        name = f"worker-{seat}" if joins else f"rank-{seat}"
        logs = self._out / LOG_FOLDER.format(round.attempt)
        error = logs / f"{name}.error.json"
        with suppress(OSError):  # a worker works without a log, too
            logs.mkdir(parents=True, exist_ok=True)
            error.unlink(missing_ok=True)
            (logs / STANDBY).touch() if is_standby else (logs / STANDBY).unlink(missing_ok=True)
        progress = Progress()
        progress.is_standby = is_standby
        environment = self._environment(round, local_rank, seat if rank is None else rank, error)
        if joins:
            progress.membership = IN_RESERVE
            if rank is not None:
                progress.assigned = rank
            environment[JOINS] = str(seat)
        task = Task(
            config=self._config,
            environment=environment,
            supervisor=os.getpid(),
            progress=progress,
            stdout=logs / f"{name}.out",
            stderr=logs / f"{name}.err",
            error=error,
            stack=self._stack,
        )
        worker = WorkerProcess(task, seat=seat, rank=seat, local_rank=local_rank)
        self._forked.append(worker)
        if not is_standby:
            self.running.append(worker)
        return worker

    def _environment(self, round: RoundInfo, local_rank: int, rank: int, error: Path) -> dict[str, str]:
        variables: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": round.world_size,
            "LOCAL_WORLD_SIZE": len(round.ranks),
            "GROUP_RANK": round.index,
            "GROUP_WORLD_SIZE": len(round.nodes),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": round.world_size,
            "ROLE_NAME": "trainer",
            "MASTER_ADDR": round.store[0],
            "MASTER_PORT": round.store[1],
            "TORCHELASTIC_RUN_ID": "holdfast",
            "TORCHELASTIC_MAX_RESTARTS": self._config.max_restarts,
            "TORCHELASTIC_RESTART_COUNT": round.attempt - 1,
            "TORCHELASTIC_ERROR_FILE": error,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # the supervisor keeps the store, so no worker has to
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "HOLDFAST_OUT": self._out,
            "HOLDFAST_ROUND": round.round,
            "HOLDFAST_ATTEMPT": round.attempt,
        }
        if round.term:
            variables |= {TERM: round.term, NODE: round.node}
        # Gloo would listen where the machine's name points to: on every network, or where other nodes cannot reach it.
        if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(round.address)):
            variables["GLOO_SOCKET_IFNAME"] = name
        return {name: str(value) for name, value in variables.items()}

    def late_start(self) -> list[str]:
        """Return messages about what the workers do if none of them has begun a step after a minute; otherwise [].

        The messages are returned only once."""
        if not self._reports_start or time.monotonic() - self._began < FIRST_STEP:
            return []
        self._reports_start = False
        states = [worker.task.progress for worker in self.running]
        if any(state.step is not None or state.is_only_supervised or state.phase not in _DOING for state in states):
            return []
        lines = [f"no worker has reached its first step for {FIRST_STEP:g} s:"]
        for worker in self.running:
            doing = _DOING[worker.task.progress.phase]
            lines.append(
                f"rank {worker.rank} (pid {worker.pid}) {doing}{innermost_call(worker.stack(), self._config.script)}"
            )
        return lines

    def poll(self) -> None:
        for worker in self.running:
            worker.poll()

    def poll_dying(self) -> None:
        """Detect killed workers early during a recovery, before the kernel has removed them entirely."""
        self._leaving = [worker for worker in self._leaving if not worker.is_gone]
        if any(worker.task.progress.phase is Phase.RECOVERING for worker in self.running):
            for worker in self.running:
                worker.poll_dying()

    @property
    def failed(self) -> list[WorkerProcess]:
        """The workers that have failed: they exited with an error, left their training loop early, or hang."""
        return [worker for worker in self.running if worker.has_failed]

    def finish_in_order(self, *, others_are_ending: bool) -> bool:
        """Return True if all workers that train have exited normally. If so, also end the spares.

        A node with only spares waits until workers of other nodes have finished (`others_are_ending`)."""
        exits = [worker.exit for worker in self.running if not worker.is_in_reserve]
        if not exits and not others_are_ending:
            return False
        if all(status in IN_ORDER for status in exits) and not any(worker.left_midway for worker in self.running):
            reserve = [worker for worker in self.running if worker.is_in_reserve]
            self.end(reserve)
            self.running = [worker for worker in self.running if worker not in reserve]
        return not self.failed and all(status is not None for status in exits)

    def looks(self, is_member: Callable[[int], bool]) -> list[WorkerLook]:
        """Return the progress of every running worker; `is_member(seat)` tells whether process number `seat` trains."""
        is_one_done = any(worker.exit in IN_ORDER for worker in self.running)
        return [
            worker.look(is_member(worker.seat), has_done_peers=is_one_done)
            for worker in self.running
            if worker.exit is None
        ]

    def late_to_stop(self, is_member: Callable[[int], bool]) -> list[WorkerProcess]:
        """Return the workers that have made no progress for too long since they were asked to stop.

        `is_member(seat)` tells whether process number `seat` trains."""
        members = (look for look in self.looks(is_member) if look.is_member)  # spares wait for nothing else
        late = {look.seat for look in members if self.hangs.is_late_to_stop(look)}
        return [worker for worker in self.running if worker.seat in late]

    def detect_hangs(self, is_member: Callable[[int], bool], remote: RemoteProgress) -> None:
        """Find workers that hang, and set their attribute `hung`. Kill processes that do not exit after their script.

        `is_member(seat)` tells whether process number `seat` trains. `remote` is the progress of other nodes."""
        now = time.monotonic()
        if now - self._looked < 0.25:
            return
        self._looked = now
        workers = {worker.seat: worker for worker in self.running if worker.exit is None}
        looks = self.looks(is_member)

        def processor(seat: int) -> float | None:
            return cpu_seconds(workers[seat].pid)

        for hang in self.hangs.look(looks, now, processor, remote):
            workers[hang.seat].hung = hang.because
        for look in looks:
            if look.phase is Phase.ENDED and self.hangs.is_overdue(look, processor):
                workers[look.seat].kill()  # it counts as done

    def exit_reports(self) -> list[WorkerExit]:
        self.poll()
        return [worker.exit_report(self.hangs.idle(worker.seat), self._out) for worker in self.running]

    def failure_messages(self) -> list[str]:
        raised = (read_error(worker.task.error, worker.task.progress) for worker in self.failed)
        return [error.message for error in raised if error]

    def log_with_stacks(self, rank: int) -> str:
        """Return the path, relative to the run's folder, of the log with the stacks of `rank`; "" if there is none."""
        return next((report.log for report in self.exit_reports() if report.rank == rank), "")

    def remove_failed(self) -> list[tuple[int, WorkerExit]]:
        """Kill and remove the workers that have failed; return the process number and exit report of each."""
        failed = self.failed
        self._print_stacks([worker for worker in failed if worker.hung], STACKS_SOON)
        reports = [(w.seat, w.exit_report(self.hangs.idle(w.seat), self._out)) for w in failed]
        for worker in failed:
            worker.kill()
        self._wait_for(failed, lambda worker: worker.exit is not None)
        for worker in failed:
            worker.append_error_to_log()
        self.running = [worker for worker in self.running if worker not in failed]
        self._leaving += failed
        if failed:
            self.hangs.reset_idle()  # the others may have waited for these
        return reports

    def kill(self, *, stacks: bool = False) -> None:
        """Kill all workers and their child processes. If `stacks`, the workers first print the stacks of their threads."""
        if stacks:
            self._print_stacks(self.running, STACKS_WITHIN)
        self.end([*self.running, *self._leaving])

    def end(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            worker.kill()
        self._wait_for(workers, lambda worker: worker.is_gone)

    def _print_stacks(self, workers: Sequence[WorkerProcess], within: float) -> None:
        for worker in workers:
            worker.abort()
        deadline = time.monotonic() + within
        while any(worker.exit is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
            self.poll()

    def _wait_for(self, killed: Sequence[WorkerProcess], has_ended: Callable[[WorkerProcess], bool]) -> None:
        deadline = time.monotonic() + REAPED_WITHIN
        while not all(map(has_ended, killed)):
            for worker in killed:
                worker.poll_dying()
            if time.monotonic() > deadline:
                pids = ", ".join(str(worker.pid) for worker in killed if not has_ended(worker))
                raise WorkerLost(f"killed workers do not end (pid {pids}): the kernel holds them. Restart the machine.")
            time.sleep(0.002)

    @property
    def reached(self) -> int:
        return max((worker.task.progress.step or 0 for worker in self.running), default=0)


def output_files(workers: Sequence[WorkerProcess]) -> list[tuple[Path, Path]]:
    return [(worker.task.stdout, worker.task.stderr) for worker in workers]
