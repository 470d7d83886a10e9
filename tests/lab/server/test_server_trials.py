"""Nodes that are killed as a round is applied; the experiment on overhead, reduced, whose trials are real runs of the server."""

from fractions import Fraction
from pathlib import Path

import pytest

from holdfast import events
from holdfast.blocks.policy import Policy
from holdfast.faults.schedule import Failure
from holdfast.lab.experiment import Options, Progress
from holdfast.lab.server import server_overhead as overhead
from holdfast.lab.server import server_trials
from holdfast.server.settings import Settings
from holdfast.workloads.mlr import mlr
from server_in_process import run_in_process
from server_runs import loss_of, settings, simulated, told

APPLY = Failure(step=2, kind="node", point="apply", targets=(0,))


def test_a_node_killed_while_a_round_is_applied_loses_the_updates_pushed_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch, settings(tmp_path, APPLY))
    (struck,), (dropped,) = told(tmp_path, events.Struck), told(tmp_path, events.Dropped)
    (lost,) = told(tmp_path, events.Lost)
    assert (struck.iteration, struck.point) == (2, "apply")
    assert (dropped.iteration, dropped.blocks.count) == (2, len(lost.blocks))
    assert [event.iteration for event in told(tmp_path, events.Iterate)] == [0, 1, 2, 3]


def test_full_recovery_then_has_the_loss_of_the_last_full_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Policy(ranking="full", interval=2, fraction=Fraction(1))
    run_in_process(monkeypatch, settings(tmp_path, APPLY, policy=whole, recovery="full"))
    workload = mlr("digits")
    saved = simulated(workload, 2)[-1]
    assert told(tmp_path, events.Iterate)[2].loss == pytest.approx(loss_of(workload, saved), rel=1e-5)


def test_the_experiment_runs_every_arm_and_measures_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(chosen: Settings, report: object) -> None:
        with monkeypatch.context() as patched:
            run_in_process(patched, chosen)

    monkeypatch.setattr(server_trials, "serve", serve)
    monkeypatch.setattr(server_trials, "cluster", lambda: pytest.MonkeyPatch.context())
    done = []

    def meter(what: str, total: int) -> Progress:
        return done.append

    result = overhead.run(Options(quick=True, out=tmp_path / "server-overhead"), meter)
    claimed = [claim.id for claim in result.claims]
    assert claimed == [f"lda-generated-{each}" for each in ("sooner", "share", "goal", "added")]
    assert len(done) == 4
    by = {
        arm: [row["loss"] for row in result.rows if row.get("arm") == arm]
        for arm in ("scar", "traditional", "scar, no failure")
    }
    assert by["traditional"][6] == pytest.approx(by["scar, no failure"][3])  # back at the checkpoint of iteration 4
    assert by["scar, no failure"][6] < by["scar"][6] < by["traditional"][6]
    assert not [path for path in (tmp_path / "server-overhead").iterdir() if path.name not in ("figures", "trials")]
