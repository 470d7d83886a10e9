"""The members of a run that recovers live follow from the state of its workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.distributed.membership import Membership
from holdfast.supervise.nodes.rendezvous import WorkerStatus
from holdfast.supervise.workers.membership_control import Members


def members(*seats: int, of: int = 0) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat, membership=of) for seat in seats]


def ready(*seats: int) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat, is_ready=True) for seat in seats]


def coming(*seats: int) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat) for seat in seats]


def test_while_all_are_there_nothing_changes() -> None:
    assert Members("forward", 3).next(members(0, 1, 2)) is None


@pytest.mark.parametrize("strategy", ["forward", "skip"])
def test_the_remaining_members_continue_at_once(strategy: str) -> None:
    assert Members(strategy, 3).next([*members(0, 2), *coming(3)]) == Membership(1, (0, 2))


def test_a_replacement_joins_once_the_others_have_recovered() -> None:
    run = Members("forward", 3)
    run.next(members(0, 2))
    assert run.next([*members(0, 2), *ready(3)]) is None
    assert run.next([*members(0, 2, of=1), *ready(3)]) == Membership(2, (0, 1, 2), {1: 3})
    assert run.next([*members(0, 2, of=1), *ready(3)]) is None


def test_a_replayed_step_waits_until_every_lost_member_is_replaced() -> None:
    run = Members("replay", 4)
    assert run.next([*members(0, 2), *ready(4), *coming(5)]) is None
    assert run.next([*members(0, 2), *ready(4, 5)]) == Membership(1, (0, 1, 2, 3), {1: 4, 3: 5})


def test_a_worker_that_dies_while_it_joins_is_lost_like_a_member() -> None:
    run = Members("forward", 3)
    run.next(members(0, 2))
    run.next([*members(0, 2, of=1), *ready(3)])
    assert run.next([*members(0, 2, of=1), *coming(4)]) == Membership(3, (0, 2))


def test_members_that_cannot_reach_each_other_get_a_new_membership() -> None:
    assert Members("forward", 3).next(members(0, 1, 2), broken=True) == Membership(1, (0, 1, 2))


def test_surplus_workers_sleep_and_wake_with_their_old_number() -> None:
    run = Members("forward", 4)
    run.wanted = 2
    assert run.next(members(0, 1, 2, 3)) == Membership(1, (0, 1), {}, asleep=(2, 3))
    run.wanted = 4
    assert run.next([*members(0, 1, 2, of=1), *ready(3)]) is None  # one has yet to fall asleep
    assert run.next([*members(0, 1, of=1), *ready(2, 3)]) == Membership(2, (0, 1, 2, 3), {2: 2, 3: 3})


def test_a_loss_keeps_workers_awake_that_were_about_to_sleep() -> None:
    run = Members("forward", 4)
    run.wanted = 2
    run.next(members(0, 1, 2, 3))
    assert run.next(members(0, 2, 3)) == Membership(2, (0, 2, 3))
    assert run.next(members(0, 2, 3, of=2)) == Membership(3, (0, 2), {}, asleep=(3,))


def test_a_loss_wakes_a_sleeping_worker() -> None:
    run = Members("forward", 3)
    run.wanted = 2
    run.next(members(0, 1, 2))
    assert run.next([*members(0, of=1), *ready(2)]) == Membership(2, (0,))
    assert run.next([*members(0, of=2), *ready(2)]) == Membership(3, (0, 2), {2: 2})


def replacement(seat: int, number: int) -> list[WorkerStatus]:
    return [WorkerStatus(seat=seat, is_ready=True, number=number)]


def test_a_sleeping_worker_does_not_take_the_number_of_a_lost_one() -> None:
    run = Members("replay", 3)
    run.wanted = 2
    run.next(members(0, 1, 2))
    assert run.next([*members(1, of=1), *ready(2)]) is None
    assert run.next([*members(1, of=1), *ready(2), *replacement(3, 0)]) == Membership(2, (0, 1), {0: 3})


def test_a_replacement_of_rank_0_joins_even_if_another_worker_must_sleep_for_it() -> None:
    run = Members("forward", 3)
    run.wanted = 2
    run.next(members(0, 1, 2))
    run.next([*members(1, of=1), *ready(2)])
    assert run.next([*members(1, of=2), *ready(2)]) == Membership(3, (1, 2), {2: 2})
    assert run.next([*members(1, 2, of=3), *replacement(3, 0)]) == Membership(4, (0, 1, 2), {0: 3})
    assert run.next(members(1, 2, 3, of=4)) == Membership(5, (0, 1), {}, asleep=(2,))


def test_a_spare_does_not_take_a_number_that_another_worker_is_to_get() -> None:
    run = Members("replay", 4)
    status = [*members(0, 1), *ready(4), WorkerStatus(seat=5, number=2)]
    assert run.next(status) is None
    assert run.next([*members(0, 1), *ready(4), *replacement(5, 2)]) == Membership(1, (0, 1, 2, 3), {2: 5, 3: 4})


@given(st.sampled_from(["forward", "replay", "skip"]), st.integers(2, 5), st.lists(st.integers(0, 99), max_size=40))
def test_no_two_seats_ever_share_a_number_and_the_world_grows_back(strategy: str, size: int, losses: list[int]) -> None:
    run, inside, waiting, fresh = Members(strategy, size), dict.fromkeys(range(size), 0), set[int](), size
    numbers = {number: number for number in range(size)}  # by seat

    def look() -> Membership | None:
        membership = run.next([*(WorkerStatus(seat=s, membership=n) for s, n in inside.items()), *ready(*waiting)])
        if membership:
            assert len({*membership.joining.values()}) == len(membership.joining)
            for number, seat in membership.joining.items():
                assert numbers.setdefault(seat, number) == number  # a process keeps its number for life
            assert set(membership.joining) <= set(membership.members) <= set(range(size))
            waiting.difference_update(membership.joining.values())
            inside.update(dict.fromkeys([*inside, *membership.joining.values()], membership.number))
            assert len(membership.members) == len(inside)
        return membership

    for loss in losses:
        if len(inside) > 1:
            del inside[sorted(inside)[loss % len(inside)]]
            waiting.add(fresh)
            fresh += 1
        if loss % 3:
            look()
    for _ in range(3):
        look()
    assert (len(inside), run.is_complete([WorkerStatus(seat=s, membership=n) for s, n in inside.items()])) == (
        size,
        True,
    )
