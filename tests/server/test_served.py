"""A parameter server trains what the simulator trains, whoever is killed."""

from pathlib import Path

import numpy as np
import pytest
from served import checkpoint, loss_of, served, simulated, told

from holdfast import events
from holdfast.samples import Samples
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from holdfast.workloads.workload import Workload

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize(("name", "workload"), [("mlr-digits", mlr("digits")), ("mf-generated", mf("generated"))])
def test_without_failure_the_trajectory_is_that_of_the_simulation(
    tmp_path: Path, name: str, workload: Workload
) -> None:
    outcome = served(tmp_path, workload=name)

    states = simulated(workload, 4)
    losses = [event.loss for event in told(tmp_path, events.Iterate)]
    np.testing.assert_allclose(losses, [loss_of(workload, state) for state in states[1:]], rtol=1e-5)
    assert outcome.iterations == 4
    assert not outcome.converged
    _assert_every_block_has_every_round(tmp_path, workload)
    _assert_saves_hold_what_the_simulation_holds(tmp_path, workload, states)


def _assert_every_block_has_every_round(out: Path, workload: Workload) -> None:
    applied = [event for node in range(3) for event in told(out, events.Applied, f"node-{node}")]
    rounds = {(event.iteration, event.round) for event in applied}
    for when in rounds:
        blocks = Samples.total(event.blocks for event in applied if (event.iteration, event.round) == when)
        assert blocks == Samples.of(np.arange(len(workload.blocks)))


def _assert_saves_hold_what_the_simulation_holds(
    out: Path, workload: Workload, states: list[dict[str, np.ndarray]]
) -> None:
    running = checkpoint(out, workload)
    assert running.saved_at.max() == 4
    for iteration in np.unique(running.saved_at):
        ids = np.flatnonzero(running.saved_at == iteration)
        wanted, saved = workload.blocks.pack(states[iteration], ids), running.load(ids)
        for array in wanted:
            np.testing.assert_allclose(saved[array], wanted[array], rtol=1e-3, atol=1e-6)
