"""The advice for served runs: what goes back costs what theory says, and what is not known is said."""

import json
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake_server_runs
from fake_server_histories import contracting, perturbed, told
from holdfast.advice.question import Question
from holdfast.cli.advise import advice_on
from holdfast.errors import BadInput
from holdfast.events import Iterate
from holdfast.server.advice import (
    FEW,
    ServedAdvice,
    advise_served,
    bound,
    expected,
    iterations_lost,
    noise,
    served_costs,
    served_prices,
)
from holdfast.theory.bounds import iteration_cost_bound


@given(age=st.integers(0, 50), c=st.floats(0.3, 0.999))
def test_if_all_goes_back_a_iterations_the_run_is_a_iterations_later(age: int, c: float) -> None:
    assert float(expected(age, 1.0, c)) == pytest.approx(age, abs=1e-6)
    assert float(bound(age, 1.0, c)) == pytest.approx(age, abs=1e-6)


@given(age=st.integers(1, 30), lost=st.floats(0.01, 1), c=st.floats(0.5, 0.999))
def test_less_costs_less_and_nothing_more_than_the_theorem_allows(age: int, lost: float, c: float) -> None:
    assert 0 < float(expected(age, lost / 2, c)) < float(expected(age, lost, c)) <= age + 1e-9
    assert float(expected(age, lost, c)) <= float(bound(age, lost, c)) + 1e-9


def test_the_bound_is_that_of_the_theorem_for_the_size_that_theorem_4_2_gives() -> None:
    c, age, lost, k = 0.9, 5, 0.25, 20
    size = np.sqrt(lost) * c**k * (c**-age - 1)
    assert float(bound(age, lost, c)) == pytest.approx(float(iteration_cost_bound(c, 1.0, [size], [k])))


def test_where_it_converges_slowly_a_part_costs_between_its_share_and_the_root_of_it() -> None:
    assert float(expected(4, 0.25, 1 - 1e-6)) == pytest.approx(1.0, rel=1e-3)
    assert float(bound(4, 0.25, 1 - 1e-6)) == pytest.approx(2.0, rel=1e-3)


def test_chance_in_the_losses_makes_the_interval_wider() -> None:
    smooth = 5 * 0.9 ** np.arange(40)
    rough = smooth + 0.01 * np.random.default_rng(0).standard_normal(40)
    assert noise(rough) > 5 * noise(smooth)
    assert iterations_lost(8, 0.5, 0.9, 1.0).high > iterations_lost(8, 0.5, 0.9).high


def test_the_costs_of_a_served_run_are_read_from_its_history() -> None:
    costs = served_costs(told(*contracting()))
    assert (costs.workload, costs.nodes, costs.interval, costs.recovery) == ("quadratic", 2, 2, "partial")
    assert costs.step.value == pytest.approx(1 - 0.0625)
    assert costs.stall.value == pytest.approx(2 * 0.0625)
    assert costs.rate == pytest.approx(0.8, abs=0.01)
    assert (costs.failures, costs.outage) == (0, None)


def test_a_recorded_loss_gives_the_length_of_the_interruption() -> None:
    costs = served_costs(told(*perturbed()))
    assert costs.failures == 1
    assert costs.outage is not None


def test_partial_recovery_is_advised_unless_all_is_lost() -> None:
    found = advice_on(told(*contracting()), Question(mtbf=3600.0, lost=Fraction(1, 2)))
    assert isinstance(found, ServedAdvice)
    assert found.recovery == "partial"
    assert found.prices["partial"].iterations.value < found.prices["full"].iterations.value
    assert found.line == f"advice: --restore partial --interval {found.interval}"
    assert any("No loss was recorded" in line for line in found.unknown)
    assert advise_served(told(*contracting()), Question(lost=Fraction(1))).recovery == "full"


def test_a_smaller_loss_is_a_reason_to_save_less_often() -> None:
    costs = replace(served_costs(told(*contracting())), interval=8, iterations=10_000)
    some = served_prices(costs, Fraction(1, 8), 3600.0)
    assert some["partial"].interval.best > some["full"].interval.best


@pytest.mark.parametrize("seed", range(15))
def test_any_run_gives_an_advice_or_is_too_short(seed: int) -> None:
    run = fake_server_runs.play_run(random.Random(seed))
    history = [event for events in run.files.values() for event in events]
    if sum(isinstance(event.what, Iterate) for event in history) < FEW:
        with pytest.raises(BadInput, match="too few to measure one"):
            advise_served(history)
        return
    found = advise_served(history)
    assert found.interval >= 1
    json.dumps(found.to_json(), allow_nan=False)


def test_the_workers_option_is_refused_for_a_server_run() -> None:
    with pytest.raises(BadInput, match="--workers"):
        advise_served(told(*contracting()), Question(workers=16))


def test_the_advised_interval_of_a_short_run_lets_it_save() -> None:
    """A run of 61 iterations was told to save every 11,832."""
    advice = advise_served(told(*contracting()), Question(mtbf=1e9))
    assert advice.interval <= advice.costs.iterations
    assert any(f"present --interval {advice.costs.interval}" in reason for reason in advice.reasons)
