"""Trials: each has its own unperturbed run where runs differ, and its result does not depend on which are run with it."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.policy import Policy
from holdfast.lab.simulate.lanes import trajectories, trajectory
from holdfast.lab.simulate.strategy import Strategy, trial_stream
from holdfast.lab.simulate.trials import Outcomes, Trials
from holdfast.workloads.cnn import cnn
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr

FULL = Strategy(policy=Policy(ranking="full", interval=8), recovery="full", lost=Fraction(1))
HALF = Strategy(policy=Policy(ranking="full", interval=8), recovery="partial", lost=Fraction(1, 2))
MF, MLR = mf("generated"), mlr("digits")
RUN = trajectory(MLR)


def trials(seed: int = 0) -> Trials:
    return Trials([MF], [FULL, HALF], None, 1000, seed)


def silent(key: str, count: float) -> None:
    pass


def told(outcomes: list[Outcomes]) -> tuple[object, ...]:
    (only,) = outcomes
    return facts(only)


def facts(found: Outcomes) -> tuple[object, ...]:
    return found.length, found.crossed, found.step, found.counts, found.sizes


def test_every_trial_has_its_own_run_and_full_recovery_costs_the_iterations_since_the_checkpoint() -> None:
    found = [trial for (trial,) in trials()(range(6), silent)]
    assert len({trial.crossed for trial in found}) == 6
    for trial in found:
        assert 0 < trial.step < trial.length
        assert trial.step + trial.counts[FULL] - trial.crossed == pytest.approx(trial.step % 8, abs=1e-6)


def test_a_trial_is_the_same_whichever_others_are_run_with_it() -> None:
    together, alone = trials()(range(5), silent), trials()([3], silent)
    assert told(together[3]) == told(alone[0])


def test_early_failures_take_every_second_number_and_leave_the_others_as_they_are() -> None:
    usual = [found.step for (found,) in trials()(range(8), silent)]
    early = [found.step for (found,) in Trials([MF], [FULL], None, 1000, 0, early=3)(range(8), silent)]
    assert early[::2] == usual[::2]
    assert set(early[1::2]) == {1, 2}


def test_another_seed_has_other_runs() -> None:
    assert trials(1)([0], silent)[0][0].crossed != trials()([0], silent)[0][0].crossed
    assert len({trial_stream(seed, number) for seed in range(5) for number in range(50)}) == 250


def test_runs_in_one_stack_equal_single_runs() -> None:
    both, alone = trajectories(MF, [7, 0]), trajectories(MF, [0])[0]
    for run in (both[1], trajectory(MF)):
        assert np.array_equal(run.losses, alone.losses)
        assert all(np.array_equal(a["L"], b["L"]) for a, b in zip(run.states, alone.states, strict=True))
    assert both[0].losses[-1] < MF.criterion <= both[0].losses[-2]


def test_known_trials_are_reported_and_not_run_again() -> None:
    first, heard = trials(), list[tuple[str, float]]()
    expected = first([0, 1], silent)
    again = Trials([MF], [FULL, HALF], None, 0, 0, dict(first.known))  # no iterations allowed: nothing new can be found
    assert [told(trial) for trial in again([0, 1], lambda *what: heard.append(what))] == [told(t) for t in expected]
    assert (len(heard), set(heard)) == (4, set(first.known.items()))  # of equal trials each is told


@given(st.integers(1, 200), st.integers(1, 20), st.booleans())
def test_every_trial_runs_once_and_memory_holds_at_most_one_run_per_lane(count: int, jobs: int, shared: bool) -> None:
    run = RUN if shared else None
    parts = Trials([MLR], [FULL], run, 1000, 0).groups(count, jobs)
    assert [number for part in parts for number in part] == list(range(count))
    assert len(parts) <= jobs if shared else max(map(len, parts)) <= MLR.lanes


def test_workloads_that_train_alike_share_their_runs_and_each_has_its_own_blocks() -> None:
    layer, shard = cnn("digits", partition="layer"), cnn("digits", partition="shard")
    ((by_layer, by_shard),) = Trials([layer, shard], [FULL, HALF], None, 1000, 0)([0], silent)
    ((alone,),) = Trials([shard], [FULL, HALF], None, 1000, 0)([0], silent)
    assert facts(by_shard) == facts(alone)
    assert (by_layer.crossed, by_layer.step, by_layer.counts[FULL]) == (alone.crossed, alone.step, alone.counts[FULL])
    assert by_layer.sizes[HALF] != by_shard.sizes[HALF]
