"""The rate of a run: it does not depend on where the optimum is taken to be, and the bound holds for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.blocks.division import Floats
from holdfast.lab.bounds import cost_bound as module
from holdfast.lab.bounds.cost_bound import contraction
from holdfast.lab.simulate.lanes import trajectory
from holdfast.theory.bounds import iteration_cost_bound
from holdfast.workloads.simple_model import OneStateAdapter
from holdfast.workloads.workload import Arrays


class Linear:
    """x becomes A x + b; the loss is the distance to the fixed point."""

    def __init__(self, rates: Floats, criterion: float = 0.01, noise: float = 0.0) -> None:
        self.rates, self.criterion, self.noise = rates, criterion, noise
        self.fixed = np.arange(1.0, len(rates) + 1)

    def start(self, rng: np.random.Generator) -> Arrays:
        return {"x": np.zeros(len(self.rates))}

    def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
        after = self.fixed + self.rates * (state["x"] - self.fixed)
        return {"x": after + self.noise * rng.standard_normal(len(after)) if self.noise else after}

    def loss(self, state: Arrays) -> float:
        return float(np.linalg.norm(state["x"] - self.fixed))


RATES = np.array([0.95, 0.9, 0.5])


def test_c_is_the_same_however_far_away_the_optimum_is_taken_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = OneStateAdapter(Linear(RATES))
    run, found = trajectory(workload), []
    for far in (3.0, 10.0, 30.0):
        monkeypatch.setattr(module, "FAR", (far,))
        found.append(contraction(workload, run))
    assert {rate.c for rate in found} == {found[0].c}
    assert found[0].c == pytest.approx(0.95, abs=1e-3)
    assert max(rate.distance for rate in found) < 1.05 * min(rate.distance for rate in found)
    assert all(rate.proved for rate in found)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.floats(0.01, 30))
def test_no_perturbation_costs_more_whole_iterations_than_the_bound_rounded_up(
    seed: int, step: int, size: float
) -> None:
    model = Linear(RATES)
    workload = OneStateAdapter(model)
    run = trajectory(workload)
    rate, step = contraction(workload, run), min(step, run.length - 1)
    direction = np.random.default_rng(seed).standard_normal(3)
    state = {"x": run.states[step]["x"] + size * direction / np.linalg.norm(direction)}
    count = 0
    while not model.loss(state) < model.criterion:
        state, count = model.step(state, np.random.default_rng(0)), count + 1
    bound = float(iteration_cost_bound(rate.c, rate.distance, [[size]], [[step]])[0])
    assert step + count - run.length <= np.ceil(bound)


def test_under_noise_nothing_is_proved_and_c_has_a_range() -> None:
    workload = OneStateAdapter(Linear(RATES, criterion=0.5, noise=0.05))
    rate = contraction(workload, trajectory(workload))
    assert not rate.proved
    assert rate.low <= rate.c <= rate.high
    assert "nothing is proved" in rate.words
