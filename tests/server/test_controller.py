"""The protocols of the server, with processes that are killed at every moment there is; without Ray, so in no time."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import events
from holdfast.audit.verdicts import audit_run
from holdfast.blocks.policy import RANKINGS, SAVES, Policy
from holdfast.blocks.recoveries import RECOVERIES
from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure
from holdfast.lab.simulate.strategy import last_saved, recovered_state
from holdfast.sampler.digest import Samples
from holdfast.server.members import Member
from holdfast.server.settings import Settings
from holdfast.server.status import JoinRequest
from holdfast.theory.bounds import partial_size
from holdfast.workloads.lda import lda
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from holdfast.workloads.reinit import renewed
from holdfast.workloads.workload import Workload
from server_accounts import assert_accounted
from server_in_process import run_in_process
from server_runs import advanced, checkpoint, loss_of, settings, simulated, told

WORKLOADS = {"mlr-digits": mlr("digits"), "mf-generated": mf("generated")}
FRESH: dict[str, Workload] = {"mf-generated": WORKLOADS["mf-generated"], "lda-generated": lda("generated")}


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


@pytest.mark.parametrize("saves", [saves for saves in SAVES if saves != "regular"])
def test_early_saves_are_those_of_the_simulation_and_the_audit_knows_when_they_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: str
) -> None:
    workload = WORKLOADS["mf-generated"]
    policy = Policy(ranking="priority", interval=4, fraction=Fraction(1, 4), saves=saves)
    run_in_process(monkeypatch, settings(tmp_path, workload="mf-generated", policy=policy, iterations=5))

    expected = last_saved(simulated(workload, 5), workload.blocks, workload.norm, policy)[-1]
    assert checkpoint(tmp_path, workload).saved_at.tolist() == expected.tolist()
    assert {event.step for event in told(tmp_path, events.Commit)} == {
        step for step in range(6) if step == 0 or policy.due(step)
    }
    assert_accounted(tmp_path, workload, 5)


@pytest.mark.parametrize("name", FRESH)
def test_blocks_that_were_never_saved_get_the_fresh_values_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    workload, full = FRESH[name], Policy(ranking="full", interval=4)
    failure = Failure(step=2, kind="node", targets=(1,))
    run_in_process(monkeypatch, settings(tmp_path, failure, workload=name, workers=1, policy=full, recovery="fresh"))

    states = simulated(workload, 2)
    lost = np.array(sorted(block for event in told(tmp_path, events.Lost) for block in event.blocks))
    never = np.zeros(len(workload.blocks), np.int64)
    state = recovered_state(states, workload.blocks, never, RECOVERIES["fresh"], 2, lost, partial(renewed, workload))
    expected = []
    for iteration in (2, 3):
        state = advanced(workload, state, iteration)
        expected.append(loss_of(workload, state))
    assert [event.loss for event in told(tmp_path, events.Iterate)][2:] == pytest.approx(expected, rel=1e-9)
    assert_accounted(tmp_path, workload, 4)
    (says,) = (found.because for found in audit_run(tmp_path) if found.check == "restores_only_committed")
    assert says == f"0 blocks restored, each from its newest save; {len(lost)} blocks had none and got new values"


def test_where_all_nodes_are_lost_at_once_nothing_is_left_to_be_fresh_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(step=2, kind="node", targets=(0, 1, 2))
    losses = []
    for recovery in ("fresh", "full"):
        out = tmp_path / recovery
        run_in_process(monkeypatch, settings(out, failure, workload="mf-generated", recovery=recovery))
        losses.append([event.loss for event in told(out, events.Iterate)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("ranking", RANKINGS)
def test_every_policy_saves_what_it_saves_in_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranking: str
) -> None:
    policy = Policy(ranking=ranking, interval=4, fraction=Fraction(1) if ranking == "full" else Fraction(1, 4), seed=3)
    run_in_process(monkeypatch, settings(tmp_path, policy=policy))

    workload = WORKLOADS["mlr-digits"]
    expected = last_saved(simulated(workload, 4), workload.blocks, workload.norm, policy)[-1]
    assert checkpoint(tmp_path, workload).saved_at.tolist() == expected.tolist()


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize("lost", [(1,), (0, 2)])
def test_nodes_killed_between_iterations_give_the_perturbation_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovery: str, lost: tuple[int, ...]
) -> None:
    workload = WORKLOADS["mlr-digits"]
    chosen = settings(tmp_path, Failure(step=2, kind="node", targets=lost), recovery=recovery)
    run_in_process(monkeypatch, chosen)

    states = simulated(workload, 2)
    saved_at = last_saved(states, workload.blocks, workload.norm, chosen.policy)[-1]
    blocks = np.array(sorted(block for event in told(tmp_path, events.Lost) for block in event.blocks))
    state = recovered_state(
        states, workload.blocks, saved_at, RECOVERIES[recovery], 2, blocks, partial(renewed, workload)
    )
    expected = []
    for iteration in (2, 3):
        state = advanced(workload, state, iteration)
        expected.append(loss_of(workload, state))
    assert [event.loss for event in told(tmp_path, events.Iterate)][2:] == pytest.approx(expected, rel=1e-5)
    saved = recovered_state(states, workload.blocks, saved_at, RECOVERIES["full"], 2, blocks)
    size = partial_size(
        workload.norm(workload.blocks, states[2], saved), RECOVERIES[recovery](len(workload.blocks), blocks)
    )
    known = None if recovery == "fresh" else pytest.approx(size, rel=1e-4)  # of fresh values it is not known
    assert all(event.size == known for event in told(tmp_path, events.Restored))
    came_back = {b: at for e in told(tmp_path, events.Restored) for b, at in zip(e.blocks, e.saved_at, strict=True)}
    assert came_back == {
        block: saved_at[block] for block in RECOVERIES[recovery](len(workload.blocks), blocks).tolist()
    }
    assert_accounted(tmp_path, workload, 4)


Kill = Callable[[int, Member, str], Member | None]


def _at(number: int, victim: str) -> Kill:
    """Kill a member, or the one that is being called, at one of the calls of a run."""

    def kill(count: int, member: Member, method: str) -> Member | None:
        if count != number:
            return None
        kind, _, which = victim.partition(" ")
        return member if victim == "the called member" else Member(kind, int(which or 0))

    return kill


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize("victim", ["node 1", "worker 0", "controller", "the called member"])
def test_anybody_may_be_killed_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, recovery: str
) -> None:
    workload = WORKLOADS["mf-generated"]
    rng = np.random.default_rng([recovery == "full", len(victim)])
    for number in rng.choice(np.arange(1, 178), 5, replace=False).tolist():
        out = tmp_path / str(number)
        chosen = settings(out, workload="mf-generated", iterations=3, recovery=recovery)
        run_in_process(monkeypatch, chosen, _at(number, victim))
        assert_accounted(out, workload, 3)


@pytest.mark.parametrize("seed", range(8))
def test_several_may_be_killed_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["node", "worker", "controller"], 4).tolist()
    strikes = {
        int(n): Member(kind, int(rng.integers(3))) for n, kind in zip(rng.integers(1, 178, 4), kinds, strict=True)
    }
    chosen = settings(tmp_path, workload="mf-generated", iterations=3, recovery=["partial", "full"][seed % 2])

    run_in_process(monkeypatch, chosen, lambda count, member, method: strikes.get(count))

    assert_accounted(tmp_path, WORKLOADS["mf-generated"], 3)


def test_losing_workers_changes_nothing_that_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(monkeypatch, settings(tmp_path / "calm"))
    run_in_process(monkeypatch, settings(tmp_path / "lossy"), _at(40, "worker 1"))

    calm, lossy = ([event.loss for event in told(tmp_path / name, events.Iterate)] for name in ("calm", "lossy"))
    assert [event.kind for event in told(tmp_path / "lossy", events.Lost)] == ["worker"]
    assert calm == lossy


def test_losing_the_controller_changes_nothing_that_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch, settings(tmp_path / "calm"))
    _, run = run_in_process(monkeypatch, settings(tmp_path / "lossy"), _at(200, "controller"))

    calm, lossy = ([event.loss for event in told(tmp_path / name, events.Iterate)] for name in ("calm", "lossy"))
    assert run.lives == 2
    assert calm == lossy


def test_losing_all_nodes_and_the_controller_continues_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As nodes are told what to save after the second iteration.
    strikes = {244: Member("node", 0), 245: Member("node", 1), 246: Member("node", 2), 247: Member("controller", 0)}
    run_in_process(monkeypatch, settings(tmp_path), lambda count, member, method: strikes.get(count))

    assert len(told(tmp_path, events.Iterate)) == 4
    assert min(event.iteration for event in told(tmp_path, events.Restored)) == 1


@pytest.mark.parametrize(
    "failures",
    [
        (Failure(step=1, kind="node", targets=(0,), point="checkpoint"),),
        (Failure(step=1, kind="node", targets=(0,)), Failure(step=1, kind="node", targets=(1,), point="recovery")),
        (Failure(step=1, kind="node", targets=(0,)), Failure(step=1, kind="node", targets=(1, 2), point="recovery")),
        (Failure(step=2, kind="node", targets=(0, 1, 2)),),
        (Failure(step=2, kind="worker", targets=(0, 1)),),
        (Failure(step=2, kind="node", targets=(0, 1, 2)), Failure(step=2, kind="worker", targets=(0, 1))),
    ],
    ids=["in a checkpoint", "in a recovery", "all in a recovery", "all nodes", "all workers", "all but the controller"],
)
def test_a_failure_may_come_at_the_worst_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: tuple[Failure, ...]
) -> None:
    run_in_process(monkeypatch, settings(tmp_path, *failures))

    assert len(told(tmp_path, events.Struck)) == len(failures)
    assert_accounted(tmp_path, WORKLOADS["mlr-digits"], 4)


def test_a_failure_that_names_a_lost_node_kills_only_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = (
        Failure(step=1, kind="node", targets=(1,)),
        Failure(step=2, kind="node", targets=(1,)),
        Failure(step=3, kind="node", targets=(0, 1)),
    )
    run_in_process(monkeypatch, settings(tmp_path, *failures))

    struck = [(event.iteration, tuple(event.targets)) for event in told(tmp_path, events.Struck)]
    assert struck == [(1, (1,)), (3, (0,))]
    assert_accounted(tmp_path, WORKLOADS["mlr-digits"], 4)


def test_a_node_that_joins_takes_over_its_share_and_perturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch, settings(tmp_path / "calm"))
    chosen = settings(tmp_path / "joined")
    run_in_process(monkeypatch, chosen, arrive=lambda count: Member("node", 3) if count == 100 else None)

    moved = [block for event in told(chosen.out, events.Moved) for block in event.blocks]
    assert len(moved) == len(set(moved)) == 64 // 4
    calm, joined = ([event.loss for event in told(tmp_path / name, events.Iterate)] for name in ("calm", "joined"))
    assert joined == pytest.approx(calm, rel=1e-6)
    assert_accounted(chosen.out, WORKLOADS["mlr-digits"], 4)


def test_a_wish_for_nodes_is_taken_once(tmp_path: Path) -> None:
    JoinRequest(tmp_path).write(2)
    assert [JoinRequest(tmp_path).take(), JoinRequest(tmp_path).take()] == [2, 0]
    with pytest.raises(BadInput, match="--nodes must be at least 1"):
        JoinRequest(tmp_path).write(0)


@pytest.mark.parametrize("victim", ["nobody", "node 1", "worker 0", "controller"])
def test_with_staleness_every_push_still_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    kill: Any = (lambda *_: None) if victim == "nobody" else _at(120, victim)
    run_in_process(monkeypatch, settings(tmp_path, staleness=1), kill)

    losses = [event.loss for event in told(tmp_path, events.Iterate)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert bool(told(tmp_path, events.Lost)) == (victim != "nobody")
    seen: set[tuple[int, int, int, str]] = set()
    for node in range(3):
        for event in told(tmp_path, events.Applied, f"node-{node}"):
            key = (event.iteration, event.round, event.parts[0], event.blocks.digest)
            assert key not in seen
            seen.add(key)


def test_nodes_that_are_all_lost_without_a_checkpoint_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path, Failure(step=1, kind="node", targets=(0, 1, 2)))

    def without_checkpoint(count: int, member: Member, method: str) -> None:
        if method == "die":
            for index in (tmp_path / "checkpoints" / "running").glob("index-*"):
                index.unlink()

    with pytest.raises(BadInput, match="lost before the first checkpoint"):
        run_in_process(monkeypatch, chosen, without_checkpoint)


def test_settings_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(BadInput, match=match):
            settings(tmp_path, **changed)

    refused("--nodes must be at least 1", nodes=0)
    refused("--restore must be one of", recovery="none")
    refused("--staleness must be at least 0", staleness=-1)
    refused("--lost-after must be a number of seconds above 0", lost_after=0.0)
    with pytest.raises(BadInput, match="cannot kill node 3: there are 3"):
        settings(tmp_path, Failure(step=1, kind="node", targets=(3,)))
    with pytest.raises(BadInput, match="Cannot kill 'raylet'"):
        settings(tmp_path, Failure(step=1, kind="raylet"))
    assert isinstance(settings(tmp_path), Settings)


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
