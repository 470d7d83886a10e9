"""Decides which workers train together (the membership), for runs that recover live.

A *seat* is the unique number of a worker process. A *member number* is the rank that a member has while none is lost;
it passes from a lost worker to its replacement. Workers without a member number wait in reserve: spares, new
replacements, and workers that `holdfast scale` put to sleep.

If there are several nodes, the node that hosts the store in which they met decides for all nodes. The other nodes report
to it and follow its decisions.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from holdfast.distributed.membership import Membership
from holdfast.progress import Phase
from holdfast.runs.config import REPLACING, RunConfig
from holdfast.supervise.hang_detection import RemoteProgress
from holdfast.supervise.nodes.connection import Unreachable
from holdfast.supervise.nodes.rendezvous import MembersReport, Peers, RoundInfo, WorkerStatus, merge_reports
from holdfast.supervise.workers.pool import WorkerPool
from holdfast.supervise.workers.rank_log import RankLog

SUSPECTED = 0.5  # seconds: a worker that dies is seen long before


class Members:
    """The workers that train together; the group changes when workers are lost, replaced or put to sleep.

    `seat` is the unique number of a worker process. A member number is a rank in the group; it passes from a lost
    worker to its replacement."""

    def __init__(self, strategy: str, size: int) -> None:
        self.wanted = size
        self.current = Membership(0, tuple(range(size)))
        self._strategy, self._size = strategy, size
        self._seats = {number: number for number in range(size)}  # of the members, by number
        self._leaving: dict[int, int] = {}  # of members that were told to sleep, by number
        self._numbers = dict(self._seats)  # by seat: the number that each process has for life
        self._been = {*self._seats}  # seats of all members, past and present
        self._asleep: set[int] = set()  # seats

    def number_of(self, seat: int) -> int:
        """Return the rank of the worker process number `seat`; if the process has never trained, return `seat`."""
        return self._numbers[seat] if seat in self._been else seat

    def assigned(self, seat: int) -> int | None:
        """Return the rank of the worker process number `seat`; None for a spare, which has no rank yet."""
        return self._numbers.get(seat)

    def assign(self, seat: int, number: int) -> None:
        """Give the worker process number `seat` the rank `number`, which it keeps until it exits."""
        self._numbers[seat] = number

    def is_member(self, seat: int) -> bool:
        """Return True if the worker process with number `seat` trains, or was told to join."""
        return seat in self._seats.values()

    def was_member(self, seat: int) -> bool:
        """Return True if worker process number `seat` trains or has trained, and was not put to sleep since."""
        return seat in self._been and seat not in self._asleep

    def lost(self, workers: Sequence[WorkerStatus]) -> list[int]:
        """Return the ranks whose processes were lost. `workers` are all workers that have not failed."""
        seats = {worker.seat for worker in workers}
        return [number for number, seat in self._seats.items() if seat not in seats]

    def numbers_of(self, seats: Collection[int]) -> list[int]:
        """Return the sorted ranks of the processes with the numbers `seats`, without processes that do not train."""
        return sorted(number for number, seat in self._seats.items() if seat in seats)

    def adopt(self, membership: Membership) -> None:
        known = {**self._leaving, **self._seats}
        inside = {number: known[number] for number in membership.members if number not in membership.joining}
        self._leaving = {number: self._seats[number] for number in membership.asleep}
        self._seats = {**inside, **membership.joining}
        self._numbers |= {seat: number for number, seat in membership.joining.items()}
        self._been |= {*membership.joining.values()}
        self._asleep = (self._asleep | {*self._leaving.values()}) - {*self._seats.values()}
        self.current = membership

    def is_held(self, number: int, dead: Collection[int]) -> bool:
        """Return True if the rank `number` belongs to a training process that is not in `dead` (process numbers)."""
        return number in self._seats and self._seats[number] not in dead

    def is_complete(self, workers: Sequence[WorkerStatus]) -> bool:
        """Return True if the current group has as many workers as it should, and all of them have joined it."""
        inside = [worker for worker in workers if worker.membership is not None]
        together = all(worker.membership == self.current.number for worker in inside)
        return together and len(inside) == len(self._seats) == self.wanted

    def next(self, workers: Sequence[WorkerStatus], *, broken: bool = False) -> Membership | None:
        """Choose, adopt and return the next group of workers that train; None if no change is due.

        `workers` are all workers that have not failed. `broken` is True if a connection in the group broke although no
        worker was lost."""
        present = {worker.seat: worker for worker in workers}
        self._numbers |= {worker.seat: worker.number for worker in workers if worker.number is not None}
        known = {**self._leaving, **self._seats}
        inside = {n: seat for n, seat in known.items() if seat in present and present[seat].membership is not None}
        if broken or any(seat not in present for seat in self._seats.values()):
            return self._without_lost(inside, present)  # a worker that is not asleep yet stays for now
        if any(present[seat].membership != self.current.number for seat in self._seats.values()):
            return None  # they have not all joined the current membership
        if len(inside) > len(self._seats):
            return None  # some have yet to fall asleep
        return self._resized(inside, present)

    def _without_lost(self, inside: dict[int, int], present: Mapping[int, WorkerStatus]) -> Membership | None:
        if self._strategy not in REPLACING:
            return self._publish(inside, {}) if inside else None
        joining = self._seated(self._seats.keys() - inside.keys(), inside, present)
        return self._publish(inside, joining) if {*inside, *joining} == {*self._seats} else None

    def _resized(self, inside: dict[int, int], present: Mapping[int, WorkerStatus]) -> Membership | None:
        more = self.wanted - len(inside)
        if more < 0:
            asleep = sorted(inside)[more:]
            return self._publish({number: inside[number] for number in sorted(inside)[:more]}, {}, tuple(asleep))
        seated = self._seated(set(range(self._size)) - inside.keys(), inside, present)
        if more == 0:
            seated, more = {n: seat for n, seat in seated.items() if n == 0}, 1  # another worker then sleeps
        joining = {number: seated[number] for number in sorted(seated)[:more]}
        return self._publish(inside, joining) if joining else None

    def _seated(self, free: set[int], inside: Mapping[int, int], present: Mapping[int, WorkerStatus]) -> dict[int, int]:
        """Return the processes that can join now, as a mapping from rank (one of `free`) to process number.

        A process never changes its rank. `inside` has the processes that train, by rank. `present` has all processes, by
        number."""
        ready = {seat for seat, worker in present.items() if worker.is_ready} - {*inside.values()}
        numbers = {seat: number for seat, number in self._numbers.items() if seat in present}
        spare_numbers = sorted(free - {*numbers.values()})
        numbers |= zip(sorted(ready - numbers.keys()), spare_numbers, strict=False)
        return {number: seat for seat, number in sorted(numbers.items()) if seat in ready and number in free}

    def _publish(self, inside: dict[int, int], joining: dict[int, int], asleep: tuple[int, ...] = ()) -> Membership:
        membership = Membership(self.current.number + 1, tuple(sorted({**inside, **joining})), joining, asleep)
        self.adopt(membership)
        return membership


class Stranded(Exception):
    """Raised if workers were lost and the remaining workers cannot continue without them."""


class MembershipController:
    """A controller that decides which workers train together. `wanted` is their number, or None for all workers."""

    def __init__(
        self,
        config: RunConfig,
        pool: WorkerPool,
        round: RoundInfo,
        peers: Peers,
        out: Path,
        wanted: int | None = None,
    ) -> None:
        self._config, self._pool, self._round, self._peers, self._out = config, pool, round, peers, out
        self.members = Members(config.recovery, round.world_size)
        if wanted and not pool.has_script_collectives:
            self.members.wanted = min(wanted, round.world_size)
        self._joined = 0  # workers that were started to join later
        self._started = {*round.ranks}  # the seats of all workers that this node has started
        self._changed = 0.0  # when the membership changed last
        self.is_suspicious = False  # workers wait for the next membership although no lost worker is known

    @cached_property
    def _rank_log(self) -> RankLog:
        return RankLog(self._out, self._round.attempt)

    def report(self) -> MembersReport:
        left = [worker for worker in self._pool.running if not worker.has_failed]
        return MembersReport(
            tuple(WorkerStatus(w.seat, w.is_ready, w.membership, self.members.assigned(w.seat)) for w in left),
            self._is_broken(),
            any(worker.has_finished for worker in left),
            all(worker.can_lose_peers for worker in left if not worker.is_in_reserve),
        )

    def _is_broken(self) -> bool:
        progress = [worker.task.progress for worker in self._pool.running]
        number = self.members.current.number
        seeks = any(memory.phase is Phase.RECOVERING and memory.suspected == number for memory in progress)
        if not seeks or any(worker.is_starting for worker in self._pool.running):
            self._changed = time.monotonic()
        return seeks and time.monotonic() - self._changed > SUSPECTED

    @property
    def have_given_up(self) -> bool:
        """True if a worker has found that it cannot recover from a loss, so that the run restarts."""
        return any(worker.task.progress.has_fallen_back for worker in self._pool.running)

    @property
    def will_say_why(self) -> bool:
        """True if the survivors of a loss have given up, so that one of them is about to say why.

        Where live recovery is impossible, as over NCCL, all workers gave up when they started, also the lost ones."""
        lost = (worker for worker in self._pool.running if worker.has_failed)
        return self.have_given_up and not all(worker.task.progress.has_fallen_back for worker in lost)

    def can_continue(self) -> bool:
        has_exchanged = any(worker.task.progress.has_exchanged for worker in self._pool.running)
        if self._pool.has_script_collectives or self.have_given_up or has_exchanged:
            return False
        try:
            report = merge_reports([self.report(), *(self._peers.reports() or {}).values()])
        except Unreachable:
            return False
        return report.goes_on and (bool(report.inside) or not self._peers.decides)

    def can_replace(self, nodes: list[int]) -> bool:
        """Return True if training can continue without the lost `nodes`.

        With recovery by `replay` or `partial`, each lost worker needs a ready spare; otherwise only a lost rank 0 needs one."""
        reports = self._peers.reports() or {}
        left = merge_reports([self.report(), *(report for node, report in reports.items() if node not in nodes)])
        lost = self.members_of(nodes)
        needed = len(lost) if self._config.recovery in REPLACING else int(0 in lost)  # the script needs a rank 0
        return bool(left.inside) and left.goes_on and left.ready >= needed

    def members_of(self, nodes: list[int]) -> list[int]:
        """Return the ranks of the training workers on `nodes`, according to the reports of these nodes."""
        reports = self._peers.reports() or {}
        seats = {worker.seat for node in nodes if node in reports for worker in reports[node].seen}
        return self.members.numbers_of(seats)

    def update(self) -> None:
        """Choose and publish the next group of workers that train. If another node decides, adopt its latest choice."""
        self._assign_spares()
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
        is_lost = bool(self.members.lost(report.seen))
        if report.ended and not (is_lost and report.broken):
            self._peers.announce_end()
            return  # the others are about to end, too
        self.is_suspicious = report.broken
        if self.is_suspicious and self._peers.gone():
            return  # these nodes are dropped first
        if is_lost and not (report.goes_on and report.inside):
            raise Stranded("the remaining members cannot continue from where they are")
        membership = self.members.next(report.seen, broken=report.broken)
        if membership is not None:
            self._peers.publish(membership)
            self._renumber()

    def _renumber(self) -> None:
        self._changed = time.monotonic()
        self._pool.hangs.reset_waits()
        for worker in self._pool.running:
            worker.rank = self.members.number_of(worker.seat)
        members = [worker for worker in self._pool.running if self.members.is_member(worker.seat)]
        self._rank_log.follow(self.members.current, {worker.rank: worker.task.stdout.stem for worker in members})

    def start(self) -> None:
        """Start the workers of this node, and its spares, which wait to replace a lost worker."""
        with self._pool.starting():
            for local_rank, rank in enumerate(self._round.ranks):
                self._pool.start(self._round, local_rank=local_rank, seat=rank)
            self._start_missing()

    def fill_up(self) -> None:
        """Start replacements for lost workers; they join the training when they are ready."""
        with self._pool.starting():
            self._start_missing()

    def _start_missing(self) -> None:
        workers = len(self._round.ranks)
        is_live = self._config.recovery != "restart" and not self._pool.has_script_collectives
        spares = self._config.spares if is_live else 0
        used = {worker.local_rank for worker in self._pool.running}
        free = [local_rank for local_rank in range(workers) if local_rank not in used]
        while len(self._pool.running) < workers + spares:
            local_rank = free.pop(0) if free else self._joined % workers
            # No worker on any node has had this seat.
            seat = self._round.world_size + self._joined * len(self._round.nodes) + self._round.index
            self._joined += 1
            vacant = self._vacant()
            unassigned = sum(self.members.assigned(worker.seat) is None for worker in self._pool.running)
            rank = vacant[0] if len(vacant) > unassigned else None  # spares come first
            if rank is not None:
                self.members.assign(seat, rank)
            self._started.add(seat)
            self._pool.start(self._round, local_rank=local_rank, seat=seat, joins=True, rank=rank)

    def _assign_spares(self) -> None:
        for worker in self._pool.running:
            progress, is_assigned = worker.task.progress, self.members.assigned(worker.seat) is not None
            if progress.asks_for_rank and not is_assigned and (vacant := self._vacant()):
                self.members.assign(worker.seat, vacant[0])
                progress.assigned = vacant[0]

    def _vacant(self) -> list[int]:
        living = {worker.seat for worker in self._pool.running if not worker.has_failed}
        dead = self._started - living
        numbers = {self.members.assigned(seat) for seat in dead} - {self.members.assigned(seat) for seat in living}
        return sorted(number for number in numbers if number is not None and not self.members.is_held(number, dead))

    def news(self) -> list[str]:
        """Return messages about rank changes since the last call, and a message when all workers train again."""
        current, wanted = self.members.current, self.members.wanted
        members = [worker for worker in self._pool.running if self.members.is_member(worker.seat)]
        all_train = len(current.members) == wanted and all(worker.membership == current.number for worker in members)
        return self._rank_log.news(all_train=wanted if all_train else 0)

    def local_progress(self) -> RemoteProgress:
        looks = self._pool.looks(self.members.is_member)
        places = [look.place for look in looks if look.is_member and look.phase is not Phase.ENDED]
        return RemoteProgress(min(places, default=None), sum(look.moved for look in looks))
