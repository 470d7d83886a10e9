"""The protocols of the server, with processes that are killed at every moment there is; without Ray, so in no time."""

from pathlib import Path

import numpy as np
import pytest
from in_process import run_in_process
from served import checkpoint, loss_of, settings, simulated, told

from holdfast import events
from holdfast.samples import Samples
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from holdfast.workloads.workload import Workload

WORKLOADS = {"mlr-digits": mlr("digits"), "mf-generated": mf("generated")}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_without_failure_the_trajectory_is_that_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nodes: int, workers: int
) -> None:
    chosen = settings(tmp_path, workload=name, nodes=nodes, workers=workers)
    outcome, _ = run_in_process(monkeypatch, chosen)

    workload = WORKLOADS[name]
    states = simulated(workload, 4)
    losses = [event.loss for event in told(tmp_path, events.Iterate)]
    np.testing.assert_allclose(losses, [loss_of(workload, state) for state in states[1:]], rtol=1e-5)
    assert (outcome.iterations, outcome.converged) == (4, False)
    _assert_every_block_has_every_round(tmp_path, workload, nodes)
    _assert_saves_hold_what_the_simulation_holds(tmp_path, workload, states)


def _assert_every_block_has_every_round(out: Path, workload: Workload, nodes: int) -> None:
    applied = [event for node in range(nodes) for event in told(out, events.Applied, f"node-{node}")]
    rounds = {(event.iteration, event.round) for event in applied}
    assert len(rounds) == 4 * workload.rounds
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
