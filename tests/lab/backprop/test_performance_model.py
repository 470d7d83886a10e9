"""The performance model gives what the paper's Table I gives by hand."""

import pytest

from holdfast.lab.backprop.performance_model import (
    Overhead,
    Prices,
    checkpoint_restart,
    immediate_rollback,
    rollback_slowdown,
)

RESNET50 = Prices(minibatch=0.17, save=0.48, init=3.0, load=4.09)
NT3 = Prices(minibatch=2.2, save=3.4, init=1.9, load=2.5)


def test_checkpoint_restart_pays_for_the_mini_batches_since_the_checkpoint_and_a_restart() -> None:
    found = checkpoint_restart(RESNET50, since=200, saves=1)  # the paper's first scenario
    assert (found.replay, found.checkpoint, found.restart) == pytest.approx((34.0, 0.48, 7.09))
    assert found.total == pytest.approx(41.57)


def test_a_failure_at_a_random_moment_replays_half_an_epoch() -> None:
    assert checkpoint_restart(RESNET50, since=390 / 2).replay == pytest.approx(33.15)
    assert checkpoint_restart(NT3, since=55 / 2) == Overhead(replay=27.5 * 2.2, restart=pytest.approx(4.4))


def test_immediate_rollback_replays_one_minibatch_and_saves_nothing() -> None:
    assert immediate_rollback(NT3) == Overhead(replay=2.2, restart=1.9)


@pytest.mark.parametrize(("point", "expected"), [(0.0, 1.25), (0.5, 1.625), (1.0, 2.0)])
def test_a_rolled_back_minibatch_takes_its_forward_and_the_backward_before_the_failure_longer(
    point: float, expected: float
) -> None:
    assert rollback_slowdown(point=point, forward=1, backward=2, update=1) == pytest.approx(expected)
