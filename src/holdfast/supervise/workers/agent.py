"""Torch's elastic agent with warm workers: processes forked from this one, which has imported torch already.

Torch's `SimpleElasticAgent` meets the other nodes and gives out the ranks; what it leaves open is how workers are
started, watched and stopped, and that is here. (Its `LocalElasticAgent` stops workers with SIGTERM and up to 30 s of
patience; to ours SIGTERM means to save, and after a failure they have nothing left to say.)
"""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

from holdfast.distributed.membership import Membership
from holdfast.distributed.ranks import JOINS
from holdfast.errors import WorkerLost
from holdfast.process import IN_ORDER, held_back
from holdfast.progress import IN_RESERVE, Phase, Progress
from holdfast.runs.config import RunConfig
from holdfast.runs.rank_log import RankLog
from holdfast.supervise.failure_cause import WorkerExit
from holdfast.supervise.hang_detection import Judge, RemoteProgress, WorkerLook
from holdfast.supervise.nodes.rendezvous import Rendezvous
from holdfast.supervise.workers import entry
from holdfast.supervise.workers.entry import Task
from holdfast.supervise.workers.environment import as_torchrun, of_holdfast
from holdfast.supervise.workers.members import Members, MembersReport, together
from holdfast.supervise.workers.process import Running, processor_seconds

LOOK = 0.25
REAPED_WITHIN = 60.0
STACKS_WITHIN = 2.0
STACKS_SOON = 1.0  # where others wait: it takes some hundredths of a second, and longer only where a machine is starved
SUSPECTED = 0.5  # seconds: a worker that dies is seen long before


class Stranded(Exception):
    """Members were lost, and the others cannot go on without them."""


class WarmAgent(SimpleElasticAgent):
    """Starts, watches and stops the workers of one node."""

    def __init__(self, config: RunConfig, out: Path, nodes: Rendezvous) -> None:
        spec = WorkerSpec(
            role="trainer",
            local_world_size=config.workers,
            rdzv_handler=nodes,
            entrypoint=entry.main,
            max_restarts=config.max_restarts,
        )
        super().__init__(spec)
        self._config, self._out, self._nodes = config, out, nodes
        self._running: list[Running] = []
        self._leaving: list[Running] = []  # that were lost, and of which something may be left
        self._judge = Judge(config.hang_timeout, live=config.recovery != "restart")
        self._looked = self._regrouped = 0.0
        self._roll = Members(config.recovery, config.workers)
        self._places = RankLog(out, 0)
        self._wanted: int | None = None  # how many are to train, if somebody has asked
        self._joined = 0  # how many were started in this attempt to join the others
        self.exchanges = False  # whether the script exchanges by torch.distributed itself: then a loss is a restart
        self.elsewhere = RemoteProgress()
        self.suspected = False  # that members are lost of which nobody knows
        entry.pools()

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

    def deaths(self) -> list[WorkerExit]:
        """How each worker stands: those that have ended, with what they raised, and those that have not."""
        self._look()
        return [each.death(self._judge.idle(each.seat), self._out) for each in self._running]

    def can_go_on(self) -> bool:
        """Whether others could go on without those that have failed; of other nodes, whoever decides knows that."""
        told = [each.task.progress for each in self._running]
        if self.exchanges or any(each.has_fallen_back or each.has_exchanged for each in told):
            return False
        report = together([self.report(), *(self._nodes.peers.reports() or {}).values()])
        return report.goes_on and (bool(report.inside) or not self._nodes.peers.decides)

    def left(self) -> int:
        """How many members are left on this node."""
        return len(self.report().inside)

    def report(self) -> MembersReport:
        """The workers of this node, but for those that have failed."""
        left = [each for each in self._running if not each.has_fallen]
        return MembersReport(
            tuple(each.present() for each in left),
            self.is_broken(),
            any(each.has_ended for each in left),
            all(each.goes_on for each in left if not each.joins),
        )

    def reached(self) -> int:
        """The furthest step that any worker has begun."""
        return max((each.task.progress.step or 0 for each in self._running), default=0)

    def bury(self) -> tuple[list[WorkerExit], list[WorkerExit]]:
        """Kill those that have failed and still run, leave all of them behind; how members and those in reserve ended."""
        fallen = [each for each in self._running if each.has_fallen]
        deaths = [(each, each.death(self._judge.idle(each.seat), self._out)) for each in fallen]
        self._print_stacks([each for each in fallen if each.hung], STACKS_SOON)
        for each in fallen:
            each.kill()
        self._wait_for(fallen, lambda each: each.exit is not None)
        for each in fallen:
            each.keep_last_words()
        self._running = [each for each in self._running if each not in fallen]
        self._leaving += fallen
        members = [death for each, death in deaths if self._roll.counts(each.seat)]
        return members, [death for each, death in deaths if not self._roll.counts(each.seat)]

    def go_on(self) -> None:
        """Tell those that are left to go on together, and start others in the place of the lost."""
        self.regroup()
        self._fill_up()

    def regroup(self) -> bool:
        """Publish another membership if there is to be one: members were lost, others are ready, or too many train.

        Of several nodes the one at which they meet decides for all; the others report, and follow.
        """
        if self._nodes.peers.decides:
            return self._decide()
        for told in self._nodes.peers.report(self.report(), self._roll.current.number):
            self._roll.follow(told)
            self._number()
        return False

    def _decide(self) -> bool:
        others = self._nodes.peers.reports()
        if others is None:
            return False  # not every node has said anything yet
        report = together([self.report(), *others.values()])
        if report.ended:
            self._nodes.peers.tell_of_end()
            return False  # the others are about to
        self.suspected = report.broken
        if self.suspected and self._nodes.peers.gone():
            return False  # they are to be dropped first
        if self._roll.lost(report.seen) and not (report.goes_on and report.inside):
            raise Stranded("the members that are left cannot go on from where they are")
        found = self._roll.next(report.seen, broken=report.broken)
        if found is None:
            return False
        self._nodes.peers.publish(found)
        self._number()
        return True

    def _number(self) -> None:
        self._regrouped = time.monotonic()
        self._judge.forgive()
        for each in self._running:
            each.rank = self._roll.number(each.seat)
        self._places.follow(self._roll.current, {each.rank: each.task.stdout.stem for each in self._members()})

    def _members(self) -> list[Running]:
        return [each for each in self._running if self._roll.is_member(each.seat)]

    def news(self) -> list[str]:
        """Lines on who is which rank since this was asked last, and that all train again, once they do."""
        now = self._roll.current
        together = all(each.membership == now.number for each in self._members())
        return self._places.news(all_train=self._roll.wanted * (together and len(now.members) == self._roll.wanted))

    def members_of(self, nodes: list[int]) -> list[int]:
        """Which members are workers of these other nodes."""
        reports = self._nodes.peers.reports() or {}
        return self._roll.numbers({each.seat for node in nodes if node in reports for each in reports[node].seen})

    def can_replace(self, nodes: list[int]) -> bool:
        """Whether the others can go on at once without these nodes: to replay a step, others must take their places."""
        reports = self._nodes.peers.reports() or {}
        left = together([self.report(), *(report for node, report in reports.items() if node not in nodes)])
        enough = self._config.recovery != "replay" or left.ready >= len(self.members_of(nodes))
        return bool(left.inside) and left.goes_on and enough

    def scale(self, workers: int) -> None:
        """Have so many train, and let the others sleep, also after a restart."""
        self._wanted = self._roll.wanted = workers

    def scaled(self) -> Membership | None:
        """The membership in which as many train as are wanted, once they do."""
        return self._roll.current if self._roll.is_settled(self.report().seen) else None

    def _fill_up(self) -> None:
        """Start workers until there are as many as there should be, in reserve: they join once they are ready."""
        group = self._worker_group
        used = [each.worker.local_rank for each in self._running]
        free = [each for each in group.workers if each.local_rank not in used]
        with held_back(), _forking_allowed():
            while len(self._running) < len(group.workers) + (0 if self.exchanges else self._config.spares):
                model = free.pop(0) if free else group.workers[self._joined % len(group.workers)]
                self._start(model, joins=True)
            for each in self._running:
                each.come_up()

    def _start(self, member: Worker, *, joins: bool = False) -> None:
        seat = self._free_seat(member.world_size) if joins else member.global_rank
        task = self._task(member, self._worker_group, seat, joins=joins)
        self._running.append(Running(member, task, seat))
        if joins:
            self._running[-1].rank = seat

    def _free_seat(self, world: int) -> int:
        """One that no worker has had, on any node."""
        before, self._joined = self._joined, self._joined + 1
        meeting = self._nodes.meeting
        nodes, here = (len(meeting.nodes), meeting.nodes.index(meeting.node)) if meeting else (1, 0)
        return world + before * nodes + here

    def is_broken(self) -> bool:
        """Whether workers have waited for a membership for some time, and nobody was lost: a connection broke."""
        told = [each.task.progress for each in self._running]
        seeks = any(each.phase is Phase.RECOVERING and each.suspected == self._roll.current.number for each in told)
        if not seeks or any(each.joins and not each.is_ready for each in self._running):
            self._regrouped = time.monotonic()
        return seeks and time.monotonic() - self._regrouped > SUSPECTED

    def here(self) -> RemoteProgress:
        """How far the workers of this node are, for the other nodes."""
        seen = self._seen()
        places = [each.place for each in seen if each.is_member and each.phase is not Phase.ENDED]
        return RemoteProgress(min(places, default=None), sum(each.moved for each in seen))

    def end(self, *, stacks: bool = False) -> None:
        """Kill the workers that are left, with all they have started; if asked, the stacks of their threads first."""
        if stacks:
            self._print_stacks(self._running, STACKS_WITHIN)
        self._stop_workers(self._worker_group)

    def _print_stacks(self, of: "list[Running]", within: float) -> None:
        """Their threads, into their logs: of several that wait for each other, one stack alone tells little."""
        for each in of:
            each.abort()
        deadline = time.monotonic() + within
        while any(each.exit is None for each in of) and time.monotonic() < deadline:
            time.sleep(0.01)
            self._look()

    def printed_by_fallen(self) -> list[tuple[Path, Path]]:
        """Where those that failed have printed: what comes from now on is last words, which belong into the logs."""
        return [(each.task.stdout, each.task.stderr) for each in self._running if each.has_fallen]

    def keep_last_words(self) -> None:
        """Put what workers have raised into their logs too: where one looks for it later."""
        for each in self._running:
            each.keep_last_words()

    @property
    def is_checked(self) -> bool:
        """Whether the steps of the workers were those of a run, and not only supervised."""
        return any(each.task.progress.is_checked for each in self._running)

    def is_after_the_loop(self) -> bool:
        """Whether a worker of this node failed in what its script does after its loop."""
        return any(each.has_fallen and each.task.progress.phase is Phase.DONE for each in self._running)

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
        self.exchanges |= any(each.task.progress.has_exchanged for each in [*self._running, *self._leaving])
        self._running, self._joined = [], 0
        self._places = RankLog(self._out, self._nodes.meeting.attempt if self._nodes.meeting else 0)
        self._roll = Members(self._config.recovery, worker_group.workers[0].world_size)
        if self._wanted and not self.exchanges:
            self._roll.wanted = min(self._roll.wanted, self._wanted)
        self._judge.begin()
        self.elsewhere = RemoteProgress()
        try:
            with held_back(), _forking_allowed():
                for each in worker_group.workers:
                    self._start(each)
                self._fill_up()
        except OSError as error:
            raise WorkerLost(f"cannot start a worker: {error.strerror or error}. Run fewer at once.") from error
        return {each.worker.local_rank: each.pid for each in self._running}

    def _task(self, member: Worker, group: WorkerGroup, seat: int, *, joins: bool) -> Task:
        meeting = self._nodes.meeting
        if meeting is None:
            raise AssertionError("workers start after a meeting")
        logs = self._out / self._places.logs
        name = f"worker-{seat}" if joins else f"rank-{member.global_rank}"
        error = logs / f"{name}.error.json"
        with suppress(OSError):  # a worker works without a log, too
            logs.mkdir(parents=True, exist_ok=True)
            error.unlink(missing_ok=True)
        told = Progress()
        if joins:
            told.set_membership(IN_RESERVE)
        extra = {JOINS: str(seat), "RANK": str(seat)} if joins else {}
        return Task(
            config=self._config,
            environment=as_torchrun(member, group) | of_holdfast(self._out, meeting, error) | extra,
            supervisor=os.getpid(),
            progress=told,
            stdout=logs / f"{name}.out",
            stderr=logs / f"{name}.err",
            error=error,
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        self._look_for_stuck(time.monotonic())
        self._look_for_leaving()
        exits = [each.exit for each in self._running if not each.joins]
        if not exits and not self._nodes.peers.is_ending():
            return RunResult(state=WorkerState.FAILED if self._has_fallen() else WorkerState.HEALTHY)
        if all(status in IN_ORDER for status in exits) and not any(each.left_midway for each in self._running):
            self._dismiss()
        if self._has_fallen():
            return RunResult(state=WorkerState.FAILED)
        over = all(status is not None for status in exits)
        return RunResult(state=WorkerState.SUCCEEDED if over else WorkerState.HEALTHY)

    def _look(self) -> None:
        for each in self._running:
            each.look()

    def _has_fallen(self) -> bool:
        return any(each.has_fallen for each in self._running)

    def _dismiss(self) -> None:
        """All members have done what they were to do: end those in reserve."""
        reserve = [each for each in self._running if each.joins]
        for each in reserve:
            each.kill()
        self._wait_for(reserve, lambda each: each.is_gone)
        self._running = [each for each in self._running if each not in reserve]

    def _look_for_stuck(self, now: float) -> None:
        if now - self._looked < LOOK:
            return
        self._looked = now
        workers = {each.seat: each for each in self._running if each.exit is None}
        seen = self._seen()

        def processor(seat: int) -> float | None:
            return processor_seconds(workers[seat].pid)

        for stuck in self._judge.look(seen, now, processor, self.elsewhere):
            workers[stuck.seat].hung = stuck.because
        for each in seen:
            if each.phase is Phase.ENDED and self._judge.overdue(each, processor):
                workers[each.seat].kill()  # it counts as done: its script has ended

    def _look_for_leaving(self) -> None:
        """Members find out at once that a connection is broken; a process may take long to be gone altogether."""
        self._leaving = [each for each in self._leaving if not each.is_gone]
        if any(each.task.progress.phase is Phase.RECOVERING for each in self._running):
            for each in self._running:
                each.look_closer()

    def _seen(self) -> list[WorkerLook]:
        return [each.seen(self._roll.is_member(each.seat)) for each in self._running if each.exit is None]

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, *_: Any, **__: Any) -> None:
        for each in self._running:
            each.kill()
        self._wait_for([*self._running, *self._leaving], lambda each: each.is_gone)

    def _wait_for(self, killed: "list[Running]", has_ended: "Callable[[Running], bool]") -> None:
        deadline = time.monotonic() + REAPED_WITHIN
        while not all(map(has_ended, killed)):
            for each in killed:
                each.look_closer()
            if time.monotonic() > deadline:
                stuck = ", ".join(str(each.pid) for each in killed if not has_ended(each))
                raise WorkerLost(
                    f"killed workers do not end (pid {stuck}): the kernel holds them. Restart the machine."
                )
            time.sleep(0.002)


@contextmanager
def _forking_allowed() -> Iterator[None]:
    """Python warns of a fork beside threads. Ours serve the store, hold no lock of Python's, and workers need none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
