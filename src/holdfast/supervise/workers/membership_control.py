"""Decides which workers train together (the membership), for runs that recover live.

A *seat* is the unique number of a worker process. A *member number* is the rank that a member has while none is lost;
it passes from a lost worker to its replacement. Workers without a member number wait in reserve: spares, new
replacements, and workers that `holdfast scale` put to sleep.

Of several nodes, the one that hosts the store in which they met decides for all; the others report to it and follow.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.distributed.membership import Membership
from holdfast.distributed.process_group import SCRIPT_COLLECTIVES
from holdfast.events import Scale
from holdfast.finding import counted
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.runs.logs import LOG_FOLDER, RANKS
from holdfast.supervise.display import Display, Journal
from holdfast.supervise.hang_detection import RemoteProgress
from holdfast.supervise.nodes.connection import Unreachable
from holdfast.supervise.nodes.rendezvous import MembersReport, Peers, RoundInfo, WorkerStatus, merge_reports
from holdfast.supervise.scale_request import ScaleRequests
from holdfast.supervise.workers.pool import WorkerPool

SUSPECTED = 0.5  # seconds: a worker that dies is seen long before
SCALE_LOOK = 0.1  # seconds between two looks for a scale request


class Members:
    """The workers that train together in one attempt (start of all workers); the group changes after losses.

    `size` is the number of workers at the start, `wanted` the number that should train now, and `strategy` the recovery
    strategy. Each worker process has a unique number, its `seat`. Each member has a member number, at first its rank.
    """

    def __init__(self, strategy: str, size: int) -> None:
        self.wanted = size
        self.current = Membership(0, tuple(range(size)))
        self._strategy, self._size = strategy, size
        self._seats = {number: number for number in range(size)}  # of the members, by number
        self._leaving: dict[int, int] = {}  # of members that were told to sleep, by number
        self._last = dict(self._seats)  # last number of each seat
        self._asleep: set[int] = set()  # seats

    def number_of(self, seat: int) -> int:
        """Return the last member number of the process `seat`; `seat` itself if that process was never a member."""
        return self._last.get(seat, seat)

    def is_member(self, seat: int) -> bool:
        """Return True if the worker process number `seat` is a member, or was told to become one."""
        return seat in self._seats.values()

    def was_member(self, seat: int) -> bool:
        """Return True if the worker process number `seat` is or was a member, and was not put to sleep since."""
        return seat in self._last and seat not in self._asleep

    def lost(self, workers: Sequence[WorkerStatus]) -> list[int]:
        """Return the numbers of the members whose processes are not among `workers`."""
        seats = {worker.seat for worker in workers}
        return [number for number, seat in self._seats.items() if seat not in seats]

    def numbers_of(self, seats: Collection[int]) -> list[int]:
        """Return the member numbers of the worker processes in `seats`, without processes that are not members."""
        return sorted(number for number, seat in self._seats.items() if seat in seats)

    def adopt(self, membership: Membership) -> None:
        """Make `membership` (a group of training workers) the current one."""
        known = {**self._leaving, **self._seats}
        inside = {number: known[number] for number in membership.members if number not in membership.joining}
        self._leaving = {number: self._seats[number] for number in membership.asleep}
        self._seats = {**inside, **membership.joining}
        self._last |= {seat: number for number, seat in membership.joining.items()}
        self._asleep = (self._asleep | {*self._leaving.values()}) - {*self._seats.values()}
        self.current = membership

    def is_complete(self, workers: Sequence[WorkerStatus]) -> bool:
        """Return True if as many workers train as are wanted, and all of them are in the current membership."""
        inside = [worker for worker in workers if worker.membership is not None]
        together = all(worker.membership == self.current.number for worker in inside)
        return together and len(inside) == len(self._seats) == self.wanted

    def next(self, workers: Sequence[WorkerStatus], *, broken: bool = False) -> Membership | None:
        """Choose, adopt and return the next membership (group of training workers), or None if none is due.

        `broken` is True if a connection between members broke although no member was lost.
        """
        present = {worker.seat: worker for worker in workers}
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
        """Return a training group without the lost members.

        With the strategy "replay", return None until every lost member has a replacement."""
        if self._strategy != "replay":
            return self._publish(inside, {}) if inside else None
        joining = self._seated(self._seats.keys() - inside.keys(), self._ready(inside, present))
        return self._publish(inside, joining) if {*inside, *joining} == {*self._seats} else None

    def _resized(self, inside: dict[int, int], present: Mapping[int, WorkerStatus]) -> Membership | None:
        """Publish and return a membership closer to the wanted size than `inside`; None if no worker can be added."""
        more = self.wanted - len(inside)
        if more < 0:
            asleep = sorted(inside)[more:]
            return self._publish({number: inside[number] for number in sorted(inside)[:more]}, {}, tuple(asleep))
        joining = self._seated(set(range(self._size)) - inside.keys(), self._ready(inside, present)[:more])
        return self._publish(inside, joining) if joining else None

    def _ready(self, inside: Mapping[int, int], present: Mapping[int, WorkerStatus]) -> list[int]:
        return [seat for seat, worker in sorted(present.items()) if worker.is_ready and seat not in inside.values()]

    def _seated(self, free: set[int], ready: list[int]) -> dict[int, int]:
        """Return the seats (process numbers) in `ready` by their new member numbers, which are taken from `free`.

        A worker gets its last member number again if that is free."""
        seats: dict[int, int] = {}
        for seat in sorted(ready, key=lambda seat: self._last.get(seat) not in free):
            left = sorted(free - seats.keys())
            if left:
                last = self._last.get(seat)
                seats[last if last in left else left[0]] = seat
        return seats

    def _publish(self, inside: dict[int, int], joining: dict[int, int], asleep: tuple[int, ...] = ()) -> Membership:
        membership = Membership(self.current.number + 1, tuple(sorted({**inside, **joining})), joining, asleep)
        self.adopt(membership)
        return membership


class RankLog:
    """The record of which rank each worker of this node has, during one attempt (start of all workers).

    With live recovery the rank of a worker may change, but it keeps its log files. So each change of a rank is shown to
    the user, and is appended to a file beside the logs.
    """

    def __init__(self, out: Path, attempt: int) -> None:
        self._out, self._attempt = out, attempt
        self._names: dict[int, str] = {}  # the worker of each rank, by the name of its files; empty: of another node
        self._lines: list[str] = []
        self._is_replacing = False  # a worker was told to join, and has not yet

    def follow(self, membership: Membership, names: Mapping[int, str]) -> None:
        """Log the rank of each worker in the new training group `membership`.

        `names` maps the member numbers of this node's workers to the names of their log files."""
        changed = []
        for rank, number in enumerate(membership.members):
            before, name = self._names.get(rank, f"rank-{rank}"), names.get(number, "")
            self._names[rank] = name
            if name == before:
                continue
            self._is_replacing |= number in membership.joining
            if name:
                changed.append((rank, name))
            if name and (rank == 0 or number in membership.joining):
                worker = f"the worker that began as rank {name[5:]}" if name.startswith("rank-") else name
                self._lines.append(f"rank {rank} is now {worker}, {LOG_FOLDER.format(self._attempt)}/{name}.out")
        if changed:
            text = "".join(json.dumps(change) + "\n" for change in changed)
            path = self._out / LOG_FOLDER.format(self._attempt) / RANKS
            with suppress(OSError), path.open("a") as file:  # a disk that refuses does not end the run
                file.write(text)

    def news(self, *, all_train: int) -> list[str]:
        """Return messages on rank changes since the last call; `all_train` is the worker count if all train, else 0."""
        lines, self._lines = self._lines, []
        if all_train and self._is_replacing:
            self._is_replacing = False
            lines.append(f"all {all_train} workers train again")
        return lines


class Stranded(Exception):
    """Raised if members (training workers) were lost and the other members cannot continue without them."""


class MembershipController:
    """The controller of the workers that train together in one attempt, which begins with the rendezvous `round`.

    `wanted` is the number of workers that should train; None for all.
    """

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
        """True if workers of some node wait for the next membership although no lost worker is known."""

    def report(self) -> MembersReport:
        """Return the state of the workers of this node that have not failed."""
        left = [worker for worker in self._pool.running if not worker.has_failed]
        return MembersReport(
            tuple(WorkerStatus(seat=w.seat, is_ready=w.is_ready, membership=w.membership) for w in left),
            self._is_broken(),
            any(worker.has_finished for worker in left),
            all(worker.can_lose_peers for worker in left if not worker.is_in_reserve),
        )

    def _is_broken(self) -> bool:
        """Return True if workers have waited long for a new membership although no worker was lost."""
        progress = [worker.task.progress for worker in self._pool.running]
        number = self.members.current.number
        seeks = any(memory.phase is Phase.RECOVERING and memory.suspected == number for memory in progress)
        if not seeks or any(worker.is_in_reserve and not worker.is_ready for worker in self._pool.running):
            self._changed = time.monotonic()
        return seeks and time.monotonic() - self._changed > SUSPECTED

    def can_continue(self) -> bool:
        """Return True if the remaining workers can continue without those that have failed."""
        progress = [worker.task.progress for worker in self._pool.running]
        if self._pool.has_script_collectives or any(
            memory.has_fallen_back or memory.has_exchanged for memory in progress
        ):
            return False
        try:
            report = merge_reports([self.report(), *(self._peers.reports() or {}).values()])
        except Unreachable:
            return False
        return report.goes_on and (bool(report.inside) or not self._peers.decides)

    def can_replace(self, nodes: list[int]) -> bool:
        """Return True if the other nodes can continue without `nodes`; replay needs a ready spare per lost worker."""
        reports = self._peers.reports() or {}
        left = merge_reports([self.report(), *(report for node, report in reports.items() if node not in nodes)])
        enough = self._config.recovery != "replay" or left.ready >= len(self.members_of(nodes))
        return bool(left.inside) and left.goes_on and enough

    def members_of(self, nodes: list[int]) -> list[int]:
        """Return the member numbers (at first equal to ranks) of the workers that `nodes` have reported."""
        reports = self._peers.reports() or {}
        seats = {worker.seat for node in nodes if node in reports for worker in reports[node].seen}
        return self.members.numbers_of(seats)

    def update(self) -> None:
        """Publish the next membership (group of training workers) if this node decides; otherwise adopt the latest.

        A new membership is due when members were lost, workers are ready to join, or more workers train than are
        wanted.
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
        self._pool.hangs.reset_waits()
        for worker in self._pool.running:
            worker.rank = self.members.number_of(worker.seat)
        members = [worker for worker in self._pool.running if self.members.is_member(worker.seat)]
        self._rank_log.follow(self.members.current, {worker.rank: worker.task.stdout.stem for worker in members})

    def start(self) -> None:
        """Start the workers of this node, and its spares (workers that wait to replace a lost one)."""
        with self._pool.starting():
            for local_rank, rank in enumerate(self._round.ranks):
                self._pool.start(self._round, local_rank=local_rank, seat=rank, joins=False)
            self._start_missing()

    def fill_up(self) -> None:
        """Start replacements for lost workers; they join the training once they are ready."""
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

    def news(self) -> list[str]:
        """Return messages about rank changes since the last call, and one when all workers train again."""
        current, wanted = self.members.current, self.members.wanted
        members = [worker for worker in self._pool.running if self.members.is_member(worker.seat)]
        all_train = len(current.members) == wanted and all(worker.membership == current.number for worker in members)
        return self._rank_log.news(all_train=wanted if all_train else 0)

    def local_progress(self) -> RemoteProgress:
        """Return the progress of this node's workers, to be sent to the other nodes."""
        looks = self._pool.looks(self.members.is_member)
        places = [look.place for look in looks if look.is_member and look.phase is not Phase.ENDED]
        return RemoteProgress(min(places, default=None), sum(look.moved for look in looks))


class Scaler:
    """The handler of scale requests in a run on one node: `wanted` workers train, and the others are suspended."""

    def __init__(self, out: Path, workers: int, journal: Journal, display: Display) -> None:
        self._requests, self._workers = ScaleRequests(out), workers
        self._journal, self._display = journal, display
        self._looked = 0.0
        self._pending: float | None = None  # when the request came that is not fulfilled yet
        self.wanted: int | None = None
        """The number of workers that should train, also after a restart; None before the first request."""

    def update(self, controller: MembershipController, pool: WorkerPool, attempt: int) -> None:
        """Put workers to sleep or wake them if the user requested it, and record an event when this is complete."""
        now = time.monotonic()
        if now - self._looked >= SCALE_LOOK:
            self._looked = now
            if (workers := self._requests.new()) is not None and 1 <= workers <= self._workers:
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
