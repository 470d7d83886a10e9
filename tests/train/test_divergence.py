"""Which rank is wrong: the majority decides in a group of ranks with the same state, and of two neither is blamed."""

import pytest

from holdfast.train.divergence import StateDifference, compare_states

NAMES = ("weight", "exp_avg of weight", "exp_avg_sq of weight")
GOOD, BAD, WORSE = (1, 2, 3), (1, 9, 3), (8, 9, 7)


def test_equal_states_are_no_difference() -> None:
    assert compare_states([{0: GOOD, 1: GOOD, 2: GOOD}], NAMES) is None
    assert compare_states([{0: GOOD, 1: GOOD}, {1: BAD, 2: BAD}, {2: WORSE, 0: WORSE}], NAMES) is None


def test_the_majority_names_the_rank_and_the_tensors_that_are_wrong() -> None:
    because = "rank 2 had another state than ranks 0 and 1 (exp_avg of weight)"
    assert compare_states([{0: GOOD, 1: GOOD, 2: BAD}], NAMES) == StateDifference((2,), 2, because)


def test_several_ranks_may_be_wrong() -> None:
    found = compare_states([{0: WORSE, 1: GOOD, 2: GOOD, 3: BAD, 4: GOOD}], NAMES)
    because = "ranks 0 and 3 had another state than ranks 1, 2 and 4 (weight, exp_avg of weight, exp_avg_sq of weight)"
    assert found == StateDifference((0, 3), 0, because)


@pytest.mark.parametrize("group", [{0: GOOD, 1: BAD}, {0: GOOD, 1: GOOD, 2: BAD, 3: BAD}, {0: GOOD, 1: BAD, 2: WORSE}])
def test_without_a_majority_no_rank_is_blamed(group: dict[int, tuple[int, ...]]) -> None:
    found = compare_states([group], NAMES)
    assert found is not None
    assert (found.ranks, found.culprit) == (tuple(group), None)
    assert "no majority tells which is right" in found.because


def test_only_the_group_that_differs_is_named() -> None:
    found = compare_states([{0: GOOD, 1: GOOD}, {1: BAD, 2: GOOD}, {2: WORSE, 0: WORSE}], NAMES)
    because = "ranks 1 and 2 differ in their state (exp_avg of weight; no majority tells which is right)"
    assert found == StateDifference((1, 2), None, because)
    found = compare_states([dict.fromkeys(range(9), GOOD) | {4: WORSE}], NAMES)
    assert found is not None
    assert found.because.startswith("rank 4 had another state than 8 other ranks (")
