"""What a failed step's gradient is: laws that hold for every world, every loss and every strategy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput
from holdfast.live.lossy_gradient import STRATEGIES, normal, weights

worlds = st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any)


@st.composite
def failures(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    """The samples of each worker, and casualties that leave a survivor."""
    samples = draw(worlds)
    lost = draw(st.sets(st.integers(0, len(samples) - 1), max_size=len(samples) - 1))
    return samples, lost


@given(failures(), st.sampled_from(STRATEGIES), st.booleans())
def test_the_weights_of_a_bucket_add_up_to_one_or_the_bucket_is_dropped(
    failure: tuple[list[int], set[int]], strategy: str, completed: bool
) -> None:
    samples, lost = failure
    found = weights(strategy, completed=completed, samples=samples, casualties=lost)
    assert found is None or sum(found) == pytest.approx(1)


@given(worlds, st.sampled_from(STRATEGIES), st.booleans())
def test_without_casualties_every_strategy_is_the_normal_step(
    samples: list[int], strategy: str, completed: bool
) -> None:
    assert weights(strategy, completed=completed, samples=samples, casualties=()) == normal(samples)


@given(failures(), st.booleans())
def test_replay_is_the_normal_step(failure: tuple[list[int], set[int]], completed: bool) -> None:
    samples, lost = failure
    assert weights("replay", completed=completed, samples=samples, casualties=lost) == normal(samples)


@given(failures())
def test_forward_keeps_completed_buckets_and_weights_the_survivors_alone_in_the_rest(
    failure: tuple[list[int], set[int]],
) -> None:
    samples, lost = failure
    assert weights("forward", completed=True, samples=samples, casualties=lost) == normal(samples)
    left = [samples[worker] for worker in range(len(samples)) if worker not in lost]
    found = weights("forward", completed=False, samples=samples, casualties=lost)
    if not any(left):
        assert found is None
        return
    assert found is not None
    assert tuple(found[worker] for worker in range(len(samples)) if worker not in lost) == normal(left)
    assert not any(found[worker] for worker in lost)


def test_skip_drops_the_whole_step_completed_or_not() -> None:
    for completed in (True, False):
        assert weights("skip", completed=completed, samples=[4, 4], casualties={1}) is None


def test_uneven_shares_are_weighted_by_their_samples() -> None:
    assert weights("forward", completed=False, samples=[3, 2, 1], casualties={0}) == (0, 2 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("strategy", "samples", "lost", "why"),
    [
        ("hope", [1, 1], {0}, "no strategy 'hope': choose one of replay, forward, skip"),
        ("forward", [1], {0}, "forward needs a survivor"),
        ("forward", [1, 1], {0, 1, 2}, "Worker 2 cannot be lost: there are workers 0 to 1"),
        ("skip", [0, 0], {0}, "trains nothing"),
        ("replay", [], (), "trains nothing"),
    ],
)
def test_contradictory_arguments_are_refused_in_one_line(
    strategy: str, samples: list[int], lost: set[int], why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        weights(strategy, completed=False, samples=samples, casualties=lost)
