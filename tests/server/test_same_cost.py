"""The same failure costs as many iterations on the server as in simulation, to the criterion, and theory says how many."""

from pathlib import Path

import numpy as np
import pytest
from in_process import run_in_process
from served import advanced, loss_of, settings, told

from holdfast import events
from holdfast.cost.served import contraction, measured_cost, prediction, served_cost
from holdfast.failure import Failure
from holdfast.history import read_history
from holdfast.recovery import RECOVERIES
from holdfast.simulate.ages import ages, recovered
from holdfast.theory import iteration_cost_bound
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from holdfast.workloads.workload import Arrays, Workload

WORKLOADS = {"mlr-digits": mlr("digits"), "mf-generated": mf("generated")}
FAILS_AT = 7


def to_criterion(workload: Workload, states: list[Arrays]) -> list[Arrays]:
    """The states of a run that goes on from the last of these until it has converged."""
    while len(states) == 1 or loss_of(workload, states[-1]) >= workload.criterion:
        states.append(advanced(workload, states[-1], len(states) - 1))
    return states


@pytest.mark.parametrize("recovery", ["full", "partial"])  # of fresh values no size is known
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_failure_costs_what_it_costs_in_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, recovery: str
) -> None:
    workload = WORKLOADS[name]
    failure = Failure(step=FAILS_AT, kind="node", targets=(0, 2))
    calm = settings(tmp_path / "calm", workload=name, iterations=500)
    failing = settings(tmp_path / "failing", failure, workload=name, iterations=500, recovery=recovery)
    undisturbed, _ = run_in_process(monkeypatch, calm)
    disturbed, _ = run_in_process(monkeypatch, failing)

    expected = to_criterion(workload, [workload.start()])
    saved_at = ages(expected[: FAILS_AT + 1], workload.blocks, workload.norm, failing.policy)[-1]
    lost = np.array(sorted(block for event in told(failing.out, events.Lost) for block in event.blocks))
    state = recovered(expected, workload.blocks, saved_at, RECOVERIES[recovery], FAILS_AT, lost)
    after = to_criterion(workload, [*expected[:FAILS_AT], state])
    assert undisturbed.iterations == len(expected) - 1
    assert disturbed.iterations == len(after) - 1

    run, reference = (served_cost(read_history(each.out).events) for each in (failing, calm))
    cost = measured_cost(run, reference)
    assert cost is not None
    assert abs(cost - (disturbed.iterations - undisturbed.iterations)) < 1
    (size,) = {event.size for event in told(failing.out, events.Restored)}
    moved = np.linalg.norm(workload.norm(workload.blocks, expected[FAILS_AT], state))
    assert size == pytest.approx(moved, rel=1e-3)
    rate, predicted = contraction(run), prediction(run)
    assert rate is not None
    assert predicted == pytest.approx(float(iteration_cost_bound(rate.c, rate.distance, [moved], [FAILS_AT])), rel=1e-3)
