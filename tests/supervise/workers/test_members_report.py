"""The nodes report their workers, and the reports are merged."""

import json

from holdfast.distributed.membership import Membership
from holdfast.supervise.nodes.rendezvous import MembersReport, WorkerStatus, merge_reports
from holdfast.supervise.workers.membership_control import Members

HERE = MembersReport((WorkerStatus(seat=0, membership=1), WorkerStatus(seat=4, is_ready=True)), goes_on=True)
THERE = MembersReport((WorkerStatus(seat=2, membership=0),), broken=True, ended=True, goes_on=False)


def test_a_report_reads_back_as_it_was_written() -> None:
    assert [MembersReport.from_json(json.loads(json.dumps(report))) for report in (HERE, THERE, MembersReport())] == [
        HERE,
        THERE,
        MembersReport(),
    ]


def test_a_merged_report_has_the_workers_and_conditions_of_all_nodes() -> None:
    both = merge_reports([HERE, THERE])
    assert (both.inside, both.ready) == ((0, 2), 1)
    assert (both.broken, both.ended, both.goes_on) == (True, True, False)


def test_a_node_that_follows_has_the_same_members_as_the_node_that_decides() -> None:
    first, second = Members("forward", 3), Members("forward", 3)
    seen = [WorkerStatus(seat=0, membership=0), WorkerStatus(seat=2, membership=0)]
    memberships = [first.next(seen)]
    seen = [WorkerStatus(seat=0, membership=1), WorkerStatus(seat=2, membership=1), WorkerStatus(seat=3, is_ready=True)]
    memberships.append(first.next(seen))
    assert first.lost(seen[1:]) == [0]
    first.wanted = 2
    memberships.append(first.next([WorkerStatus(seat=seat, membership=2) for seat in (0, 2, 3)]))
    for membership in memberships:
        assert membership is not None
        second.adopt(Membership.from_json(membership.to_json()))
    assert vars(second) == vars(first) | {"wanted": 3}
    assert first.numbers_of({0, 3, 9}) == [0, 1]
