"""Nodes that choose together what to save come to the very choice of a policy that sees every block."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import fsum, inf, nan, nextafter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.blocks.division import Ids, partition
from holdfast.blocks.policy import RANKINGS, BlockChoice, BlockInfo, Policy, at_most, exact_sum
from holdfast.server.selection import BINS, FEW, Candidates, Survey, exchange

MANY_BINS = 1 << 40  # so many that every node lists its blocks at once
rankings = st.sampled_from(sorted(RANKINGS))
fractions = st.sampled_from(
    [Fraction(1), Fraction(1, 2), Fraction(1, 3), Fraction(1, 4), Fraction(1, 8), Fraction(7, 9)]
)
credits = st.fractions(-40, 40, max_denominator=12)
seeds = st.integers(0, 2**32)

DISTANCES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "all different": lambda rng, count: rng.random(count),
    "few different": lambda rng, count: rng.integers(0, 4, count) / 3,
    "all equal": lambda rng, count: np.full(count, 0.1),
    "zeros of both signs": lambda rng, count: rng.choice([0.0, -0.0], count),
    "nothing moved": lambda rng, count: np.zeros(count),
    "from very small to very large": lambda rng, count: 10.0 ** rng.uniform(-320, 300, count),
    "nearly equal": lambda rng, count: np.nextafter(1.0, 2.0) * np.ones(count) - rng.integers(0, 3, count) * 2.0**-52,
}


def some_info(rng: np.random.Generator, count: int, kind: str, equal_sizes: bool) -> BlockInfo:
    sizes = np.full(count, 3) if equal_sizes else rng.integers(0, 20, count)
    norms = rng.choice([0.0, 1e-300, 0.5, 2.0], count)
    return BlockInfo(DISTANCES[kind](rng, count), norms, rng.integers(0, 4, count), sizes)


def a_policy(ranking: str, fraction: Fraction, seed: int = 0) -> Policy:
    return Policy(ranking=ranking, interval=24, fraction=Fraction(1) if ranking == "full" else fraction, seed=seed)


def on_nodes(policy: Policy, step: int, info: BlockInfo, owners: Ids, nodes: int) -> list[Candidates]:
    """The blocks of a standing as the nodes that hold them see them."""
    held = [np.flatnonzero(owners == node) for node in range(nodes)]
    parts = [BlockInfo(info.distances[ids], info.norms[ids], info.saved_at[ids], info.sizes[ids]) for ids in held]
    count = len(owners)
    return [Candidates(policy, step, ids, part, count) for ids, part in zip(held, parts, strict=True)]


def chosen(policy: Policy, credit: Fraction, nodes: Sequence[Candidates], bins: int = BINS) -> BlockChoice:
    """Return the blocks that all nodes save together, and the remaining budget."""
    selection = exchange(policy, credit, lambda *question: [node.answer(*question) for node in nodes], bins)
    return BlockChoice(np.sort(np.concatenate([node.taken(selection.verdict) for node in nodes])), selection.credit)


def assert_same(one: BlockChoice, other: BlockChoice) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert one.credit == other.credit


@settings(max_examples=150, deadline=None)
@given(
    rankings,
    fractions,
    credits,
    st.sampled_from(sorted(DISTANCES)),
    st.booleans(),
    st.integers(1, 300),
    st.integers(1, 7),
    st.sampled_from([2, 4, 16, BINS]),
    seeds,
)
def test_histograms_and_whole_lists_choose_the_same_blocks_as_the_policy(
    ranking: str,
    fraction: Fraction,
    credit: Fraction,
    kind: str,
    equal_sizes: bool,
    count: int,
    nodes: int,
    bins: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    info = some_info(rng, count, kind, equal_sizes)
    policy = a_policy(ranking, fraction, seed)
    asked = on_nodes(policy, 24, info, partition(count, nodes, rng), nodes)
    expected = policy.choose(24, info, credit)
    assert_same(chosen(policy, credit, asked, MANY_BINS), expected)
    assert_same(chosen(policy, credit, asked, bins), expected)


@pytest.mark.parametrize("ranking", sorted(RANKINGS))
@pytest.mark.parametrize("kind", sorted(DISTANCES))
def test_the_choice_is_the_policys_whatever_the_distances_are_like(kind: str, ranking: str) -> None:
    rng = np.random.default_rng(5)
    info, policy = some_info(rng, 300, kind, equal_sizes=False), a_policy(ranking, Fraction(1, 3))
    nodes = on_nodes(policy, 24, info, partition(300, 3, rng), 3)
    assert_same(chosen(policy, Fraction(0), nodes, 4), policy.choose(24, info))


@pytest.mark.parametrize("ranking", sorted(RANKINGS))
def test_a_run_of_saves_never_parts_from_the_central_one(ranking: str) -> None:
    rng = np.random.default_rng(7)
    count, nodes = 5000, 4
    owners, sizes = partition(count, nodes, rng), rng.integers(0, 30, count)
    policy = a_policy(ranking, Fraction(1, 8), seed=3)
    saved_at, credit = np.zeros(count, np.int64), Fraction(0)
    for step in range(3, 60, 3):
        info = BlockInfo(rng.exponential(size=count), rng.random(count), saved_at, sizes)
        expected = policy.choose(step, info, credit)
        assert_same(chosen(policy, credit, on_nodes(policy, step, info, owners, nodes)), expected)
        credit, saved_at = expected.credit, saved_at.copy()
        saved_at[expected.ids] = step


def test_a_node_without_candidates_takes_part() -> None:
    info = BlockInfo(np.array([0.0, 0.0, 5.0, 6.0]), np.ones(4), np.zeros(4, np.int64), np.ones(4, np.int64))
    policy = a_policy("threshold", Fraction(1, 4))
    nodes = on_nodes(policy, 24, info, np.array([0, 0, 1, 1]), 3)
    assert chosen(policy, Fraction(0), nodes).ids.tolist() == [2]


def test_no_block_is_above_the_mean_of_equal_ones_and_the_budget_is_kept() -> None:
    info = BlockInfo(np.full(10, 0.1), np.ones(10), np.zeros(10, np.int64), np.ones(10, np.int64))
    policy = a_policy("threshold", Fraction(1, 2))
    nodes = on_nodes(policy, 24, info, np.arange(10) % 3, 3)
    assert_same(policy.choose(24, info), BlockChoice(np.zeros(0, np.int64), Fraction(5)))
    assert_same(chosen(policy, Fraction(0), nodes), BlockChoice(np.zeros(0, np.int64), Fraction(5)))


@pytest.mark.parametrize("ranking", ["priority", "relative", "threshold", "round"])
def test_blocks_that_diverged_are_chosen_as_the_policy_chooses_them(ranking: str) -> None:
    distances = np.array([nan, 1.0, inf, 2.0, nan, 3.0])
    info = BlockInfo(distances, np.ones(6), np.zeros(6, np.int64), np.ones(6, np.int64))
    policy = a_policy(ranking, Fraction(1, 2))
    nodes = on_nodes(policy, 24, info, np.array([0, 1, 0, 1, 1, 0]), 2)
    assert_same(chosen(policy, Fraction(0), nodes, 2), policy.choose(24, info))


def test_a_node_may_be_asked_anything_again_and_in_any_order() -> None:
    rng = np.random.default_rng(0)
    info = some_info(rng, 3000, "few different", equal_sizes=False)
    policy = a_policy("priority", Fraction(1, 4))
    (node,) = on_nodes(policy, 24, info, np.zeros(3000, np.int64), 1)
    asked: list[tuple[tuple[Any, ...], Any]] = []

    def ask(*question: Any) -> list[Any]:
        asked.append((question, node.answer(*question)))
        return [asked[-1][1]]

    exchange(policy, Fraction(0), ask, 16)
    for question, answer in [*reversed(asked), *asked]:
        again = node.answer(*question)
        assert all(np.array_equal(a, b) for a, b in zip(again, answer, strict=True))


@pytest.mark.parametrize("ranking", ["priority", "relative", "round", "random"])
@pytest.mark.parametrize(("each", "questions"), [(64, ["survey"]), (65, ["survey", "histogram"])])
def test_one_question_is_enough_where_every_node_has_few_blocks(ranking: str, each: int, questions: list[str]) -> None:
    rng = np.random.default_rng(1)
    nodes, bins = 3, 64 // FEW
    info, policy = some_info(rng, nodes * each, "all different", False), a_policy(ranking, Fraction(1, 4))
    asked = on_nodes(policy, 24, info, np.arange(nodes * each) % nodes, nodes)
    put: list[str] = []

    def ask(*question: Any) -> list[Any]:
        put.append(question[0])
        return [node.answer(*question) for node in asked]

    verdict = exchange(policy, Fraction(0), ask, bins).verdict
    assert put[: len(questions)] == questions
    assert len(questions) > 1 or put == questions
    taken = np.sort(np.concatenate([node.taken(verdict) for node in asked]))
    assert taken.tolist() == policy.choose(24, info).ids.tolist()


def test_blocks_are_sent_with_the_first_answer_only_where_they_are_few_and_a_part_is_saved() -> None:
    rng = np.random.default_rng(2)
    info = some_info(rng, 100, "all different", False)
    owners = (np.arange(100) >= 40).astype(np.int64)
    few, many = (node.survey(-inf, 50) for node in on_nodes(a_policy("priority", Fraction(1, 2)), 24, info, owners, 2))
    assert isinstance(few, Survey)
    assert few.blocks is not None
    assert len(few.blocks.ids) == 40
    assert isinstance(many, Survey)
    assert many.blocks is None
    (full,) = on_nodes(a_policy("full", Fraction(1)), 24, info, np.zeros(100, np.int64), 1)
    asked = []
    exchange(
        a_policy("full", Fraction(1)), Fraction(0), lambda *question: asked.append(question) or [full.answer(*question)]
    )
    assert asked == [("survey", -inf, 0)]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(DISTANCES)), st.sampled_from(["priority", "round", "random", "threshold"]), seeds)
def test_a_round_sends_no_more_than_nodes_times_bins(kind: str, ranking: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, nodes, bins = 20_000, 4, 64
    policy = a_policy(ranking, Fraction(1, 4))
    asked = on_nodes(policy, 24, some_info(rng, count, kind, True), partition(count, nodes, rng), nodes)
    rounds = []

    def ask(*question: Any) -> list[Any]:
        answers = [node.answer(*question) for node in asked]
        rounds.append((question, sum(map(array_bytes, answers))))
        return answers

    exchange(policy, Fraction(0), ask, bins)
    assert all(sent <= nodes * bins * 16 for question, sent in rounds if question[0] == "histogram")
    assert all(sent <= bins * 32 for question, sent in rounds if question[0] == "blocks")
    assert all(sent <= nodes * (FEW * bins * 32 + 100) for question, sent in rounds if question[0] == "survey")
    assert len(rounds) <= 3 + 3 * 64 // 6


def array_bytes(message: object) -> int:
    if isinstance(message, np.ndarray):
        return message.nbytes
    return sum(map(array_bytes, message)) if isinstance(message, tuple) else 8


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(finite, max_size=30), st.integers(0, 30))
def test_sums_of_parts_add_up_exactly_to_the_sum_of_the_whole(values: list[float], at: int) -> None:
    array = np.array(values)
    assert exact_sum(array) == exact_sum(array[:at]) + exact_sum(array[at:]) == sum(map(Fraction, values), Fraction(0))


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=30))
def test_an_exact_sum_rounds_to_the_result_of_fsum(values: list[float]) -> None:
    assert float(exact_sum(np.array(values))) == fsum(values)


@given(finite, finite, st.integers(1, 9))
def test_a_float_is_above_a_number_exactly_if_it_is_above_the_largest_float_below(a: float, b: float, n: int) -> None:
    number = (Fraction(a) + Fraction(b)) / (n + 1)
    nearest = float(number)
    for near in (nearest, nextafter(nearest, -inf), nextafter(nearest, inf)):
        assert (near > at_most(number)) == (Fraction(near) > number if np.isfinite(near) else near > 0)
