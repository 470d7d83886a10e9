"""A worker without a model: it takes part in the control of a run, and its training step is a pause.

It uses the product's own membership code: it follows memberships, reports where it is when one is lost, and computes the
plan of the recovery. Tensors and the connections for them are left out. Steps follow the clock, as steps of ranks that
wait for each other do.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from board import Board, Entry

from holdfast import progress
from holdfast.distributed import ranks
from holdfast.distributed.gloo_link import GroupBroken
from holdfast.distributed.membership import Coordination, Suspended
from holdfast.live.settlement import NOWHERE, MemberReport, make_plan
from holdfast.progress import IN_RESERVE, Phase

STEP = 0.25  # seconds
MINUTES = 10


class LightWorker:
    """One worker of the run, and its entry on the board."""

    def __init__(self, board: Board) -> None:
        seat = os.environ.get(ranks.JOINS)
        rank, size = int(seat or os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        members = () if seat else tuple(range(size))
        assigned = progress.here.assigned if seat else rank
        self._coordination = Coordination(
            rank,
            members,
            lambda: ranks._store(timedelta(seconds=60)),
            seat=rank,
            is_joining=bool(seat),
            rank_for_life=assigned,
        )
        self._seat, self._board = rank, board
        self._recorded = members

    def run(self) -> None:
        self._coordination.listen(lambda: None)
        if self._coordination.is_joining:
            self._join()
        progress.here.phase = Phase.TRAINING
        self._write()
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            time.sleep(STEP - time.monotonic() % STEP)
            self._cross(int(time.monotonic() / STEP))

    def _cross(self, step: int) -> None:
        coordination = self._coordination
        if not coordination.gate.passes(step):
            while coordination.is_outdated or coordination.has_joiners_at(step):
                self._recover(step)
        progress.here.pass_boundary(step)

    def _join(self) -> None:
        progress.here.phase = Phase.JOINING
        while self._coordination.is_joining:
            self._coordination.await_admission()
            try:
                self._settle(MemberReport(step=NOWHERE))
                self._coordination.is_joining = False
            except GroupBroken:
                self._coordination.leave()

    def _recover(self, step: int) -> None:
        progress.here.suspected = self._coordination.number
        with progress.during(Phase.RECOVERING):
            while True:
                try:
                    basis = self._coordination.members
                    self._settle(MemberReport(step=step, basis=basis, members=self._recorded))
                    break
                except GroupBroken:
                    progress.here.suspected = self._coordination.number
                except Suspended:
                    self._sleep()
                    break
        self._write()

    def _sleep(self) -> None:
        """Leave the members, and return when the supervisor has admitted this worker again."""
        progress.here.membership = IN_RESERVE
        self._coordination.leave()
        self._join()

    def _settle(self, report: MemberReport) -> None:
        membership = self._coordination.next()
        reports = self._coordination.exchange(membership.members, report.to_json(), MemberReport.from_json)
        make_plan(reports, membership.asleep)
        self._coordination.members = self._recorded = membership.members
        progress.here.membership = membership.number

    def _write(self) -> None:
        number, members = self._coordination.number, len(self._coordination.members)
        attempt = int(os.environ["HOLDFAST_ATTEMPT"])
        self._board.write(self._seat, Entry(time.monotonic(), attempt, number, members, os.getpid()))


if __name__ == "__main__":
    LightWorker(Board(Path(sys.argv[1]))).run()
