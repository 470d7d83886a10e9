"""A worker that is slower than the others in nearly all of its latest steps is named, and random noise names none."""

from collections.abc import Callable

import numpy as np
import pytest

from holdfast.supervise.stragglers import FIRST, LATE, SlowSteps, StragglerDetector
from seeds import seeds

Times = Callable[[int, int], float | None]


def watched(times: Times, steps: int, *, workers: int = 4, every: int = 5) -> list[SlowSteps]:
    """Return the reports of a detector that looks at `workers` workers every few steps; `times` is by seat and step."""
    detector = StragglerDetector()
    reports: list[SlowSteps] = []
    for reached in range(0, steps + 1, every):
        own_times = {seat: lambda step, seat=seat: times(seat, step) for seat in range(workers)}
        reports += detector.look(own_times, reached)
    return reports


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_worker_that_becomes_slow_is_named_within_50_steps(factor: float) -> None:
    noise = np.random.default_rng(1).lognormal(0, 0.1, (4, 1000))

    def times(seat: int, step: int) -> float:
        return 0.01 * noise[seat, step] * (factor if seat == 2 and step >= 500 else 1)

    assert watched(times, 499) == []
    first = watched(times, 550)[0]
    assert first.seat == 2
    assert 490 <= first.since <= 510
    assert first.ratio == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("seed", seeds(20))
def test_noise_on_a_busy_machine_names_no_worker(seed: int) -> None:
    noise = np.random.default_rng(seed).lognormal(0, 0.5, (4, 3000))
    assert watched(lambda seat, step: 0.01 * noise[seat, step], 3000) == []


def test_a_pause_of_one_step_is_not_slowness() -> None:
    assert watched(lambda seat, step: 5.0 if seat == 0 and step % 50 == 0 else 0.01, 500) == []


def test_steps_that_are_longer_for_all_workers_make_no_worker_slow() -> None:
    assert watched(lambda _, step: 0.01 if step < 100 else 0.1, 300) == []


def test_the_first_steps_of_a_worker_do_not_count() -> None:
    assert watched(lambda seat, step: 9.0 if seat == 0 and step < FIRST else 0.01, 100) == []


def test_a_difference_of_microseconds_does_not_count() -> None:
    assert watched(lambda seat, _: 0.0004 if seat == 0 else 0.0001, 300) == []


def test_the_end_of_a_slow_period_is_reported_with_the_seconds_that_the_others_waited() -> None:
    def times(seat: int, step: int) -> float:
        return 0.03 if seat == 1 and 100 <= step < 300 else 0.01

    last = watched(times, 600)[-1]
    assert last.is_over
    assert last.seconds == pytest.approx(200 * 0.02, rel=0.05)


def test_a_long_slow_period_is_reported_again_each_time_it_has_doubled() -> None:
    reports = watched(lambda seat, _: 0.02 if seat == 0 else 0.01, 5000)
    assert 5 <= len(reports) <= 9
    assert reports[-1].until > 2 * reports[-2].until - reports[-2].since - 10


def test_a_slow_worker_that_leaves_ends_its_period() -> None:
    detector = StragglerDetector()
    times = {0: 0.03, 1: 0.01, 2: 0.01}
    for reached in range(0, 100, 5):
        detector.look({seat: lambda _, own=own: own for seat, own in times.items()}, reached)
    del times[0]
    (report,) = detector.look({seat: lambda _, own=own: own for seat, own in times.items()}, 105)
    assert (report.seat, report.is_over) == (0, True)


def test_times_that_arrive_late_are_waited_for_and_times_that_never_arrive_are_not() -> None:
    known = [0]  # the first step whose times have not arrived
    detector = StragglerDetector()
    reports: list[SlowSteps] = []
    for reached in range(0, 200, 5):
        known[0] = reached - LATE // 2
        slow = {
            seat: lambda step, seat=seat: (0.03 if seat == 0 else 0.01) if step < known[0] else None
            for seat in (0, 1, 2)
        }
        reports += detector.look(slow, reached)
    assert reports
    assert watched(lambda *_: None, 1000) == []


def test_a_single_worker_is_compared_with_none() -> None:
    assert watched(lambda *_: 0.01, 100, workers=1) == []


def test_at_the_end_of_an_attempt_slow_workers_get_a_final_report() -> None:
    detector = StragglerDetector()
    for reached in range(0, 100, 5):
        detector.look({seat: lambda _, seat=seat: 0.03 if seat == 0 else 0.01 for seat in range(3)}, reached)
    (report,) = detector.end()
    assert (report.seat, report.is_over) == (0, True)
    assert detector.end() == []
