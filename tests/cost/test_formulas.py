"""Costs add up, nothing unexplained is hidden, and the optimal intervals are optimal."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cost.formulas import daly_interval, expected_run_time, expected_waste, goodput, young_interval
from holdfast.errors import BadInput
from holdfast.stall import Stall

seconds = st.floats(0, 1e6)


def test_goodput_is_committed_steps_per_second_of_wall_clock() -> None:
    assert goodput(500, 100.0) == 5
    assert goodput(0, 1.0) == 0


def test_what_no_part_of_a_stall_explains_is_shown() -> None:
    stall = Stall(waited=2.0, snapshot=0.5, enqueue=0.1, backpressure=0.2, write=0.7, sync=0.3)
    assert stall.unaccounted == pytest.approx(0.2)


def test_parts_that_exceed_the_stall_show_as_negative_not_as_zero() -> None:
    assert Stall(waited=1.0, snapshot=0.8, sync=0.5).unaccounted == pytest.approx(-0.3)


def test_writing_that_overlaps_training_is_no_part_of_the_stall() -> None:
    assert Stall(waited=0.5, snapshot=0.5, overlapped=30.0).unaccounted == 0


@given(st.lists(st.builds(Stall, waited=seconds, snapshot=seconds, write=seconds, overlapped=seconds)))
def test_the_stalls_of_saves_add_up_part_by_part(stalls: list[Stall]) -> None:
    total = sum(stalls, Stall())
    assert total.waited == pytest.approx(sum(stall.waited for stall in stalls))
    assert total.overlapped == pytest.approx(sum(stall.overlapped for stall in stalls))
    assert total.unaccounted == pytest.approx(sum(stall.unaccounted for stall in stalls), abs=1e-3)


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_interval_is_the_one_of_his_figures(mtbf: float, minutes: float) -> None:
    assert daly_interval(5.0, mtbf) == pytest.approx(minutes, rel=0.01)


def test_youngs_interval_is_the_root_of_twice_dump_times_mtbf() -> None:
    assert young_interval(2.0, 100.0) == 20


def best(dump: float, mtbf: float) -> tuple[float, float]:
    """The interval of least expected run time, and that time, on a fine grid."""
    grid = np.geomspace(1e-4, 4, 200_001) * mtbf
    times = expected_run_time(grid, solve=1.0, dump=dump, mtbf=mtbf)
    return float(grid[np.argmin(times)]), float(np.min(times))


@pytest.mark.parametrize("dump", [1e-5, 1e-3, 0.01, 0.1, 0.5, 1.0, 1.9, 2.0, 5.0])
def test_dalys_interval_takes_within_a_fifth_of_a_percent_of_the_least_time(dump: float) -> None:
    mtbf = 3600.0
    _, least = best(dump * mtbf, mtbf)
    at_daly = expected_run_time(daly_interval(dump * mtbf, mtbf), solve=1.0, dump=dump * mtbf, mtbf=mtbf)
    assert least * (1 - 1e-9) <= float(at_daly) <= least * 1.002


@pytest.mark.parametrize(("dump", "error"), [(1e-6, 1e-3), (1e-4, 1e-2), (1e-2, 0.1)])
def test_youngs_interval_is_right_in_the_limit_of_cheap_dumps(dump: float, error: float) -> None:
    optimum, _ = best(dump, 1.0)
    assert young_interval(dump, 1.0) == pytest.approx(optimum, rel=error)


def test_youngs_interval_wastes_time_where_dumps_are_dear() -> None:
    _, least = best(1.0, 1.0)
    assert float(expected_run_time(young_interval(1.0, 1.0), solve=1.0, dump=1.0, mtbf=1.0)) > 1.1 * least


def test_the_expected_run_time_is_that_of_simulated_poisson_failures() -> None:
    # A segment of work and dump is tried, each time after a restart, until no failure falls into restart or segment.
    rng, work, dump, restart, mtbf = np.random.default_rng(0), 5.0, 1.0, 2.0, 10.0
    total = 0.0
    for _ in range(40_000):
        needed = work + dump
        while (gap := rng.exponential(mtbf)) < needed:
            total += gap
            needed = restart + work + dump
        total += needed
    model = expected_run_time(work, solve=work, dump=dump, mtbf=mtbf, restart=restart)
    assert total / 40_000 == pytest.approx(float(model), rel=0.02)


def test_waste_is_what_is_left_of_the_run_time_when_the_work_is_taken_away() -> None:
    time = float(expected_run_time(10.0, solve=1000.0, dump=1.0, mtbf=500.0, restart=3.0))
    assert float(expected_waste(10.0, dump=1.0, mtbf=500.0, restart=3.0)) == pytest.approx((time - 1000) / time)


def test_an_interval_far_beyond_the_mtbf_never_ends() -> None:
    assert expected_run_time([1e9], solve=1.0, dump=1.0, mtbf=1.0).tolist() == [math.inf]
    assert expected_waste([1e9], dump=1.0, mtbf=1.0).tolist() == [1.0]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: goodput(1, 0.0), r"wall time must be positive and finite \(got 0\)"),
        (lambda: goodput(-1, 1.0), r"committed steps must be finite and 0 or more \(got -1\)"),
        (lambda: Stall(waited=-1.0), r"the waited time of a stall must be finite and 0 or more \(got -1\)"),
        (lambda: Stall(sync=math.nan), r"the sync time of a stall must be finite and 0 or more \(got nan\)"),
        (lambda: young_interval(0.0, 1.0), r"dump time must be positive and finite \(got 0\)"),
        (lambda: daly_interval(1.0, math.inf), r"mean time between failures must be positive and finite \(got inf\)"),
        (lambda: expected_run_time([1.0, 0.0], solve=1.0, dump=1.0, mtbf=1.0), "must be greater than 0"),
    ],
)
def test_impossible_times_are_refused_in_one_line(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as refusal:
        call()
    assert "\n" not in str(refusal.value)
