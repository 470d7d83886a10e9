"""What the nodes report of their workers, and what follows for all of them."""

from holdfast.distributed.membership import Membership
from holdfast.supervise.workers.members import Members, MembersReport, WorkerStatus, together

HERE = MembersReport((WorkerStatus(seat=0, membership=1), WorkerStatus(seat=4, is_ready=True)), goes_on=True)
THERE = MembersReport((WorkerStatus(seat=2, membership=0),), broken=True, ended=True, goes_on=False)


def test_a_report_reads_back_as_it_was_written() -> None:
    assert [MembersReport.from_json(each.to_json()) for each in (HERE, THERE, MembersReport())] == [
        HERE,
        THERE,
        MembersReport(),
    ]


def test_one_node_speaks_for_all_where_that_is_enough() -> None:
    both = together([HERE, THERE])
    assert (both.inside, both.ready) == ((0, 2), 1)
    assert (both.broken, both.ended, both.goes_on) == (True, True, False)


def test_whoever_follows_a_roll_knows_what_whoever_decides_knows() -> None:
    first, second = Members("forward", 3), Members("forward", 3)
    seen = [WorkerStatus(seat=0, membership=0), WorkerStatus(seat=2, membership=0)]
    told = [first.next(seen)]
    seen = [WorkerStatus(seat=0, membership=1), WorkerStatus(seat=2, membership=1), WorkerStatus(seat=3, is_ready=True)]
    told.append(first.next(seen))
    assert first.lost(seen[1:]) == [0]
    first.wanted = 2
    told.append(first.next([WorkerStatus(seat=seat, membership=2) for seat in (0, 2, 3)]))
    for each in told:
        assert each is not None
        second.follow(Membership.from_json(each.to_json()))
    assert vars(second) == vars(first) | {"wanted": 3}
    assert first.numbers({0, 3, 9}) == [0, 1]
