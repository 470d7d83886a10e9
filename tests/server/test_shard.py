"""The blocks of a node: their versions and saved values, and the pushes for them."""

import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.partition_map import PartitionMap
from holdfast.blocks.policy import Policy
from holdfast.errors import BadInput
from holdfast.server.selection import Candidates, exchange
from holdfast.server.shard import BlocksMoved, HeldBlocks, Shard, restored
from holdfast.workloads.cnn import cnn
from holdfast.workloads.divided import Push
from holdfast.workloads.lda import lda
from holdfast.workloads.mf import mf
from holdfast.workloads.mlr import mlr
from marked_workload import (
    COLUMNS,
    COUNT,
    EVERY,
    FULL,
    NOTHING,
    WORKERS,
    WORKLOAD,
    a_shard,
    marks_of,
    packed,
    push_of,
    same,
    when_is,
)

# The words of a round.


def test_pulled_blocks_are_a_copy_packed_like_the_workload_packs_them() -> None:
    shard, ids = a_shard([0, 2, 5, 7, 8, 9]), np.array([2, 5, 9])
    pulled = shard.pull(ids)
    assert same(pulled, packed(WORKLOAD.start(), ids))
    for array in pulled.values():
        array += 1
    assert same(shard.pull(ids), packed(WORKLOAD.start(), ids))


@pytest.mark.parametrize("ids", [[1, 0], [0, 0], list(reversed(EVERY))])
def test_blocks_are_asked_for_in_rising_order(ids: list[int]) -> None:
    with pytest.raises(BadInput, match="in rising order"):
        a_shard().pull(np.array(ids))


def test_a_round_is_applied_when_it_is_committed_and_not_before() -> None:
    shard, when = a_shard(), when_is(0)
    for worker in range(WORKERS):
        assert shard.push(when, worker, push_of(worker, when), 0).tolist() == EVERY.tolist()
    assert not marks_of([shard]).any()
    applied = shard.commit(when, range(WORKERS), 0)
    assert applied.tolist() == EVERY.tolist()
    assert (marks_of([shard])[:, :WORKERS] == 1).all()
    assert shard.versions.tolist() == [1] * COUNT
    assert shard.pull(EVERY)["changes"].tolist() == [1] * 5


def test_the_same_push_and_the_same_commit_twice_are_one() -> None:
    shard, when = a_shard(), when_is(0)
    for worker in [0, 1, 1, 2, 0]:
        shard.push(when, worker, push_of(worker, when), 0)
    shard.commit(when, range(WORKERS), 0)
    once = shard.pull(EVERY)
    assert shard.push(when, 1, push_of(1, when), 0).tolist() == []
    again = shard.commit(when, range(WORKERS), 0)
    assert again.tolist() == []
    assert same(shard.pull(EVERY), once)


def test_blocks_without_a_push_are_unchanged() -> None:
    shard, when = a_shard(), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([1, 6, 9])), 0)
    shard.push(when, 2, push_of(2, when, np.array([0, 1])), 0)
    assert shard.commit(when, range(WORKERS), 0).tolist() == EVERY.tolist()
    had = marks_of([shard])[:, :WORKERS]
    assert np.flatnonzero(had[:, 0]).tolist() == [1, 6, FULL.index(9)]
    assert np.flatnonzero(had[:, 2]).tolist() == [0, 1]
    assert shard.pull(EVERY)["changes"].tolist() == [1, 1, 0, 0, 0]
    assert shard.versions.tolist() == [1] * COUNT


def test_blocks_that_miss_an_earlier_round_are_left_alone() -> None:
    shard, when = a_shard(), when_is(1)
    shard.push(when, 0, push_of(0, when), 0)
    applied = shard.commit(when, range(WORKERS), 0)
    assert applied.tolist() == []
    assert not marks_of([shard]).any()


@given(st.permutations(range(5)), st.integers(0, 2**32))
def test_the_sum_is_that_in_the_order_of_the_workers_whenever_they_pushed(order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    amounts = [10.0 ** rng.integers(-8, 8) * rng.standard_normal((5, COLUMNS)) for _ in range(5)]
    shard, when, ids = a_shard(), when_is(0), np.arange(5)
    for worker in order:
        shard.push(when, worker, Push(ids, {"rows": amounts[worker]}), 0)
    shard.commit(when, range(5), 0)
    assert np.array_equal(shard.pull(ids)["rows"], sum(amounts, np.zeros((5, COLUMNS))))


def test_a_push_is_kept_until_its_round_is_committed() -> None:
    shard, when, marks = a_shard(), when_is(0), np.ones((1, COLUMNS))
    kept = weakref.ref(marks)
    shard.push(when, 0, Push(np.array([0]), {"rows": marks}), 0)
    del marks
    assert kept() is not None
    shard.commit(when, [0], 0)
    assert kept() is None


def test_a_push_is_not_modified() -> None:
    shard, when = a_shard(), when_is(0)
    values = {name: array.copy() for name, array in push_of(0, when).values.items()}
    for array in values.values():
        array.flags.writeable = False
    push = Push(EVERY, values)
    shard.push(when, 0, push, 0)
    shard.commit(when, [0], 0)
    shard.push(when_is(1), 0, push_of(0, when_is(1)), 0)
    shard.commit(when_is(1), [0], 0)
    assert same(push.values, push_of(0, when).values)


def test_a_summary_is_about_the_blocks_that_are_here() -> None:
    shard, when = a_shard([0, 1]), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1])), 0)
    shard.commit(when, [0], 0)
    assert shard.summary()["marks"].tolist() == [4.0]


def test_a_summary_is_computed_once_until_blocks_change() -> None:
    shard, asked = a_shard([0, 1]), []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(WORKLOAD, name)

        def summary(self, *about: Any) -> Any:
            asked.append(about)
            return WORKLOAD.summary(*about)

    shard._workload = Counting()  # type: ignore[assignment]
    assert same(shard.summary(), shard.summary())
    assert len(asked) == 1

    when, ids = when_is(0), np.array([0, 1])
    for change in (
        lambda: (shard.push(when, 0, push_of(0, when, ids), 0), shard.commit(when, [0], 0)),
        lambda: shard.apply(when_is(1), 0, push_of(0, when_is(1), ids), 0),
        lambda: shard.adopt(a_shard([2, 3]).give(np.array([2, 3])), 1),
        lambda: shard.drop(np.array([0]), 2),
    ):
        before = len(asked)
        change()
        assert same(shard.summary(), WORKLOAD.summary(shard.ids, shard.pull(shard.ids)))
        assert len(asked) == before + 1


# Other maps.


def test_asking_for_blocks_of_another_node_raises_blocks_moved() -> None:
    shard = a_shard([0, 1])
    for ask in (
        lambda: shard.pull(np.array([1, 2])),
        lambda: shard.push(when_is(0), 0, push_of(0, when_is(0), np.array([1, 2])), 0),
        lambda: shard.give(np.array([2])),
        lambda: shard.mark_saved(np.array([2]), 1),
    ):
        with pytest.raises(BlocksMoved, match="block 2 is not on this node"):
            ask()


def test_requests_by_an_older_map_are_refused() -> None:
    shard = a_shard([0, 1])
    shard.adopt(a_shard([2]).give(np.array([2])), 5)
    for ask in (
        lambda: shard.push(when_is(0), 0, push_of(0, when_is(0), np.array([1])), 4),
        lambda: shard.commit(when_is(0), [0], 4),
        lambda: shard.adopt(a_shard([3]).give(np.array([3])), 4),
        lambda: shard.drop(np.array([1]), 4),
    ):
        with pytest.raises(BlocksMoved, match="version 4 is older than this node's blocks, of version 5"):
            ask()
    assert shard.ids.tolist() == [0, 1, 2]


def test_earlier_pushes_are_not_applied_to_adopted_blocks() -> None:
    shard, when = a_shard([0, 1]), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1])), 0)
    shard.adopt(a_shard([2]).give(np.array([2])), 1)
    with pytest.raises(BlocksMoved):
        shard.commit(when, [0], 0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1, 2])), 1)
    shard.commit(when, [0], 1)
    assert shard.pull(np.array([0, 1, 2]))["rows"][:, 0].tolist() == [1, 1, 1]


def test_pushes_by_an_older_map_are_discarded_when_blocks_arrive() -> None:
    shard, when = a_shard([0, 1]), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1])), 0)
    shard.push(when, 1, push_of(1, when, np.array([0, 1])), 1)
    shard.adopt(a_shard([2]).give(np.array([2])), 1)
    shard.commit(when, [0, 1], 1)
    assert shard.pull(np.array([0, 1]))["rows"][:, :2].tolist() == [[0, 1], [0, 1]]


def test_a_push_by_a_newer_map_takes_the_place_of_an_older_one_and_never_the_other_way_round() -> None:
    shard, when, ids = a_shard(), when_is(0), np.array([0])
    for amount, map_version in [(1.0, 0), (5.0, 2), (3.0, 1)]:
        shard.push(when, 0, Push(ids, {"rows": np.full((1, COLUMNS), amount)}), map_version)
    shard.commit(when, [0], 2)
    assert shard.pull(ids)["rows"][0, 0] == 5.0


def test_adopting_again_does_not_set_blocks_back() -> None:
    shard, when, ids = a_shard([0]), when_is(0), np.array([0, 3])
    holding = a_shard([3]).give(np.array([3]))
    shard.adopt(holding, 1)
    shard.push(when, 0, push_of(0, when, ids), 1)
    shard.commit(when, [0], 1)
    shard.adopt(holding, 1)
    assert shard.versions.tolist() == [1, 1]
    assert shard.pull(ids)["rows"][:, 0].tolist() == [1, 1]


def test_full_recovery_puts_saved_values_in_the_place_of_newer_ones() -> None:
    shard, when = a_shard(), when_is(0)
    shard.push(when, 0, push_of(0, when), 0)
    shard.commit(when, [0], 0)
    shard.adopt(restored(EVERY, packed(WORKLOAD.start(), EVERY), np.zeros(COUNT, np.int64), 1), 1)
    assert not marks_of([shard]).any()
    assert shard.versions.tolist() == [1] * COUNT


def test_blocks_travel_with_their_versions_and_their_saved_values() -> None:
    one, other, when, ids = a_shard([0, 1, 5, 9]), a_shard([2, 6]), when_is(0), np.array([1, 9])
    one.push(when, 0, push_of(0, when, one.ids), 0)
    one.commit(when, [0], 0)
    one.mark_saved(np.array([9]), 1)
    other.adopt(one.give(ids), 1)
    one.drop(ids, 1)
    one.drop(ids, 1)
    assert one.ids.tolist() == [0, 5]
    assert other.ids.tolist() == [1, 2, 6, 9]
    assert other.versions.tolist() == [1, 0, 0, 1]
    assert other.saved_at.tolist() == [0, 0, 0, 1]
    assert other.distances().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert other.pull(ids)["words"][:, 0].tolist() == [1.0, 1.0, 1.0]
    assert other.pull(ids)["changes"].tolist() == [1.0]


# Saves.


def test_distances_are_those_of_the_workload_between_present_and_saved_values() -> None:
    shard, when = a_shard(), when_is(0)
    shard.push(when, 0, push_of(0, when), 0)
    shard.commit(when, [0], 0)
    lengths = np.sqrt([1, 1, 1, 1, 1, 2, 1, 2, 0, 3, 1])
    assert np.allclose(shard.distances(), lengths)
    assert np.allclose(shard.block_info("relative").norms, lengths)
    shard.mark_saved(np.array([0, 5]), 1)
    assert np.allclose(shard.distances(), np.where(np.isin(EVERY, [0, 5]), 0, lengths))
    assert np.allclose(shard.block_info("relative").norms, lengths)


@pytest.mark.parametrize(
    "made",
    [
        lambda: mlr("digits"),
        lambda: mf("generated"),
        lambda: lda("generated"),
        lambda: cnn("digits", partition="layer"),
        lambda: cnn("digits", partition="shard"),
    ],
    ids=["mlr", "mf", "lda", "cnn by layer", "cnn by shard"],
)
def test_distances_on_nodes_are_bit_by_bit_those_of_the_whole_state(made: Callable[[], Any]) -> None:
    workload, rng = made(), np.random.default_rng(3)
    blocks, state, saved = workload.blocks, workload.start(0), workload.start(1)
    for array in saved.values():
        if array.dtype.kind == "f":
            array += rng.standard_normal(array.shape).astype(array.dtype)
    distances = np.zeros(len(blocks))
    partition = PartitionMap.random(len(blocks), range(3), rng)
    for node in partition.nodes:
        ids, shard = partition.held_by(node), Shard(workload)
        packs = [{name: np.asarray(a) for name, a in blocks.pack(s, ids).items()} for s in (state, saved)]
        shard.adopt(HeldBlocks(ids, packs[0], np.zeros(len(ids), int), packs[1], np.zeros(len(ids), int), {}), 0)
        distances[ids] = shard.distances()
    assert distances.any()
    assert np.array_equal(distances, workload.norm(blocks, state, saved))


def test_a_save_returns_the_values_to_write_and_repeats_them() -> None:
    shard, ids = a_shard(), np.array([2, 6, 9])
    first = shard.mark_saved(ids, 1)
    assert same(first, shard.pull(ids))
    shard.push(when_is(0), 0, push_of(0, when_is(0)), 0)
    shard.commit(when_is(0), [0], 0)
    assert same(shard.mark_saved(ids, 1), first)
    assert same(shard.mark_saved(ids, 2), shard.pull(ids))
    assert shard.saved_at[ids].tolist() == [2, 2, 2]


@pytest.mark.parametrize("ranking", ["priority", "relative", "round", "threshold", "random"])
def test_shards_choose_together_what_one_node_would_choose(ranking: str) -> None:
    policy, when = Policy(ranking=ranking, interval=8, fraction=Fraction(1, 4)), when_is(0)
    alone, shards = a_shard(), [a_shard([0, 3, 7]), a_shard([1, 2, 5, 9]), a_shard([4, 6, 8, 10])]
    for shard in (alone, *shards):
        ids = shard.ids[shard.ids % 2 == 1]
        shard.push(when, 0, push_of(0, when, ids), 0)
        shard.commit(when, [0], 0)
    assert chosen(policy, shards) == set(policy.choose(4, alone.block_info(ranking)).ids.tolist())


def chosen(policy: Policy, shards: Sequence[Shard]) -> set[int]:
    nodes = [Candidates(policy, 4, shard.ids, shard.block_info(policy.ranking), COUNT) for shard in shards]
    selection = exchange(policy, Fraction(0), lambda *question: [node.answer(*question) for node in nodes])
    return {int(block) for node in nodes for block in node.taken(selection.verdict)}


def test_an_empty_node_answers_every_request() -> None:
    shard = Shard(WORKLOAD)
    assert shard.pull(NOTHING) == {}
    assert shard.distances().tolist() == []
    assert shard.commit(when_is(0), [0], 0).tolist() == []
    assert shard.mark_saved(NOTHING, 1) == {}
    assert shard.block_info("relative").sizes.tolist() == []


# What a workload's own author may get wrong.


@pytest.mark.parametrize(
    ("push", "line"),
    [
        (Push(np.array([0, 1]), {"rows": np.zeros((3, COLUMNS))}), "does not hold the 2 rows along dimension 0"),
        (Push(np.array([0, 1]), {"words": np.zeros((2, COLUMNS))}), "'words' belongs to none of the 2 blocks"),
        (Push(np.array([1, 0]), {"rows": np.zeros((2, COLUMNS))}), "in rising order of their numbers"),
    ],
)
def test_a_push_that_does_not_fit_its_blocks_is_refused_in_one_line(push: Push, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        a_shard().push(when_is(0), 0, push, 0)
