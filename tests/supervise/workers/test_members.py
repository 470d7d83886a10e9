"""Who is a member of a run that recovers live, by what is seen of its workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.distributed.membership import Membership
from holdfast.supervise.workers.members import Members, WorkerStatus


def members(*seats: int, of: int = 0) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat, membership=of) for seat in seats]


def ready(*seats: int) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat, is_ready=True) for seat in seats]


def coming(*seats: int) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat) for seat in seats]


def test_while_all_are_there_nothing_changes() -> None:
    assert Members("forward", 3).next(members(0, 1, 2)) is None


@pytest.mark.parametrize("strategy", ["forward", "skip"])
def test_those_that_are_left_go_on_at_once(strategy: str) -> None:
    assert Members(strategy, 3).next([*members(0, 2), *coming(3)]) == Membership(1, (0, 2))


def test_a_replacement_joins_once_the_others_have_found_together() -> None:
    roll = Members("forward", 3)
    roll.next(members(0, 2))
    assert roll.next([*members(0, 2), *ready(3)]) is None
    assert roll.next([*members(0, 2, of=1), *ready(3)]) == Membership(2, (0, 1, 2), {1: 3})
    assert roll.next([*members(0, 2, of=1), *ready(3)]) is None


def test_a_replayed_step_waits_until_every_lost_place_is_taken() -> None:
    roll = Members("replay", 4)
    assert roll.next([*members(0, 2), *ready(4), *coming(5)]) is None
    assert roll.next([*members(0, 2), *ready(4, 5)]) == Membership(1, (0, 1, 2, 3), {1: 4, 3: 5})


def test_one_that_was_let_in_and_dies_before_it_came_is_lost_like_a_member() -> None:
    roll = Members("forward", 3)
    roll.next(members(0, 2))
    roll.next([*members(0, 2, of=1), *ready(3)])
    assert roll.next([*members(0, 2, of=1), *coming(4)]) == Membership(3, (0, 2))


def test_where_members_cannot_reach_each_other_they_meet_anew() -> None:
    assert Members("forward", 3).next(members(0, 1, 2), broken=True) == Membership(1, (0, 1, 2))


def test_whoever_is_too_many_falls_asleep_and_wakes_as_the_member_it_was() -> None:
    roll = Members("forward", 4)
    roll.wanted = 2
    assert roll.next(members(0, 1, 2, 3)) == Membership(1, (0, 1), {}, asleep=(2, 3))
    roll.wanted = 4
    assert roll.next([*members(0, 1, 2, of=1), *ready(3)]) is None  # one has yet to fall asleep
    assert roll.next([*members(0, 1, of=1), *ready(2, 3)]) == Membership(2, (0, 1, 2, 3), {2: 2, 3: 3})


def test_a_loss_before_they_are_asleep_keeps_them_awake() -> None:
    roll = Members("forward", 4)
    roll.wanted = 2
    roll.next(members(0, 1, 2, 3))
    assert roll.next(members(0, 2, 3)) == Membership(2, (0, 2, 3))
    assert roll.next(members(0, 2, 3, of=2)) == Membership(3, (0, 2), {}, asleep=(3,))


def test_a_loss_wakes_one_that_sleeps() -> None:
    roll = Members("forward", 3)
    roll.wanted = 2
    roll.next(members(0, 1, 2))
    assert roll.next([*members(0, of=1), *ready(2)]) == Membership(2, (0,))
    assert roll.next([*members(0, of=2), *ready(2)]) == Membership(3, (0, 2), {2: 2})


@given(st.sampled_from(["forward", "replay", "skip"]), st.integers(2, 5), st.lists(st.integers(0, 99), max_size=40))
def test_no_two_seats_ever_have_one_number_and_the_world_grows_back(
    strategy: str, size: int, losses: list[int]
) -> None:
    roll, inside, waiting, fresh = Members(strategy, size), dict.fromkeys(range(size), 0), set[int](), size

    def look() -> Membership | None:
        found = roll.next([*(WorkerStatus(seat=s, membership=n) for s, n in inside.items()), *ready(*waiting)])
        if found:
            assert len({*found.joining.values()}) == len(found.joining)
            assert set(found.joining) <= set(found.members) <= set(range(size))
            waiting.difference_update(found.joining.values())
            inside.update(dict.fromkeys([*inside, *found.joining.values()], found.number))
            assert len(found.members) == len(inside)
        return found

    for each in losses:
        if len(inside) > 1:
            del inside[sorted(inside)[each % len(inside)]]
            waiting.add(fresh)
            fresh += 1
        if each % 3:
            look()
    for _ in range(3):
        look()
    assert (len(inside), roll.is_settled([WorkerStatus(seat=s, membership=n) for s, n in inside.items()])) == (
        size,
        True,
    )
