"""The same failure costs as many iterations on the server as in simulation, to the criterion."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from holdfast import events
from holdfast.blocks.recoveries import RECOVERIES
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from holdfast.lab.simulate.strategy import last_saved, recovered_state
from holdfast.server.cost import measured_cost, served_cost
from holdfast.server.status import ServerOutcome
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from holdfast.workloads.workload import Arrays, Workload
from server_in_process import run_in_process
from server_runs import advanced, loss_of, settings, told

WORKLOADS = {"mlr-digits": mlr("digits"), "mf-generated": mf("generated")}
FAILS_AT = 7


def to_criterion(workload: Workload, states: list[Arrays]) -> list[Arrays]:
    """The states of a run that goes on from the last of these until it has converged."""
    while len(states) == 1 or loss_of(workload, states[-1]) >= workload.criterion:
        states.append(advanced(workload, states[-1], len(states) - 1))
    return states


class Calm(NamedTuple):
    """A run to the criterion in which nothing fails: of which workload, where, how it ended, and its simulated states."""

    name: str
    out: Path
    outcome: ServerOutcome
    states: list[Arrays]


@pytest.fixture(scope="module", params=WORKLOADS)
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Such a run of each workload; it is the same whatever recovery another one has."""
    chosen = settings(tmp_path_factory.mktemp("calm") / "run", workload=request.param, iterations=500)
    with pytest.MonkeyPatch.context() as patched:
        outcome, _ = run_in_process(patched, chosen)
    workload = WORKLOADS[request.param]
    return Calm(request.param, chosen.out, outcome, to_criterion(workload, [workload.start()]))


@pytest.mark.parametrize("recovery", ["full", "partial"])  # of fresh values no size is known
def test_a_failure_costs_what_it_costs_in_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm, recovery: str
) -> None:
    workload, expected, undisturbed = WORKLOADS[calm.name], calm.states, calm.outcome
    failure = Failure(step=FAILS_AT, kind="node", targets=(0, 2))
    failing = settings(tmp_path, failure, workload=calm.name, iterations=500, recovery=recovery)
    disturbed, _ = run_in_process(monkeypatch, failing)

    saved_at = last_saved(expected[: FAILS_AT + 1], workload.blocks, workload.norm, failing.policy)[-1]
    lost = np.array(sorted(block for event in told(failing.out, events.Lost) for block in event.blocks))
    state = recovered_state(expected, workload.blocks, saved_at, RECOVERIES[recovery], FAILS_AT, lost)
    after = to_criterion(workload, [*expected[:FAILS_AT], state])
    assert undisturbed.iterations == len(expected) - 1
    assert disturbed.iterations == len(after) - 1

    run, reference = (served_cost(read_history(settings_of_run.out).events) for settings_of_run in (failing, calm))
    cost = measured_cost(run, reference)
    assert cost is not None
    assert abs(cost - (disturbed.iterations - undisturbed.iterations)) < 1
    (size,) = {event.size for event in told(failing.out, events.Restored)}
    moved = np.linalg.norm(workload.norm(workload.blocks, expected[FAILS_AT], state))
    assert size == pytest.approx(moved, rel=1e-3)
    losses, level = [loss_of(workload, state) for state in after[FAILS_AT + 1 :]], loss_of(workload, expected[FAILS_AT])
    assert run.failures[0].regained == next(count for count, loss in enumerate(losses, 1) if loss <= level)
