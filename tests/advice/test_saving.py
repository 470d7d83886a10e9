"""The intervals of Young and Daly are optimal where their authors say."""

import math

import numpy as np
import pytest

from daly import expected_run_time
from holdfast.advice.saving import daly_interval, young_interval


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


def test_an_interval_far_beyond_the_mtbf_never_ends() -> None:
    assert expected_run_time([1e9], solve=1.0, dump=1.0, mtbf=1.0).tolist() == [math.inf]
