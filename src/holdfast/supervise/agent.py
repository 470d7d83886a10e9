"""Torch's elastic agent with warm workers: processes forked from this one, which has imported torch already.

Torch's `SimpleElasticAgent` meets the other nodes and gives out the ranks; what it leaves open is how workers are
started, watched and stopped, and that is here. (Its `LocalElasticAgent` stops workers with SIGTERM and up to 30 s of
patience; to ours SIGTERM means to save, and after a failure they have nothing left to say.)
"""

import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from holdfast.ddp.config import RunConfig
from holdfast.ddp.membership import Membership
from holdfast.ddp.preemption import IN_ORDER, held_back
from holdfast.ddp.world import JOINS
from holdfast.errors import WorkerLost
from holdfast.progress import Phase, Progress
from holdfast.supervise import errorfile, worker
from holdfast.supervise.casualty import Death
from holdfast.supervise.environment import as_torchrun, of_holdfast
from holdfast.supervise.processes import is_stopped, processor_seconds
from holdfast.supervise.rendezvous import Rendezvous
from holdfast.supervise.stuck import Elsewhere, Judge, Seen
from holdfast.supervise.worker import Task

LOOK = 0.25
REAPED_WITHIN = 60.0
STACKS_WITHIN = 2.0
SUSPECTED = 0.5  # seconds: a worker that dies is seen long before
NO_CORE = 1  # bytes: the kernel takes 0 for no limit where a program receives core dumps


class WarmAgent(SimpleElasticAgent):
    """Starts, watches and stops the workers of one node."""

    def __init__(self, config: RunConfig, out: Path, nodes: Rendezvous) -> None:
        spec = WorkerSpec(
            role="trainer",
            local_world_size=config.workers,
            rdzv_handler=nodes,
            entrypoint=worker.main,
            max_restarts=config.max_restarts,
        )
        super().__init__(spec)
        self._config, self._out, self._nodes = config, out, nodes
        self._running: list[Running] = []
        self._judge = Judge(config.stuck_after, config.hang_after)
        self._looked = self._regrouped = 0.0
        self._membership = 0  # the number of the last one that was published
        self._members: tuple[int, ...] = ()
        self._told: set[int] = set()  # those that were let in and have yet to come
        self.elsewhere = Elsewhere()
        worker.pools()

    def launch(self, workers: int) -> None:
        """Meet the other nodes and start this many workers here."""
        self._worker_group.spec.local_world_size = self._nodes.workers = workers
        self._initialize_workers(self._worker_group)

    def look(self) -> WorkerState:
        """Whether the workers are all well, one has failed, or all have ended in order."""
        state = self._monitor_workers(self._worker_group).state
        self._worker_group.state = state
        return state

    def tell(self, number: signal.Signals) -> None:
        """Send every worker a signal."""
        for each in self._running:
            each.tell(number)

    def deaths(self) -> list[Death]:
        """How each worker stands: those that have ended, with what they raised, and those that have not."""
        return [each.death(self._judge.idle(each.rank), self._out) for each in self._running]

    def survivors(self) -> tuple[int, ...]:
        """The workers that could go on without those that have failed; none if one of them cannot."""
        if any(each.task.progress.has_fallen_back for each in self._running):
            return ()
        left = [each for each in self._running if not (each.has_fallen or each.joins)]
        return tuple(each.rank for each in left) if all(each.goes_on for each in left) else ()

    def reached(self) -> int:
        """The furthest step that any worker has begun."""
        return max((each.task.progress.step or 0 for each in self._running), default=0)

    def bury(self) -> list[Death]:
        """Kill those that have failed and still run, leave all of them behind, and say how they ended."""
        fallen = [each for each in self._running if each.has_fallen]
        deaths = [each.death(self._judge.idle(each.rank), self._out) for each in fallen]
        for each in fallen:
            each.kill()
        self._wait_for(fallen)
        self._running = [each for each in self._running if each not in fallen]
        return deaths

    def go_on_without(self, ranks: list[int]) -> None:
        """Tell the others to go on together; the replacements of the lost join later, except where all wait for them."""
        if self._config.recovery != "replay":
            self.regroup()
        self._replace(ranks)

    def regroup(self) -> None:
        """Tell the workers that are left to go on together."""
        self._regrouped = time.monotonic()
        self._told = set()
        if self._config.recovery == "replay" and self.let_in():
            return
        self._membership += 1
        self._members = tuple(sorted(each.rank for each in self._running if not each.joins))
        self._publish()

    def _publish(self, joining: tuple[int, ...] = ()) -> None:
        self._nodes.publish(Membership(self._membership, self._members, joining))

    def let_in(self) -> bool:
        """Let those join that are ready, if all others have found together; whether there were any."""
        members = [each for each in self._running if not each.joins]
        ready = tuple(each.rank for each in self._running if each.joins and each.is_ready)
        if not ready or set(ready) <= self._told:
            return False
        if self._config.recovery == "replay":  # the others wait for them
            if len(members) + len(ready) < len(self._running):
                return False
        elif any(each.task.progress.membership != self._membership for each in members):
            return False
        self._told = set(ready)
        self._membership += 1
        self._members = tuple(sorted({*(each.rank for each in members), *ready}))
        self._publish(joining=ready)
        return True

    def _replace(self, ranks: list[int]) -> None:
        """Start workers in the place of lost ones: they join once they are ready."""
        with held_back(), _forking_allowed():
            for each in self._worker_group.workers:
                if each.global_rank in ranks:
                    self._running.append(Running(each, self._task(each, self._worker_group, joins=True)))

    def waits(self) -> bool:
        """Whether workers have waited for a membership for some time, and nobody was lost: a connection broke."""
        told = [each.task.progress for each in self._running]
        seeks = any(each.phase is Phase.RECOVERING and each.suspected == self._membership for each in told)
        if not seeks or any(each.joins and not each.is_ready for each in self._running):
            self._regrouped = time.monotonic()
        return seeks and time.monotonic() - self._regrouped > SUSPECTED

    def here(self) -> Elsewhere:
        """How far the workers of this node are, for the other nodes."""
        seen = self._seen()
        places = [each.place for each in seen if each.phase is not Phase.ENDED]
        return Elsewhere(min(places, default=None), sum(each.moved for each in seen))

    def end(self, *, stacks: bool = False) -> None:
        """Kill the workers that are left, with all they have started; if asked, the stacks of their threads first."""
        if stacks:
            self._print_stacks()
        self._stop_workers(self._worker_group)

    def _print_stacks(self) -> None:
        """Every worker's threads, into its log: of several that wait for each other, one stack alone tells little."""
        for each in self._running:
            each.abort()
        deadline = time.monotonic() + STACKS_WITHIN
        while any(each.exit is None for each in self._running) and time.monotonic() < deadline:
            time.sleep(0.01)

    def exits(self) -> list[int | None]:
        """The exit status of every worker; nothing for those that run."""
        return [each.exit for each in self._running]

    def printed(self) -> list[tuple[Path, Path]]:
        """Where every worker's stdout and stderr go."""
        return [(each.task.stdout, each.task.stderr) for each in self._running]

    def _assign_worker_ranks(self, _: Any, seat: int, __: int, ___: WorkerSpec) -> list[Worker]:
        """Number the workers node by node: how many each has, the nodes have told each other as they met."""
        workers = self._nodes.meeting.workers if self._nodes.meeting else ()
        first, world = sum(workers[:seat]), sum(workers)
        return [Worker(i, first + i, first + i, world, world) for i in range(workers[seat])]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._running = []
        self._membership = 0
        self._told = set()
        self._judge.begin()
        self.elsewhere = Elsewhere()
        try:
            with held_back(), _forking_allowed():
                for each in worker_group.workers:
                    self._running.append(Running(each, self._task(each, worker_group)))
        except OSError as error:
            raise WorkerLost(f"cannot start a worker: {error.strerror or error}. Run fewer at once.") from error
        return {each.worker.local_rank: each.pid for each in self._running}

    def _task(self, member: Worker, group: WorkerGroup, *, joins: bool = False) -> Task:
        meeting = self._nodes.meeting
        if meeting is None:
            raise AssertionError("workers start after a meeting")
        logs = self._out / "logs" / f"attempt-{meeting.attempt:04d}"
        name = f"rank-{member.global_rank}"
        error = logs / f"{name}.error.json"
        with suppress(OSError):  # a worker works without a log, too
            logs.mkdir(parents=True, exist_ok=True)
            error.unlink(missing_ok=True)
        extra = {JOINS: "1"} if joins else {}
        return Task(
            config=self._config,
            environment=as_torchrun(member, group) | of_holdfast(self._out, meeting, error) | extra,
            supervisor=os.getpid(),
            progress=Progress(),
            stdout=logs / f"{name}.out",
            stderr=logs / f"{name}.err",
            error=error,
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_for_stuck(time.monotonic())
        exits = self.exits()
        if any(each.hung for each in self._running):
            return RunResult(state=WorkerState.FAILED)
        if any(status is not None and status not in IN_ORDER for status in exits):
            return RunResult(state=WorkerState.FAILED)
        over = all(status is not None for status in exits)
        return RunResult(state=WorkerState.SUCCEEDED if over else WorkerState.HEALTHY)

    def _look_for_stuck(self, now: float) -> None:
        if now - self._looked < LOOK:
            return
        self._looked = now
        workers = {each.rank: each for each in self._running if each.exit is None}
        seen = self._seen()

        def processor(rank: int) -> float | None:
            return processor_seconds(workers[rank].pid)

        if stuck := self._judge.look(seen, now, processor, self.elsewhere):
            workers[stuck.rank].hung = stuck.because
        for each in seen:
            if each.phase is Phase.ENDED and self._judge.overdue(each, processor):
                workers[each.rank].kill()  # it counts as done: its script has ended

    def _seen(self) -> list[Seen]:
        return [each.seen() for each in self._running if each.exit is None]

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, *_: Any, **__: Any) -> None:
        for each in self._running:
            each.kill()
        self._wait_for(self._running)

    def _wait_for(self, killed: "list[Running]") -> None:
        deadline = time.monotonic() + REAPED_WITHIN
        while any(each.exit is None for each in killed):
            if time.monotonic() > deadline:
                stuck = ", ".join(str(each.pid) for each in killed if each.exit is None)
                raise WorkerLost(
                    f"killed workers do not end (pid {stuck}): the kernel holds them. Restart the machine."
                )
            time.sleep(0.002)


class Running:
    """One worker process, from its fork to the end of everything it started."""

    def __init__(self, member: Worker, task: Task) -> None:
        self.worker, self.task, self.hung = member, task, ""
        self.rank: int = member.global_rank
        self._status: int | None = None
        # The name is what scripts and libraries look for when they ask whether they are the main process.
        self._process: ForkProcess = multiprocessing.get_context("fork").Process(
            target=worker.main, args=(task,), name="MainProcess"
        )
        self._process.start()
        self.pid = int(self._process.pid or 0)
        with suppress(OSError):  # it does the same: whichever comes first
            os.setpgid(self.pid, self.pid)

    @property
    def exit(self) -> int | None:
        """Its exit status, minus the signal that killed it; nothing while it runs.

        A worker whose script had ended has done what it was to do: what meets it on the way out changes nothing.
        """
        # Not by its sentinel: that is a pipe, and everything the worker has forked keeps it open.
        if self._status is None and self._has_ended():
            told, status = self.task.progress, self._process.exitcode
            self._status = told.status if told.phase is Phase.ENDED and told.status is not None else status
        return self._status

    @property
    def joins(self) -> bool:
        """Whether it is on its way to take the place of a lost one."""
        return JOINS in self.task.environment and not self.task.progress.membership

    @property
    def is_ready(self) -> bool:
        """Whether it can be let in."""
        return self.task.progress.phase is Phase.JOINING

    @property
    def has_fallen(self) -> bool:
        """Whether it has failed: it ended out of order, or is stuck."""
        return bool(self.hung) or (self.exit is not None and self.exit not in IN_ORDER)

    @property
    def goes_on(self) -> bool:
        """Whether it is where the loss of a peer can be survived: in its loop, not before and not after it."""
        return self.exit is None and self.task.progress.phase in (Phase.TRAINING, Phase.SAVING, Phase.RECOVERING)

    def _has_ended(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # multiprocessing collects the dead when it starts another
            return True
        if ended and (ended.si_code != os.CLD_EXITED or ended.si_status not in IN_ORDER):
            self._kill_group()  # before we collect it: until then no other process can have its number
        return ended is not None

    def seen(self) -> Seen:
        """How far it is."""
        told = self.task.progress
        return Seen(
            rank=self.rank,
            boundaries=told.boundaries,
            posted=told.posted,
            moved=told.moved,
            phase=told.phase,
            stopped=is_stopped(self.pid),
        )

    def tell(self, number: signal.Signals) -> None:
        if self.exit is None:
            os.kill(self.pid, number)

    def abort(self) -> None:
        """Let it print the stacks of its threads, if it runs, which is the end of it."""
        if self.exit is None:
            with suppress(OSError):  # gone meanwhile
                resource.prlimit(self.pid, resource.RLIMIT_CORE, (NO_CORE, NO_CORE))
                os.kill(self.pid, signal.SIGABRT)
                os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker, if it runs, and all that it started."""
        if self.exit is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def death(self, idle: float, out: Path) -> Death:
        """How it ended, or that it has not, for how long it had come no further."""
        told = self.task.progress
        return Death(
            rank=self.rank,
            local_rank=self.worker.local_rank,
            exit=self.exit,
            hung=self.hung,
            raised=errorfile.read(self.task.error, told),
            step=told.step,
            place=(told.boundaries, told.posted),
            idle=idle,
            log=str(self.task.stderr.relative_to(out)),
        )


@contextmanager
def _forking_allowed() -> Iterator[None]:
    """Python warns of a fork beside threads. Ours serve the store, hold no lock of Python's, and workers need none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
