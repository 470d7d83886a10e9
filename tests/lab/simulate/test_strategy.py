"""Strategies: trials of the same number meet the same failure, and equal strategies are run once."""

from fractions import Fraction

import numpy as np
import pytest

from holdfast.blocks.division import along, euclidean
from holdfast.blocks.policy import Policy
from holdfast.lab.simulate.strategy import CheckpointedRun, Strategy, Trial, trial_stream

FULL = Policy(ranking="full", interval=4)
PRIORITY = Policy(ranking="priority", interval=4, fraction=Fraction(1, 4))


def strategy(recovery: str, lost: str, policy: Policy = FULL) -> Strategy:
    return Strategy(policy=policy, recovery=recovery, lost=Fraction(lost))


STATES = [{"w": np.random.default_rng(k).normal(size=(8, 2))} for k in range(11)]


def run(seed: int = 3) -> CheckpointedRun:
    return CheckpointedRun(STATES, along(STATES[0], "w"), euclidean, {FULL, PRIORITY}, seed)


def went_back(run: CheckpointedRun, trial: Trial) -> set[int]:
    moved = run(trial).state["w"] != STATES[trial.step]["w"]
    return set(np.flatnonzero(moved.any(axis=1)).tolist())


def test_full_recovery_restores_the_checkpoint_at_the_iteration_of_the_failure() -> None:
    here = run()
    start = here(Trial(strategy("full", "1/2"), 6, 0))
    assert np.array_equal(start.state["w"], STATES[4]["w"])
    assert start.iteration == 6


def test_a_larger_loss_contains_a_smaller_one_of_the_same_trial() -> None:
    here = run()
    for number in range(5):
        lost = [went_back(here, Trial(strategy("partial", size), 6, number)) for size in ("1/4", "1/2", "3/4")]
        assert [len(each) for each in lost] == [2, 4, 6]
        assert lost[0] < lost[1] < lost[2]


def test_the_same_trial_under_another_policy_loses_the_same_blocks() -> None:
    here = run()
    blocks = [went_back(here, Trial(strategy("partial", "1/2", policy), 7, 1)) for policy in (FULL, PRIORITY)]
    assert blocks[1] <= blocks[0]  # a lost block that was saved at this very step has not moved


def test_without_a_strategy_nothing_fails() -> None:
    here = run()
    start = here(Trial(None, 5, 2))
    assert start.state is STATES[5]
    assert start.stream == here(Trial(strategy("full", "1"), 5, 2)).stream == trial_stream(3, 2)
    assert here.perturbation_size(Trial(None, 5, 2)) == 0


def test_the_size_of_a_perturbation_is_the_distance_it_moves_the_state() -> None:
    here = run()
    for trial in (Trial(strategy("partial", "1/2"), 6, 0), Trial(strategy("full", "1/2"), 6, 0)):
        moved = here(trial).state["w"] - STATES[6]["w"]
        assert here.perturbation_size(trial) == pytest.approx(float(np.linalg.norm(moved)))


def test_strategies_that_do_the_same_are_the_same() -> None:
    assert strategy("full", "1/4").canonical == strategy("partial", "1").canonical == strategy("full", "1")
    whole = Policy(ranking="priority", interval=4)
    assert strategy("partial", "1/2", whole).canonical == strategy("partial", "1/2")
    early = Policy(ranking="priority", interval=4, saves="early")
    assert strategy("partial", "1/2", early).canonical != strategy("partial", "1/2").canonical
    assert strategy("partial", "1/2", PRIORITY).canonical == strategy("partial", "1/2", PRIORITY)


def test_random_saves_are_other_blocks_in_every_trial_and_for_every_seed() -> None:
    random = Policy(ranking="random", interval=4, fraction=Fraction(1, 4))
    alone = strategy("full", "1", random)
    found = set()
    for seed in (3, 4):
        here = CheckpointedRun(STATES, along(STATES[0], "w"), euclidean, {random}, seed)
        for number in range(3):
            state = here(Trial(alone, 6, number)).state["w"]
            assert np.array_equal(here(Trial(alone, 6, number)).state["w"], state)
            found.add(state.tobytes())
    assert len(found) == 6


def test_distances_that_add_up_make_a_size_that_adds_up() -> None:
    trial = Trial(strategy("partial", "1/2"), 6, 0)
    blocks = along(STATES[0], "w")
    lost = run().lost(trial)
    apart = euclidean(blocks, STATES[6], STATES[4])[lost]
    for order, size in ((1.0, apart.sum()), (2.0, np.linalg.norm(apart)), (np.inf, apart.max())):
        here = CheckpointedRun(STATES, blocks, euclidean, {FULL}, 3, order=order)
        assert here.perturbation_size(trial) == pytest.approx(float(size))
