"""Fresh values of blocks that were never saved: each workload's own rule, the same in one piece and on many nodes."""

from fractions import Fraction

import numpy as np
import pytest

from holdfast.blocks.division import Ids, euclidean
from holdfast.blocks.policy import Policy
from holdfast.blocks.recoveries import fresh, partial
from holdfast.errors import BadInput
from holdfast.lab.simulate.lanes import continue_training
from holdfast.lab.simulate.strategy import CheckpointedRun, Strategy, Trial, last_saved, recovered_state
from holdfast.workloads.cnn import cnn
from holdfast.workloads.lda import lda
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.reinit import added, renewed, rule_of
from holdfast.workloads.workload import Arrays, Workload, stacked

WORKLOADS: dict[str, Workload] = {
    "mlr": mlr("digits"),
    "mf": mf("generated"),
    "lda": lda("generated"),
    "cnn-layer": cnn("digits", partition="layer"),
    "cnn-shard": cnn("digits", partition="shard"),
}


def half(workload: Workload, seed: int = 0) -> Ids:
    """Half of the blocks at random."""
    count = len(workload.blocks)
    return np.sort(np.random.default_rng(seed).permutation(count)[: count // 2])


def after(workload: Workload, iterations: int) -> Arrays:
    """The state of a run without failure."""
    return continue_training(workload, workload.start(), 0, iterations)


def loss(workload: Workload, state: Arrays) -> float:
    return float(workload.loss(stacked([state] * workload.lanes))[0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_of_the_panels_has_a_rule_that_gives_what_its_blocks_are_packed_as(name: str) -> None:
    workload = WORKLOADS[name]
    state, lost = after(workload, 1), half(workload)
    new = renewed(workload, state, lost, lost[::2], 1, 0)
    expected = workload.blocks.pack(state, lost[::2])
    assert {n: (v.shape, v.dtype) for n, v in new.items()} == {n: (v.shape, v.dtype) for n, v in expected.items()}


@pytest.mark.parametrize("name", WORKLOADS)
def test_nodes_that_hold_parts_of_the_survivors_come_to_the_same_values(name: str) -> None:
    workload = WORKLOADS[name]
    rule, blocks, lost = rule_of(workload), workload.blocks, half(workload)
    state, left = after(workload, 1), np.setdiff1d(np.arange(len(workload.blocks)), lost)
    nodes = [left[::3], left[1::3], left[2::3]]
    summary = added([rule.survivors(ids, blocks.pack(state, ids)) for ids in nodes])  # type: ignore[arg-type]
    whole = renewed(workload, state, lost, lost, 1, 0)
    parts = [rule.fresh(ids, summary, 1, 0) for ids in (lost[: len(lost) // 3], lost[len(lost) // 3 :])]
    target = {array: np.zeros_like(value) for array, value in state.items()}
    other = {array: np.zeros_like(value) for array, value in state.items()}
    blocks.unpack(whole, lost, target)
    for ids, part in zip((lost[: len(lost) // 3], lost[len(lost) // 3 :]), parts, strict=True):
        blocks.unpack(part, ids, other)
    assert all(np.array_equal(target[array], other[array]) for array in state)


def test_rows_of_a_factorization_become_zero_and_fit_better_than_their_first_values() -> None:
    workload = WORKLOADS["mf"]
    state, lost = after(workload, 3), half(workload)
    new = {name: value.copy() for name, value in state.items()}
    workload.blocks.unpack(renewed(workload, state, lost, lost, 3, 0), lost, new)
    first = {name: value.copy() for name, value in state.items()}
    workload.blocks.copy(workload.start(), first, lost)
    assert euclidean(workload.blocks, new, {n: np.zeros_like(v) for n, v in new.items()})[lost].max() == 0
    assert loss(workload, state) < loss(workload, new) < loss(workload, first)


def test_a_factorization_that_has_nothing_but_zeros_left_starts_from_its_first_values() -> None:
    workload = WORKLOADS["mf"]
    state, lost = {name: np.zeros_like(value) for name, value in workload.start().items()}, half(workload)
    new = renewed(workload, state, lost, lost, 1, 5)
    assert all(
        np.array_equal(new[name], value) for name, value in workload.blocks.pack(workload.start(5), lost).items()
    )


def test_documents_get_topics_that_survivors_have_given_to_their_words() -> None:
    workload = WORKLOADS["lda"]
    state, lost = after(workload, 8), half(workload)
    new, first = ({"topics": state["topics"].copy()} for _ in range(2))
    workload.blocks.unpack(renewed(workload, state, lost, lost, 8, 0), lost, new)
    workload.blocks.copy(workload.start(), first, lost)
    assert loss(workload, state) < loss(workload, new) < loss(workload, first)


def test_units_of_a_network_get_the_first_values_of_their_own_run() -> None:
    workload = WORKLOADS["cnn-shard"]
    new = rule_of(workload).fresh(np.arange(len(workload.blocks)), {}, 3, 7)
    assert all(np.array_equal(value, new[name]) for name, value in workload.start(7).items())


def test_a_failure_before_any_save_renews_lost_blocks_and_one_after_does_not() -> None:
    workload = WORKLOADS["mf"]
    states = [workload.start(), after(workload, 1), after(workload, 2)]
    policy = Policy(ranking="full", interval=2)
    saved_at, lost = last_saved(states, workload.blocks, workload.norm, policy), half(workload)

    def renew(live: Arrays, lost: Ids, ids: Ids, step: int, stream: int) -> Arrays:
        return renewed(workload, live, lost, ids, step, stream)

    for step, renews in ((1, True), (2, False)):
        how = [
            recovered_state(states, workload.blocks, saved_at[step], each, step, lost, renew)
            for each in (fresh, partial)
        ]
        apart = euclidean(workload.blocks, *how)
        assert np.flatnonzero(apart).tolist() == (lost.tolist() if renews else [])


def test_the_size_of_the_perturbation_is_that_of_the_fresh_values() -> None:
    workload = WORKLOADS["mf"]
    states = [workload.start(), after(workload, 1)]
    policy = Policy(ranking="full", interval=8)
    run = CheckpointedRun(
        states, workload.blocks, workload.norm, {policy}, 0, renew=lambda *asked: renewed(workload, *asked)
    )
    trial = Trial(Strategy(policy=policy, recovery="fresh", lost=Fraction(1, 2)), 1, 0)
    moved = workload.norm(workload.blocks, states[1], run(trial).state)
    assert run.perturbation_size(trial) == pytest.approx(float(np.linalg.norm(moved)))


def test_a_workload_without_a_rule_is_refused_with_the_missing_functions() -> None:
    with pytest.raises(BadInput, match=r"qp has no rule .* Use --restore partial, or give the model the functions"):
        rule_of(QuadraticProgram())
