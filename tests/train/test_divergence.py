"""Which rank is wrong: the majority decides among replicas, and of two copies neither is blamed."""

from holdfast.train.divergence import StateDifference, compare_copies, compare_replicas

NAMES = ("weight", "exp_avg of weight", "exp_avg_sq of weight")
GOOD, BAD, WORSE = (1, 2, 3), (1, 9, 3), (8, 9, 7)


def test_equal_states_are_no_divergence() -> None:
    assert compare_replicas([GOOD] * 3, NAMES) is None
    assert compare_copies([GOOD, BAD, WORSE], [WORSE, GOOD, BAD], NAMES) is None


def test_the_majority_of_replicas_names_the_rank_and_the_tensors_that_are_wrong() -> None:
    found = compare_replicas([GOOD, GOOD, BAD], NAMES)
    because = "rank 2 had another state than the other 2 ranks (exp_avg of weight)"
    assert found == StateDifference((2,), 2, because)
    found = compare_replicas([WORSE, GOOD, GOOD, BAD, GOOD], NAMES)
    assert found is not None
    assert (found.ranks, found.culprit) == ((0, 3), 0)


def test_without_a_majority_no_rank_is_blamed() -> None:
    found = compare_replicas([GOOD, BAD], NAMES)
    because = "ranks 0 and 1 had different states (exp_avg of weight; no majority tells which is right)"
    assert found == StateDifference((0, 1), None, because)
    found = compare_replicas([GOOD, GOOD, BAD, BAD], NAMES)
    assert found is not None
    assert found.culprit is None


def test_a_shard_that_differs_from_its_copy_names_both_ranks() -> None:
    found = compare_copies([GOOD, BAD, GOOD, GOOD], [GOOD, GOOD, GOOD, GOOD], NAMES)
    because = "the shard of rank 1 and its copy on rank 2 differed (exp_avg of weight)"
    assert found == StateDifference((1, 2), None, because)
    found = compare_copies([GOOD, GOOD], [WORSE, GOOD], NAMES)
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.because.startswith("the shard of rank 1 and its copy on rank 0 differed")
