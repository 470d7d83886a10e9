"""Policies: the same number of values written by each, the right blocks first, and never a random tie."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.policy import RANKINGS, SAVES, BlockInfo, Policy
from holdfast.errors import BadInput

fractions = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(1, 3), Fraction(1, 4), Fraction(1, 8)])
sizes = st.lists(st.integers(0, 50), min_size=1, max_size=40).map(lambda s: np.array(s, dtype=np.int64))
intervals = st.integers(1, 40)
partial_rankings = st.sampled_from(["priority", "round", "random"])


def standing(distances: list[float] | np.ndarray, **known: np.ndarray) -> BlockInfo:
    """Blocks of one value and of norm 1 that were last saved at step 0, unless said otherwise."""
    ones, zeros = np.ones(len(distances), dtype=np.int64), np.zeros(len(distances), dtype=np.int64)
    return BlockInfo(np.array(distances), **{"norms": ones.astype(float), "saved_at": zeros, "sizes": ones, **known})


def run(policy: Policy, sizes: np.ndarray, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Return what a policy saves during a run whose blocks move at random."""
    rng = np.random.default_rng(seed)
    saved_at, credit, chosen = np.zeros(len(sizes), dtype=np.int64), Fraction(0), []
    for step in range(1, steps + 1):
        if policy.due(step):
            now = standing(rng.random(len(sizes)), saved_at=saved_at, sizes=sizes)
            ids, credit = policy.choose(step, now, credit)
            saved_at[ids] = step
            chosen.append(ids)
    return chosen


@given(partial_rankings, fractions, sizes, st.integers(1, 6))
def test_in_the_long_run_every_policy_writes_the_state_once_an_interval(
    ranking: str, fraction: Fraction, sizes: np.ndarray, intervals: int
) -> None:
    policy = Policy(ranking=ranking, interval=24, fraction=fraction)
    written = sum(int(sizes[ids].sum()) for ids in run(policy, sizes, 24 * intervals))
    assert abs(written - intervals * int(sizes.sum())) <= int(sizes.max())


@given(partial_rankings, fractions, intervals, sizes, st.integers(1, 4))
def test_early_saves_of_the_same_bytes_save_every_block_once_in_the_first_interval(
    ranking: str, fraction: Fraction, interval: int, sizes: np.ndarray, count: int
) -> None:
    interval = max(interval, int(1 / fraction))
    policy = Policy(ranking=ranking, interval=interval, fraction=fraction, saves="early")
    assert [policy.written(n * interval) for n in range(1, count + 1)] == list(range(1, count + 1))
    first = np.sort(np.concatenate(run(policy, np.maximum(sizes, 1), interval)))
    assert first.tolist() == list(range(len(sizes)))


@given(partial_rankings, fractions, intervals)
def test_early_full_saves_cost_at_most_a_state_for_each_doubling_of_the_interval_and_only_once(
    ranking: str, fraction: Fraction, interval: int
) -> None:
    interval = max(interval, int(1 / fraction))
    regular = Policy(ranking=ranking, interval=interval, fraction=fraction)
    policy = replace(regular, saves="early-full")
    more = [policy.written(n * interval) - regular.written(n * interval) for n in (1, 2, 5)]
    assert more[0] == more[1] == more[2] <= (interval - 1).bit_length()
    assert fraction < 1 or more[0] == (interval - 1).bit_length()


@given(partial_rankings, fractions, intervals, sizes)
def test_with_early_full_saves_no_more_than_half_of_the_steps_that_were_done_is_lost(
    ranking: str, fraction: Fraction, interval: int, sizes: np.ndarray
) -> None:
    interval = max(interval, int(1 / fraction))
    policy = Policy(ranking=ranking, interval=interval, fraction=fraction, saves="early-full")
    for step in range(1, interval):
        newest = max(early for early in policy.early if early <= step)
        assert policy.due(newest)
        assert policy.choose(newest, standing(np.zeros(len(sizes)), sizes=sizes)).ids.tolist() == [*range(len(sizes))]
        assert 2 * newest > step


@given(partial_rankings, fractions, intervals, st.sampled_from(sorted(SAVES)))
def test_saves_begin_after_the_first_step_if_they_are_early_and_are_the_regular_ones_beyond_the_first_interval(
    ranking: str, fraction: Fraction, interval: int, saves: str
) -> None:
    interval = max(interval, int(1 / fraction))
    regular = Policy(ranking=ranking, interval=interval, fraction=fraction)
    policy = replace(regular, saves=saves)
    assert not policy.due(0)
    assert policy.due(1) or saves == "regular"
    for step in range(interval + 1, 4 * interval):
        assert policy.due(step) == regular.due(step)
        assert policy.at(step) is policy


def test_early_saves_of_an_interval_of_8_come_after_1_2_4_and_8_steps() -> None:
    regular = Policy(ranking="full", interval=8)
    due = {saves: [s for s in range(25) if replace(regular, saves=saves).due(s)] for saves in SAVES}
    assert due == {"regular": [8, 16, 24], "early": [1, 2, 4, 8, 16, 24], "early-full": [1, 2, 4, 8, 16, 24]}
    parts = {saves: [replace(regular, saves=saves).at(s).fraction for s in (1, 2, 4, 8, 16)] for saves in SAVES}
    quarter = Fraction(1, 4)
    assert parts["early"] == [quarter, quarter, quarter, quarter, 1]
    assert parts["early-full"] == [1, 1, 1, 1, 1]


@given(fractions, sizes, st.integers(0, 2**32))
def test_priority_leaves_out_no_block_that_moved_more_a_value_than_one_it_took(
    fraction: Fraction, sizes: np.ndarray, seed: int
) -> None:
    distances = np.random.default_rng(seed).integers(0, 5, size=len(sizes)).astype(float)
    policy = Policy(ranking="priority", interval=24, fraction=fraction)
    ids, _ = policy.choose(24, standing(distances, sizes=sizes))
    left = np.setdiff1d(np.arange(len(sizes)), ids)
    a_value = distances / np.sqrt(np.maximum(sizes, 1))
    assert a_value[ids].min(initial=np.inf) >= a_value[left].max(initial=-np.inf)


def test_priority_does_not_spend_every_save_on_one_large_block_that_moves_a_little_everywhere() -> None:
    policy = Policy(ranking="priority", interval=8, fraction=Fraction(1, 8))
    ids, _ = policy.choose(1, standing([4.0, 2.0, 2.0], sizes=np.array([72, 14, 14])))
    assert ids.tolist() == [1]


@given(st.sampled_from(sorted(RANKINGS)), sizes, st.integers(1, 100), st.integers(0, 2**32))
def test_the_same_question_has_the_same_answer(ranking: str, sizes: np.ndarray, step: int, seed: int) -> None:
    policy = Policy(
        ranking=ranking, interval=8, fraction=Fraction(1, 4) if ranking != "full" else Fraction(1), seed=seed
    )
    equal = standing(np.ones(len(sizes)), sizes=sizes)
    first, again = policy.choose(step, equal), policy.choose(step, equal)
    assert np.array_equal(first.ids, again.ids)
    assert first.credit == again.credit


def test_ties_go_to_the_longest_unsaved_and_then_to_the_lowest_number() -> None:
    policy = Policy(ranking="priority", interval=8, fraction=Fraction(1, 2))
    ids, _ = policy.choose(4, standing([1.0, 1.0, 1.0, 1.0], saved_at=np.array([3, 1, 1, 1])))
    assert ids.tolist() == [1, 2]


def test_relative_priority_goes_by_the_change_in_proportion_to_the_block() -> None:
    policy = Policy(ranking="relative", interval=8, fraction=Fraction(1, 2))
    moved = standing([10.0, 1.0, 3.0, 40.0], norms=np.array([100.0, 1.0, 3.0, 0.0]))  # the last has fallen to nothing
    assert policy.choose(4, moved).ids.tolist() == [1, 3]


def test_threshold_saves_only_what_moved_more_than_the_mean_and_keeps_the_rest_of_its_budget() -> None:
    policy = Policy(ranking="threshold", interval=8, fraction=Fraction(1, 2))
    ids, credit = policy.choose(4, standing([9.0, 1.0, 1.0, 1.0]))
    assert ids.tolist() == [0]
    assert credit == 1
    assert policy.choose(8, standing([0.0, 5.0, 5.0, 5.0]), credit).ids.tolist() == [1, 2, 3]


def test_round_gives_every_block_its_turn() -> None:
    chosen = run(Policy(ranking="round", interval=8, fraction=Fraction(1, 4)), np.ones(8, dtype=np.int64), 8)
    assert [ids.tolist() for ids in chosen] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_block_larger_than_the_budget_is_saved_and_paid_for_later() -> None:
    sizes = np.array([90, 10])
    chosen = run(Policy(ranking="round", interval=10, fraction=Fraction(1, 10)), sizes, 20)
    assert [ids.tolist() for ids in chosen[:11]] == [[0], [], [], [], [], [], [], [], [], [1], [0]]


@pytest.mark.parametrize(
    ("interval", "fraction", "due"), [(8, "1/4", [2, 4, 6, 8]), (6, "1/4", [2, 3, 5, 6]), (3, "1", [3, 6])]
)
def test_a_save_is_due_every_r_c_steps_even_when_that_is_no_whole_number(
    interval: int, fraction: str, due: list[int]
) -> None:
    policy = Policy(ranking="priority", interval=interval, fraction=Fraction(fraction))
    assert [step for step in range(9) if policy.due(step)][: len(due)] == due


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"ranking": "best"}, "no policy 'best'"),
        ({"fraction": Fraction(0)}, r"must be in \(0, 1\]"),
        ({"fraction": Fraction(3, 2)}, r"must be in \(0, 1\]"),
        ({"ranking": "full", "fraction": Fraction(1, 2)}, "its fraction must be 1"),
        ({"saves": "soon"}, "cannot start 'soon': choose one of regular, early, early-full"),
        ({"interval": 2, "fraction": Fraction(1, 4)}, "more than one save per step"),
    ],
)
def test_an_invalid_policy_is_refused(bad: dict[str, object], says: str) -> None:
    good: dict[str, object] = {"ranking": "priority", "interval": 8, "fraction": Fraction(1, 2)}
    with pytest.raises(BadInput, match=says):
        Policy(**{**good, **bad})  # type: ignore[arg-type]
