"""The plan of sharded-tradeoff: which failures happen, and which trials they need."""

from fractions import Fraction

import pytest

from holdfast.lab.sharded.measured_costs import progress_under_rollback
from holdfast.lab.sharded.shard_failures import (
    FULL,
    LATE,
    LOST,
    NOISE,
    QUICK,
    REPEATED_SPACING,
    ROLLBACK,
    WORLD_SIZE,
    TradeoffSize,
    failures,
    measured_steps,
    repeated_failures,
    trials,
)
from holdfast.lab.sharded.trial_keys import curve_steps, planned_steps, repeated_steps


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_early_failures_are_in_the_warm_up_and_late_ones_after_the_longest_interval(size: TradeoffSize) -> None:
    for seed in range(5):
        planned = failures(size, 0, seed)
        assert [failure.phase for failure in planned].count(LATE) == size.late
        for failure in planned:
            assert (failure.step < size.model.warm_up) == (failure.phase != LATE)
            assert measured_steps(size, failure.step)[-1] < size.steps
            if failure.phase == LATE:
                assert failure.step >= max(size.intervals)


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_losses_after_a_failure_average_only_weights_from_after_the_failure_has_settled(size: TradeoffSize) -> None:
    for step in range(300, 340):
        steps = measured_steps(size, step)
        assert len(steps) == size.losses
        assert step + size.settle <= steps[0] - size.averaged < step + size.settle + size.spacing
        assert set(steps) <= set(curve_steps(size))  # the undisturbed run is measured there too


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_the_last_loss_of_a_long_run_is_measured_at_its_end(size: TradeoffSize) -> None:
    assert size.repeated_steps % (REPEATED_SPACING * size.spacing) == 0
    assert set(repeated_steps(size)) <= set(curve_steps(size))


def test_the_full_experiment_judges_its_claims_on_eight_failures_and_trains_fewer_than_45_000_steps() -> None:
    assert FULL.seeds * (FULL.early + FULL.late) >= 8
    assert sum(planned_steps(FULL, 0).values()) < 45_000


def test_a_larger_loss_contains_the_smaller_ones() -> None:
    (failure, *_) = failures(QUICK, 0, 0)
    one, two, four = (failure.lost(part) for part in LOST)
    assert one < two < four
    assert [len(lost) for lost in (one, two, four)] == [1, 2, 4]


def test_a_failure_has_a_trial_for_every_lost_part_and_interval_that_matters() -> None:
    (failure, *_) = failures(FULL, 0, 0)
    planned = list(trials(FULL, failure))
    assert len(planned) == 3 + 2 * 9 + 4 * 3 + 1 + 1
    assert {(trial.lost, trial.interval) for trial in planned if trial.strategy == ROLLBACK} == {
        (Fraction(0), interval) for interval in FULL.intervals
    }
    assert [trial.saved_at for trial in planned if trial.strategy == NOISE] == [failure.step]


def test_trials_that_restore_the_same_snapshot_are_measured_once() -> None:
    (early, *_) = failures(FULL, 0, 0)
    rollbacks = [trial for trial in trials(FULL, early) if trial.strategy == ROLLBACK]
    assert early.step < 200  # so the newest snapshot is the first one for both longer intervals
    assert rollbacks[1].key == rollbacks[2].key


def test_repeated_failures_have_their_rate_and_leave_a_survivor() -> None:
    for rate in (0.0006, 0.01, 0.9):
        lost = repeated_failures(FULL, 0, 0, rate)
        assert len(lost) == FULL.repeated_steps
        assert max(map(len, lost)) < WORLD_SIZE
        if rate == 0.01:
            assert sum(map(len, lost)) / len(lost) == pytest.approx(rate * WORLD_SIZE, rel=0.3)


def test_a_rollback_repeats_the_steps_since_the_snapshot() -> None:
    lost = [False, False, False, True, False, False, True, True]
    assert progress_under_rollback(lost, 2) == [0, 1, 2, 3, 3, 4, 5, 5, 5]
