"""A worker that hangs is found after a deadline learned from the run, and its peers are not blamed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.progress import Phase
from holdfast.supervise.hang_detection import (
    FOUND_WITHIN,
    GENEROUS,
    LEAST,
    SOON,
    STOPPED,
    TIMES,
    Hang,
    HangDetector,
    RemoteProgress,
    WorkerLook,
)

TRAINING = {"boundaries": 5, "posted": 9, "phase": Phase.TRAINING}


class Clock:
    """Looks at workers that do not change, four times a second, until one is found to hang."""

    def __init__(self, given: float | None = None, busy: float = 0.0, live: bool = False) -> None:
        self.detector = HangDetector(given, live=live)
        self.now, self.busy, self.used = 0.0, busy, 0.0

    def look(self, *workers: WorkerLook, remote: RemoteProgress | None = None) -> Hang | None:
        """Return the first worker that hangs, if any."""
        return next(iter(self.all(*workers, remote=remote)), None)

    def all(self, *workers: WorkerLook, remote: RemoteProgress | None = None) -> list[Hang]:
        self.now += 0.25
        self.used += 0.25 * self.busy
        return self.detector.look(workers, self.now, lambda seat: self.used, remote or RemoteProgress())

    def until(
        self, *workers: WorkerLook, most: float = 2 * GENEROUS * LEAST, remote: RemoteProgress | None = None
    ) -> tuple[float, int] | None:
        """Return the seconds without progress after which a worker is found to hang, and its seat."""
        self.look(*workers, remote=remote)
        began = self.now
        while self.now - began < most:
            if found := self.look(*workers, remote=remote):
                return self.now - began, found.seat
        return None


def steps(clock: Clock, seconds: float) -> None:
    """Pass a few steps of this length."""
    for boundaries in range(6):
        until = clock.now + seconds
        while clock.now < until:
            assert clock.look(WorkerLook(seat=0, boundaries=boundaries, phase=Phase.TRAINING)) is None


def test_the_deadline_of_a_step_is_learned_from_the_run() -> None:
    assert Clock().until(WorkerLook(seat=0, **TRAINING)) == (pytest.approx(LEAST, abs=1), 0)
    clock = Clock()
    steps(clock, 60.0)
    assert clock.detector.step == pytest.approx(60 * TIMES, rel=0.05)
    clock.detector.begin()
    assert clock.until(WorkerLook(seat=0, **TRAINING)) == (pytest.approx(60 * TIMES, rel=0.05), 0)  # the next attempt


def test_starts_restores_and_saves_have_more_time_and_no_deadline_while_bytes_move() -> None:
    early = WorkerLook(seat=0, boundaries=1, phase=Phase.TRAINING)
    for seen in (
        WorkerLook(seat=0),
        early,
        *(WorkerLook(seat=0, boundaries=9, phase=Phase(phase)) for phase in (1, 3, 4)),
    ):
        assert Clock().until(seen) == (pytest.approx(GENEROUS * LEAST, abs=1), 0)
        assert Clock(2.0).until(seen) == (pytest.approx(GENEROUS * 2, abs=1), 0)
    clock = Clock(2.0)
    for moved in range(20):
        first = WorkerLook(seat=0, phase=Phase.RESTORING, moved=moved)
        waits = WorkerLook(seat=1, phase=Phase.RESTORING)
        assert clock.until(first, waits, most=5.0) is None
        assert clock.until(waits, most=5.0, remote=RemoteProgress(None, moved)) is None


def test_a_worker_that_computes_has_more_time_unless_the_user_set_the_timeout() -> None:
    assert Clock(busy=0.5).until(WorkerLook(seat=0, **TRAINING)) == (pytest.approx(GENEROUS * LEAST, abs=1), 0)
    assert Clock(busy=0.01).until(WorkerLook(seat=0, **TRAINING)) == (pytest.approx(LEAST, abs=1), 0)
    assert Clock(2.0, busy=0.5).until(WorkerLook(seat=0, **TRAINING)) == (pytest.approx(2, abs=1), 0)
    for limit in (None, 2.0):
        assert Clock(limit, busy=0.5).until(WorkerLook(seat=0)) is None  # it prepares its data, or never attaches
    assert Clock().until(WorkerLook(seat=0, boundaries=9, phase=Phase.DONE)) is None  # it uploads its model


@given(st.lists(st.tuples(st.integers(2, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_only_the_worker_furthest_behind_is_blamed(places: list[tuple[int, int]]) -> None:
    workers = [
        WorkerLook(seat=seat, boundaries=boundaries, posted=posted, phase=Phase.TRAINING)
        for seat, (boundaries, posted) in enumerate(places)
    ]
    found = Clock(2.0).until(*workers)
    assert found is not None
    assert found[1] == places.index(min(places))
    ahead = Clock(2.0).until(*workers, most=60.0, remote=RemoteProgress((1, 0)))
    assert ahead is None  # they wait for a worker of another node


def test_of_workers_at_the_same_place_all_must_be_overdue() -> None:
    waits = WorkerLook(seat=0, boundaries=5, posted=9, phase=Phase.TRAINING)
    saves = WorkerLook(seat=1, boundaries=5, posted=9, phase=Phase.SAVING)
    assert Clock(2.0).until(waits, saves) == (pytest.approx(GENEROUS * 2, abs=1), 0)


def test_a_suspended_worker_is_found_wherever_it_is() -> None:
    clock = Clock(3.0)
    assert clock.until(WorkerLook(seat=0, **TRAINING), WorkerLook(seat=1, boundaries=9, stopped=True)) == (
        pytest.approx(3, abs=1),
        1,
    )
    assert Clock(3.0).until(WorkerLook(seat=0), most=15.0) is None


def test_a_pause_of_our_own_counts_for_little() -> None:
    clock = Clock(5.0)
    stopped = WorkerLook(seat=0, stopped=True, **TRAINING)
    clock.look(stopped)
    clock.now += 3600.0
    assert clock.look(stopped) is None


def test_a_worker_whose_script_has_ended_does_not_hang_but_becomes_overdue() -> None:
    def overdue(clock: Clock) -> Iterator[float]:
        done = WorkerLook(seat=0, boundaries=9, phase=Phase.ENDED)
        for _ in range(5000):
            assert clock.look(done) is None
            if clock.detector.is_overdue(done, lambda seat: 0.0):
                yield clock.now

    assert next(overdue(Clock())) == pytest.approx(LEAST, abs=2)
    assert next(overdue(Clock(2.0))) == pytest.approx(GENEROUS * 2, abs=2)


def test_the_reason_names_the_option() -> None:
    clock, seen = Clock(10.0), WorkerLook(seat=1, **TRAINING)
    while not (found := clock.look(seen)):
        pass
    assert found.because == "passed no step boundary for 10 s (deadline 10 s; change it with --hang-timeout)"


def members(*boundaries: int, phase: Phase = Phase.TRAINING) -> list[WorkerLook]:
    """Return members that have passed these boundaries."""
    return [WorkerLook(seat=seat, boundaries=count, phase=phase) for seat, count in enumerate(boundaries)]


def learned(step: float = 0.01, busy: float = 0.0, **how: Any) -> Clock:
    """Return a clock of a live run that has seen four members reach boundary 1000, with this time per step."""
    clock = Clock(busy=busy, live=True, **how)
    for look in range(9):
        assert clock.look(*members(*[round(1000 - (8 - look) * 0.25 / step)] * 4)) is None
    return clock


def test_with_live_recovery_an_idle_worker_that_others_wait_for_is_found_soon() -> None:
    assert learned().until(*members(1001, 1001, 1000, 1001)) == (pytest.approx(SOON, abs=0.5), 2)
    assert learned(0.125).until(*members(1001, 1001, 1000, 1001)) == (pytest.approx(0.125 * TIMES, abs=0.5), 2)
    assert learned(given=5.0).until(*members(1001, 1001, 1000, 1001)) == (pytest.approx(5.0, abs=0.5), 2)
    assert Clock().until(*members(1001, 1001, 1000, 1001), most=LEAST / 2) is None  # a restart is dear


def test_with_live_recovery_the_deadline_is_long_if_no_worker_is_seen_to_wait() -> None:
    assert learned().until(*members(1001, 1001, 1001, 1001)) == (pytest.approx(LEAST, abs=1), 0)
    for phase in (Phase.SAVING, Phase.CLOSING, Phase.RESTORING):
        behind = WorkerLook(seat=2, boundaries=1000, phase=phase)
        assert learned().until(*members(1001, 1001), behind, most=LEAST) is None


def test_a_worker_that_computes_waits_for_a_disk_or_moves_bytes_is_not_idle() -> None:
    waits = members(1001, 1001)
    behind = WorkerLook(seat=2, boundaries=1000, phase=Phase.TRAINING)
    assert learned(busy=0.1).until(*waits, behind, most=LEAST) is None
    assert learned().until(*waits, replace(behind, asleep=False), most=LEAST / 2) is None
    clock = learned()
    for moved in range(100):
        assert clock.look(*waits, replace(behind, moved=moved)) is None
    clock.busy = 1.0
    assert clock.until(*waits, behind, most=20.0) is None
    clock.busy = 0.0
    found = clock.until(*waits, behind)
    assert found is not None
    assert found[0] <= 2 * SOON + 0.5


def test_a_worker_that_comes_late_from_an_evaluation_does_not_hang() -> None:
    clock = learned()
    for look in range(400):  # no worker waits for another while all evaluate
        assert clock.look(*members(1001, 1001, 1001), WorkerLook(seat=3, boundaries=1001, asleep=look % 5 > 0)) is None
    assert clock.until(*members(1002, 1002, 1002, 1001), most=SOON - 0.5) is None
    assert clock.until(*members(1003, 1003, 1003, 1003), most=60.0) is None


def test_a_usual_step_is_learned_although_one_took_long() -> None:
    clock = learned()
    for _ in range(40):
        assert clock.look(*members(1001, 1001, 1001, 1001)) is None
    assert clock.detector.step == LEAST
    assert clock.look(*members(1002, 1002, 1002, 1002)) is None
    assert clock.until(*members(1003, 1003, 1003, 1002)) == (pytest.approx(SOON, abs=0.5), 3)


def test_each_idle_worker_that_is_replaced_doubles_the_deadline() -> None:
    clock = learned()
    for times in range(4):
        clock.detector.begin()
        assert clock.until(*members(1001, 1000, 1001, 1001)) == (pytest.approx(SOON * 2**times, abs=0.5), 1)
    clock = learned()
    while not (stuck := clock.look(*members(1001, 1000, 1001, 1001))):
        pass
    assert stuck.because == (
        "neither passed a step boundary nor computed for 1.8 s while others waited for it (deadline 1.5 s, from now on "
        "3 s; change it with --hang-timeout)"
    )


def test_a_member_that_does_not_come_to_recover_is_blamed_wherever_it_is() -> None:
    there = members(1000, 1000, phase=Phase.RECOVERING)
    absent = WorkerLook(seat=2, boundaries=1003, phase=Phase.TRAINING)
    comes = WorkerLook(seat=3, phase=Phase.STARTING, is_member=False)
    ready = replace(comes, phase=Phase.JOINING)
    joins = replace(ready, is_member=True)
    for others in ([], [comes], [ready], [joins]):
        assert learned().until(*there, absent, *others) == (pytest.approx(SOON, abs=0.5), 2)
    for others, blamed in (([], 0), ([ready], 0), ([joins], 3)):
        assert learned(busy=0.9).until(*there, *others) == (pytest.approx(FOUND_WITHIN, abs=0.5), blamed)
    assert learned().until(*there, comes) == (pytest.approx(GENEROUS * LEAST, abs=1), 3)  # the others wait for it


def test_a_worker_in_reserve_does_not_keep_others_waiting() -> None:
    for phase in (Phase.STARTING, Phase.JOINING):
        for is_member in (False, phase is Phase.JOINING):
            comes = WorkerLook(seat=0, phase=phase, is_member=is_member)
            assert learned().until(comes, *members(0, 1001, 1000, 1001)[1:]) == (pytest.approx(SOON, abs=0.5), 2)
            assert learned().until(comes, *members(0, 1001, 1001, 1001)[1:], most=LEAST / 2) is None
    assert learned().until(WorkerLook(seat=0, phase=Phase.JOINING, is_member=False), most=GENEROUS * LEAST) is None
    assert learned().until(WorkerLook(seat=0, is_member=False)) == (pytest.approx(GENEROUS * LEAST, abs=1), 0)


def test_with_live_recovery_suspended_workers_are_found_soon_and_together() -> None:
    clock, stopped = learned(), [replace(worker, stopped=True) for worker in members(1001, 1001, 1001, 1001)]
    runs = members(1001)
    found: list[Hang] = []
    while not found:
        found = clock.all(*runs, *stopped[1:3])
    assert [hang.seat for hang in found] == [1, 2]
    assert found[0].because == "was suspended for 1.8 s (limit 1.5 s; change it with --hang-timeout)"
    assert learned(given=4.0).until(*runs, stopped[1]) == (pytest.approx(4.0, abs=0.5), 1)


def test_a_worker_that_waits_for_a_suspended_one_is_not_blamed() -> None:
    waits, stopped = members(1001, 1000), replace(members(1000, 1000, 1000)[2], stopped=True)
    assert learned(given=60.0).until(*waits, stopped, most=50.0) is None
    clock = learned()
    assert clock.until(*waits, stopped, most=SOON - 0.5) is None
    assert clock.until(*waits, most=SOON - 0.5) is None  # it was given up: the one behind has all of its time
    clock = learned()
    assert clock.until(*waits, most=SOON - 0.3) is None
    clock.detector.reset_waits()  # there is another membership
    assert clock.until(*waits, most=SOON - 0.3) is None


def test_if_all_workers_are_suspended_the_user_has_more_time_to_resume_them() -> None:
    stopped = [replace(worker, stopped=True) for worker in members(1001, 1001, 1001)]
    assert learned().until(*stopped) == (pytest.approx(STOPPED, abs=0.5), 0)
    clock = learned()
    assert clock.until(*stopped, most=STOPPED - 1) is None
    assert clock.look(members(1001)[0], *stopped[1:]) is None  # one after the other goes on
    assert clock.look(*members(1001, 1001), stopped[2]) is None
    assert clock.until(*members(1001, 1001, 1001), most=STOPPED) is None


def test_a_silent_worker_without_a_loop_is_given_up_sooner_once_a_peer_has_ended() -> None:
    alone, left = Clock(), Clock()
    assert alone.until(WorkerLook(seat=0), most=LEAST + 10) is None
    assert left.until(WorkerLook(seat=0, has_done_peers=True), most=LEAST + 10) == (LEAST + 0.25, 0)
    busy = Clock(busy=1.0)
    assert busy.until(WorkerLook(seat=0, has_done_peers=True)) is None


@pytest.mark.parametrize(("phase", "within"), [(Phase.TRAINING, 60.0), (Phase.SAVING, 360.0), (Phase.CLOSING, 360.0)])
def test_a_worker_that_was_asked_to_stop_is_late_after_a_minute_of_silence_and_later_if_it_saves(
    phase: Phase, within: float
) -> None:
    clock, worker = Clock(busy=1.0), WorkerLook(seat=0, phase=phase)
    for _ in range(2000):
        clock.look(worker)
    clock.detector.reset_idle()
    silent = 0.0
    while not clock.detector.is_late_to_stop(worker) and silent < 1000:
        clock.look(worker)
        silent += 0.25
    assert silent == within + 0.25
