"""Whoever is stuck is found after a deadline that the run itself teaches, and whoever waits for it is not blamed."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.progress import Phase
from holdfast.supervise.stuck import GENEROUS, LEAST, TIMES, Elsewhere, Judge, Seen, Stuck

TRAINING = {"boundaries": 5, "posted": 9, "phase": Phase.TRAINING}


class Clock:
    """Looks at workers that stay as they are, twice a second, until one is found stuck."""

    def __init__(self, given: float | None = None, hang_after: float = 30.0, busy: float = 0.0) -> None:
        self.judge = Judge(given, hang_after)
        self.now, self.busy = 0.0, busy

    def look(self, *workers: Seen, elsewhere: Elsewhere | None = None) -> Stuck | None:
        self.now += 0.5
        return self.judge.look(workers, self.now, lambda rank: self.now * self.busy, elsewhere or Elsewhere())

    def until(
        self, *workers: Seen, most: float = 4000.0, elsewhere: Elsewhere | None = None
    ) -> tuple[float, int] | None:
        """After how many seconds without progress who is found stuck."""
        self.look(*workers, elsewhere=elsewhere)
        began = self.now
        while self.now - began < most:
            if found := self.look(*workers, elsewhere=elsewhere):
                return self.now - began, found.rank
        return None


def steps(clock: Clock, seconds: float) -> None:
    """A few steps of this length."""
    for boundaries in range(6):
        until = clock.now + seconds
        while clock.now < until:
            assert clock.look(Seen(rank=0, boundaries=boundaries, phase=Phase.TRAINING)) is None


def test_a_step_has_a_deadline_that_the_run_teaches() -> None:
    assert Clock().until(Seen(rank=0, **TRAINING)) == (pytest.approx(LEAST, abs=1), 0)
    clock = Clock()
    steps(clock, 60.0)
    assert clock.judge.step == pytest.approx(60 * TIMES, rel=0.05)
    clock.judge.begin()
    assert clock.until(Seen(rank=0, **TRAINING)) == (pytest.approx(60 * TIMES, rel=0.05), 0)  # the next attempt


def test_starts_restores_and_saves_have_more_time_and_as_long_as_bytes_move_there_is_no_end() -> None:
    early = Seen(rank=0, boundaries=1, phase=Phase.TRAINING)
    for seen in (Seen(rank=0), early, *(Seen(rank=0, boundaries=9, phase=Phase(phase)) for phase in (1, 3, 4))):
        assert Clock().until(seen) == (pytest.approx(GENEROUS * LEAST, abs=1), 0)
        assert Clock(2.0).until(seen) == (pytest.approx(GENEROUS * 2, abs=1), 0)
    clock = Clock(2.0)
    for moved in range(20):
        first = Seen(rank=0, phase=Phase.RESTORING, moved=moved)
        waits = Seen(rank=1, phase=Phase.RESTORING)
        assert clock.until(first, waits, most=5.0) is None
        assert clock.until(waits, most=5.0, elsewhere=Elsewhere(None, moved)) is None


def test_a_worker_that_computes_has_more_time_unless_the_user_said_how_much() -> None:
    assert Clock(busy=0.5).until(Seen(rank=0, **TRAINING)) == (pytest.approx(GENEROUS * LEAST, abs=1), 0)
    assert Clock(busy=0.01).until(Seen(rank=0, **TRAINING)) == (pytest.approx(LEAST, abs=1), 0)
    assert Clock(2.0, busy=0.5).until(Seen(rank=0, **TRAINING)) == (pytest.approx(2, abs=1), 0)
    for limit in (None, 2.0):
        assert Clock(limit, busy=0.5).until(Seen(rank=0)) is None  # it prepares its data, or never attaches
    assert Clock().until(Seen(rank=0, boundaries=9, phase=Phase.DONE)) is None  # it uploads its model


@given(st.lists(st.tuples(st.integers(2, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_only_whoever_is_furthest_behind_is_blamed(places: list[tuple[int, int]]) -> None:
    workers = [
        Seen(rank=rank, boundaries=boundaries, posted=posted, phase=Phase.TRAINING)
        for rank, (boundaries, posted) in enumerate(places)
    ]
    found = Clock(2.0).until(*workers)
    assert found is not None
    assert found[1] == places.index(min(places))
    ahead = Clock(2.0).until(*workers, most=60.0, elsewhere=Elsewhere((1, 0)))
    assert ahead is None  # they wait for a worker of another node


def test_of_several_that_are_equally_far_all_must_be_stuck() -> None:
    waits = Seen(rank=0, boundaries=5, posted=9, phase=Phase.TRAINING)
    saves = Seen(rank=1, boundaries=5, posted=9, phase=Phase.SAVING)
    assert Clock(2.0).until(waits, saves) == (pytest.approx(GENEROUS * 2, abs=1), 0)


def test_a_stopped_worker_is_found_however_far_it_is() -> None:
    clock = Clock(hang_after=3.0)
    assert clock.until(Seen(rank=0, **TRAINING), Seen(rank=1, boundaries=9, stopped=True)) == (
        pytest.approx(3, abs=1),
        1,
    )
    assert Clock(hang_after=3.0).until(Seen(rank=0), most=60.0) is None


def test_a_pause_of_our_own_counts_for_little() -> None:
    clock = Clock(5.0, hang_after=5.0)
    stopped = Seen(rank=0, stopped=True, **TRAINING)
    clock.look(stopped)
    clock.now += 3600.0
    assert clock.look(stopped) is None


def test_a_worker_whose_script_has_ended_is_not_stuck_but_overdue() -> None:
    def overdue(clock: Clock) -> Iterator[float]:
        done = Seen(rank=0, boundaries=9, phase=Phase.ENDED)
        for _ in range(5000):
            assert clock.look(done) is None
            if clock.judge.overdue(done, lambda rank: 0.0):
                yield clock.now

    assert next(overdue(Clock())) == pytest.approx(LEAST, abs=2)
    assert next(overdue(Clock(2.0))) == pytest.approx(GENEROUS * 2, abs=2)


def test_the_reason_names_the_option() -> None:
    clock, seen = Clock(10.0), Seen(rank=1, **TRAINING)
    while not (found := clock.look(seen)):
        pass
    assert found.because == "passed no step boundary for 10 s (deadline 10 s; change it with --stuck-after)"
