"""Failure schedules: a seed determines them, and they can be stored and read back."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure, at, geometric_steps, lost_blocks

seeds = st.integers(0, 2**32)


@given(st.floats(1, 100), st.integers(2, 200), seeds)
def test_geometric_steps_lie_inside_the_run_and_depend_on_the_seed_alone(mean: float, end: int, seed: int) -> None:
    steps = geometric_steps(mean, end, 20, seed)
    assert np.all((steps >= 1) & (steps < end))
    assert np.array_equal(steps, geometric_steps(mean, end, 20, seed))


def test_geometric_steps_have_the_requested_mean() -> None:
    steps = geometric_steps(30, 10_000, 20_000, seed=1)
    assert steps.mean() == pytest.approx(30, rel=0.03)  # 20,000 draws: standard error 0.7 %


@given(st.integers(1, 200), st.floats(0.01, 1), seeds)
def test_lost_blocks_are_distinct_and_make_up_the_fraction(count: int, fraction: float, seed: int) -> None:
    lost = lost_blocks(count, fraction, np.random.default_rng(seed))
    assert len(np.unique(lost)) == len(lost) == max(1, round(fraction * count))
    assert lost.max() < count


def test_a_schedule_survives_json() -> None:
    schedule = at([400, 12], kind="kill", point="backward", targets=(2, 3))
    assert [failure.step for failure in schedule] == [12, 400]
    written = json.dumps([failure.to_json() for failure in schedule])
    assert tuple(Failure.from_json(item) for item in json.loads(written)) == schedule


@pytest.mark.parametrize(
    "make",
    [
        lambda: Failure(step=-1),
        lambda: Failure.from_json({"kind": "kill"}),
        lambda: Failure.from_json({"step": 1, "who": 3}),
        lambda: geometric_steps(0.5, 10, 1, 0),
        lambda: geometric_steps(5, 1, 1, 0),
        lambda: lost_blocks(10, 0, np.random.default_rng(0)),
        lambda: lost_blocks(10, 1.5, np.random.default_rng(0)),
    ],
)
def test_a_failure_that_cannot_happen_is_refused(make: object) -> None:
    with pytest.raises(BadInput):
        make()  # type: ignore[operator]
