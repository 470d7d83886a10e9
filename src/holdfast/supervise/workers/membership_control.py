"""Decisions about the membership of the workers in one attempt, for runs that recover live.

Of several nodes, the one that keeps the store in which they met decides for all; the others report to it and follow.
"""

import time
from pathlib import Path

from holdfast.distributed.membership import Membership
from holdfast.distributed.script_collectives import SCRIPT_COLLECTIVES
from holdfast.events import Scale
from holdfast.finding import counted
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.runs.rank_log import RankLog
from holdfast.supervise.display import Display
from holdfast.supervise.hang_detection import RemoteProgress
from holdfast.supervise.journal import Journal
from holdfast.supervise.nodes.rendezvous import Peers, RoundInfo
from holdfast.supervise.scale_request import ScaleRequests
from holdfast.supervise.workers.members import Members, MembersReport, merge_reports
from holdfast.supervise.workers.pool import WorkerPool

SUSPECTED = 0.5  # seconds: a worker that dies is seen long before
SCALE_LOOK = 0.1  # seconds between two looks for a scale request


class Stranded(Exception):
    """Members were lost, and the others cannot continue without them."""


class MembershipController:
    """The membership of the attempt that begins with `round`; `wanted` is the number of workers that should train."""

    def __init__(
        self,
        config: RunConfig,
        pool: WorkerPool,
        round: RoundInfo,
        peers: Peers,
        rank_log: RankLog,
        wanted: int | None = None,
    ) -> None:
        self._config, self._pool, self._round, self._peers, self._rank_log = config, pool, round, peers, rank_log
        self.members = Members(config.recovery, round.world_size)
        if wanted and not pool.has_script_collectives:
            self.members.wanted = min(wanted, round.world_size)
        self._joined = 0  # workers that were started to join later
        self._changed = 0.0  # when the membership changed last
        self.is_suspicious = False
        """True if workers of some node wait for a membership although no loss is known."""

    def report(self) -> MembersReport:
        """Return the state of the workers of this node that have not failed."""
        left = [worker for worker in self._pool.running if not worker.has_failed]
        return MembersReport(
            tuple(worker.status for worker in left),
            self._is_broken(),
            any(worker.has_finished for worker in left),
            all(worker.can_lose_peers for worker in left if not worker.is_in_reserve),
        )

    def _is_broken(self) -> bool:
        """Return True if workers have waited for a membership for long and none was lost: a connection broke."""
        progress = [worker.task.progress for worker in self._pool.running]
        number = self.members.current.number
        seeks = any(memory.phase is Phase.RECOVERING and memory.suspected == number for memory in progress)
        if not seeks or any(worker.is_in_reserve and not worker.is_ready for worker in self._pool.running):
            self._changed = time.monotonic()
        return seeks and time.monotonic() - self._changed > SUSPECTED

    def can_continue(self) -> bool:
        """Return True if the other workers could continue without those that have failed."""
        progress = [worker.task.progress for worker in self._pool.running]
        if self._pool.has_script_collectives or any(
            memory.has_fallen_back or memory.has_exchanged for memory in progress
        ):
            return False
        report = merge_reports([self.report(), *(self._peers.reports() or {}).values()])
        return report.goes_on and (bool(report.inside) or not self._peers.decides)

    def can_replace(self, nodes: list[int]) -> bool:
        """Return True if the others can continue at once without `nodes`; to replay a step, spares must be ready."""
        reports = self._peers.reports() or {}
        left = merge_reports([self.report(), *(report for node, report in reports.items() if node not in nodes)])
        enough = self._config.recovery != "replay" or left.ready >= len(self.members_of(nodes))
        return bool(left.inside) and left.goes_on and enough

    def members_of(self, nodes: list[int]) -> list[int]:
        """Return the numbers of the members that are workers of the other `nodes`."""
        reports = self._peers.reports() or {}
        seats = {worker.seat for node in nodes if node in reports for worker in reports[node].seen}
        return self.members.numbers_of(seats)

    def update(self) -> None:
        """Publish the next membership if there is to be one, or follow the deciding node.

        A new membership follows when members were lost, others are ready to join, or more train than are wanted.
        """
        if self._peers.decides:
            self._decide()
            return
        for membership in self._peers.report(self.report(), self.members.current.number):
            self.members.adopt(membership)
            self._renumber()

    def _decide(self) -> None:
        others = self._peers.reports()
        if others is None:
            return  # not every node has reported yet
        report = merge_reports([self.report(), *others.values()])
        if report.ended:
            self._peers.announce_end()
            return  # the others are about to end, too
        self.is_suspicious = report.broken
        if self.is_suspicious and self._peers.gone():
            return  # these nodes are dropped first
        if self.members.lost(report.seen) and not (report.goes_on and report.inside):
            raise Stranded("the remaining members cannot continue from where they are")
        membership = self.members.next(report.seen, broken=report.broken)
        if membership is not None:
            self._peers.publish(membership)
            self._renumber()

    def _renumber(self) -> None:
        self._changed = time.monotonic()
        self._pool.reset_waits()
        for worker in self._pool.running:
            worker.rank = self.members.number_of(worker.seat)
        members = [worker for worker in self._pool.running if self.members.is_member(worker.seat)]
        self._rank_log.follow(self.members.current, {worker.rank: worker.task.stdout.stem for worker in members})

    def start(self) -> None:
        """Start the workers of this node, and its spares."""
        with self._pool.starting():
            for local_rank, rank in enumerate(self._round.ranks):
                self._pool.start(self._round, local_rank=local_rank, seat=rank, joins=False)
            self._start_missing()

    def fill_up(self) -> None:
        """Start workers in the place of lost ones; they wait in reserve, and join once they are ready."""
        with self._pool.starting():
            self._start_missing()

    def _start_missing(self) -> None:
        workers = len(self._round.ranks)
        spares = 0 if self._pool.has_script_collectives else self._config.spares
        used = {worker.local_rank for worker in self._pool.running}
        free = [local_rank for local_rank in range(workers) if local_rank not in used]
        while len(self._pool.running) < workers + spares:
            local_rank = free.pop(0) if free else self._joined % workers
            # No worker on any node has had this seat.
            seat = self._round.world_size + self._joined * len(self._round.nodes) + self._round.index
            self._joined += 1
            self._pool.start(self._round, local_rank=local_rank, seat=seat, joins=True)

    def scale(self, workers: int) -> bool:
        """Let `workers` workers train; return False if the script's own collectives do not allow it."""
        if self._pool.has_script_collectives:
            return False
        self.members.wanted = workers
        return True

    def scaled(self) -> Membership | None:
        """Return the current membership once exactly the wanted number of workers train."""
        return self.members.current if self.members.is_complete(self.report().seen) else None

    def news(self) -> list[str]:
        """Return lines on rank changes since the last call, and one when all workers train again."""
        current, wanted = self.members.current, self.members.wanted
        members = [worker for worker in self._pool.running if self.members.is_member(worker.seat)]
        all_train = len(current.members) == wanted and all(worker.membership == current.number for worker in members)
        return self._rank_log.news(all_train=wanted if all_train else 0)

    def local_progress(self) -> RemoteProgress:
        """Return the progress of the workers of this node, for the other nodes."""
        looks = self._pool.looks(self.members.is_member)
        places = [look.place for look in looks if look.is_member and look.phase is not Phase.ENDED]
        return RemoteProgress(min(places, default=None), sum(look.moved for look in looks))


class Scaler:
    """Answers the scale requests of a single node's run: `wanted` workers train, and the others sleep."""

    def __init__(self, out: Path, workers: int, journal: Journal, display: Display) -> None:
        self._requests, self._workers = ScaleRequests(out), workers
        self._journal, self._display = journal, display
        self._looked = 0.0
        self._pending: float | None = None  # when the request came that is not fulfilled yet
        self.wanted: int | None = None
        """The number of workers that should train, also after a restart; None before the first request."""

    def update(self, controller: MembershipController, attempt: int) -> None:
        """Put workers to sleep or wake them if a request came, and report once that is done."""
        now = time.monotonic()
        if now - self._looked >= SCALE_LOOK:
            self._looked = now
            if (workers := self._requests.new()) is not None and 1 <= workers <= self._workers:
                self._request(controller, workers, now)
        if self._pending is not None and self.wanted and (membership := controller.scaled()):
            self._journal.append(Scale(attempt, self.wanted, membership.number, time.monotonic() - self._pending))
            self._pending = None
            asleep = self._workers - self.wanted
            self._display.say(f"{counted(self.wanted, 'worker')} of {self._workers} train, {asleep} sleep")

    def _request(self, controller: MembershipController, workers: int, now: float) -> None:
        if not controller.scale(workers):
            self._display.say(f"no worker can be put to sleep, and all train: {SCRIPT_COLLECTIVES}", style="yellow")
            return
        self.wanted, self._pending = workers, now
