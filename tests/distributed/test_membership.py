"""Memberships and reports are exchanged in messages whose number and length do not grow with the square of the workers."""

import json
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # they are public

from holdfast.distributed.membership import (
    LIVE,
    Coordination,
    Membership,
    MembershipWatch,
    from_spans,
    publish,
    to_spans,
)
from holdfast.live.settlement import MemberReport


@given(st.lists(st.integers(0, 50)))
def test_numbers_come_back_from_spans_in_their_order(numbers: list[int]) -> None:
    assert from_spans(json.loads(json.dumps(to_spans(numbers)))) == tuple(numbers)


@given(
    st.sets(st.integers(0, 30)), st.dictionaries(st.integers(0, 30), st.integers(31, 99)), st.sets(st.integers(0, 30))
)
def test_a_membership_comes_back_from_json(members: set[int], joining: dict[int, int], asleep: set[int]) -> None:
    membership = Membership(3, tuple(sorted({*members, *joining})), joining, tuple(sorted(asleep)))
    assert Membership.from_json(json.loads(json.dumps(membership.to_json()))) == membership


def test_a_membership_of_16384_workers_of_which_one_is_lost_is_a_short_message() -> None:
    members = tuple(number for number in range(16384) if number != 5000)
    assert len(json.dumps(Membership(1, members).to_json())) < 100


def exchanged(reports: list[MemberReport]) -> tuple[list[dict[int, MemberReport]], Any]:
    """Return what each of several members gets when they exchange `reports`, and the store that they used."""
    store = HashStore()
    members = tuple(range(len(reports)))
    results: list[dict[int, MemberReport]] = [{} for _ in reports]

    def exchange(member: int) -> None:
        coordination = Coordination(member, members, lambda: store, seat=member)
        coordination._connection = PrefixStore(LIVE, store)
        results[member] = coordination.exchange(members, reports[member].to_json(), MemberReport.from_json)

    threads = [threading.Thread(target=exchange, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results, store


def test_every_member_gets_the_reports_of_all_members() -> None:
    reports = [MemberReport(step=5, basis=(0, 1, 2), buckets=(True, member > 0)) for member in range(3)]
    results, _ = exchanged(reports)
    assert results == [dict(enumerate(reports))] * 3


def test_equal_reports_are_written_and_decoded_once() -> None:
    (result, *_), store = exchanged([MemberReport(step=5, basis=tuple(range(64)), members=tuple(range(64)))] * 64)
    assert len({id(report) for report in result.values()}) == 1
    assert len(store.get(f"{LIVE}/stand/0/all")) < 1000


def await_answer(worker: Coordination, number: int) -> None:
    """Wait until `worker` has answered membership `number`."""
    deadline = time.monotonic() + 30
    while worker._answered < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def answer(store: Store, number: int, member: int, step: int) -> None:
    """Answer membership `number` for `member`: others can join before `step`."""
    store.set(f"next/{number}/{member}", str(step))
    store.add(f"next/{number}/count", 1)


def test_the_nearest_boundary_of_all_members_is_announced_once() -> None:
    store = HashStore()
    members = (0, 1, 2)
    workers = [Coordination(member, members, lambda: store, seat=member) for member in members]
    for steps, worker in enumerate(workers):
        worker.gate.passes(9 + steps)  # they have entered steps 9, 10 and 11
        worker.listen(lambda: None)
    publish(PrefixStore(LIVE, store), Membership(1, (0, 1, 2, 3), {3: 7}))
    for worker in workers:
        await_answer(worker, 1)
    assert [worker.has_joiners_at(11) for worker in workers] == [False] * 3
    assert [worker.has_joiners_at(12) for worker in workers] == [True] * 3


def worker_that_a_third_one_joins() -> tuple[Coordination, PrefixStore]:
    """Return a worker that has passed step 3 and answered to membership 1, and the store of memberships."""
    store = HashStore()
    shared = PrefixStore(LIVE, store)
    worker = Coordination(0, (0, 1), lambda: store, seat=0)
    worker.gate.passes(3)
    worker.listen(lambda: None)
    publish(shared, Membership(1, (0, 1, 2), {2: 7}))
    await_answer(worker, 1)
    return worker, shared


def test_a_worker_that_waits_for_one_membership_also_waits_for_the_one_that_replaces_it() -> None:
    worker, shared = worker_that_a_third_one_joins()
    joined: list[bool] = []
    waiting = threading.Thread(target=lambda: joined.append(worker.has_joiners_at(4)))
    waiting.start()
    publish(shared, Membership(2, (0, 1)))  # worker 2 has died
    await_answer(worker, 2)
    answer(shared, 2, member=1, step=4)  # all members have answered 4, and so all enter membership 2 before step 4
    waiting.join(30)
    assert (joined, worker.agreed) == ([True], 2)


def test_a_worker_that_begins_a_step_answers_a_later_step() -> None:
    worker, shared = worker_that_a_third_one_joins()
    answer(shared, 1, member=1, step=6)
    assert not worker.has_joiners_at(4)
    publish(shared, Membership(2, (0, 1)))
    await_answer(worker, 2)
    shared.wait(["next/2/0"], timedelta(seconds=30))
    assert int(shared.get("next/2/0")) == 5


def test_a_watch_that_is_late_does_not_break_the_connections_of_the_membership_that_its_worker_has_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, entered, has_lost = HashStore(), threading.Event(), Membership.has_lost

    def look_late(membership: Membership, members: Collection[int]) -> bool:
        if isinstance(threading.current_thread(), MembershipWatch):
            assert entered.wait(30)
        return has_lost(membership, members)

    monkeypatch.setattr(Membership, "has_lost", look_late)
    hung_up: list[int] = []
    worker = Coordination(0, (0, 1), lambda: store, seat=0)
    worker.listen(lambda: hung_up.append(worker.number))
    publish(PrefixStore(LIVE, store), Membership(1, (0, 1), {1: 7}))
    assert worker.next().number == 1
    entered.set()
    shared = PrefixStore(LIVE, store)
    answer(shared, 2, member=1, step=4)
    publish(shared, Membership(2, (0, 1, 2), {2: 8}))
    shared.wait(["next/2/all"], timedelta(seconds=30))  # after the watch has handled membership 1
    assert hung_up == []


def test_a_worker_enters_a_membership_after_the_connections_of_the_one_before_are_broken() -> None:
    store, begun, order = HashStore(), threading.Event(), list[str]()
    worker = Coordination(0, (0, 1), lambda: store, seat=0)

    def hang_up() -> None:
        begun.set()
        time.sleep(0.1)
        order.append("hung up")

    worker.listen(hang_up)
    publish(PrefixStore(LIVE, store), Membership(1, (0, 1), {1: 7}))
    assert begun.wait(30)
    worker.next()
    order.append("entered")
    assert order == ["hung up", "entered"]


def test_a_change_of_the_members_opens_no_connection() -> None:
    store, opened = HashStore(), []
    worker = Coordination(0, (0, 1), lambda: opened.append(1) or store, seat=0)  # type: ignore[func-returns-value]
    worker.listen(lambda: None)
    before = len(opened)
    publish(PrefixStore(LIVE, store), Membership(1, (0, 1, 2), {2: 7}))
    PrefixStore(LIVE, store).set("next/1/1", "5")
    PrefixStore(LIVE, store).add("next/1/count", 1)
    store.wait([f"{LIVE}/next/1/all"], timedelta(seconds=30))
    assert len(opened) == before
