"""Partition maps: every block has one owner, survivors keep theirs, and shares stay as even as they can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.partition_map import PartitionMap
from holdfast.errors import BadInput

counts = st.integers(8, 200)
seeds = st.integers(0, 2**32)


def sizes(partition: PartitionMap) -> list[int]:
    return [len(partition.held_by(node)) for node in partition.nodes]


def assert_every_block_has_one_owner(partition: PartitionMap, count: int) -> None:
    held = np.concatenate([partition.held_by(node) for node in partition.nodes])
    assert sorted(held.tolist()) == list(range(count))


def as_even_as_possible(before: list[int], more: int) -> list[int]:
    """Give one at a time to the node with the fewest."""
    for _ in range(more):
        before[before.index(min(before))] += 1
    return sorted(before)


@given(counts, st.integers(1, 8), seeds)
def test_the_first_map_gives_all_nodes_equally_many_to_within_one(count: int, nodes: int, seed: int) -> None:
    first = PartitionMap.random(count, range(nodes), np.random.default_rng(seed))
    assert first.version == 0
    assert_every_block_has_one_owner(first, count)
    assert max(sizes(first)) - min(sizes(first)) <= 1


@given(counts, st.integers(2, 8), st.data(), seeds)
def test_only_lost_blocks_move_and_they_make_shares_as_even_as_they_can_be(
    count: int, nodes: int, data: st.DataObject, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    partition = PartitionMap.random(count, range(nodes), rng)
    left = nodes
    while left > 1:
        lost = data.draw(st.sets(st.sampled_from(partition.nodes), min_size=1, max_size=left - 1))
        after = partition.without(lost, rng)
        assert after.version == partition.version + 1
        assert set(after.nodes) == set(partition.nodes) - lost
        assert_every_block_has_one_owner(after, count)
        for node in after.nodes:
            assert set(partition.held_by(node)) <= set(after.held_by(node))
        kept = [len(partition.held_by(node)) for node in after.nodes]
        assert sorted(sizes(after)) == as_even_as_possible(kept, count - sum(kept))
        partition, left = after, len(after.nodes)


@given(counts, st.integers(1, 7), seeds)
def test_a_node_that_joins_takes_an_even_share_from_all_and_no_other_block_moves(
    count: int, nodes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = PartitionMap.random(count, range(nodes), rng)
    after = before.with_node(nodes, rng)
    assert after.version == 1
    assert_every_block_has_one_owner(after, count)
    moved = before.owners != after.owners
    assert set(after.owners[moved]) == {nodes}
    assert len(after.held_by(nodes)) == count // (nodes + 1)
    assert max(sizes(after)) - min(sizes(after)) <= 1


def test_a_node_that_joins_an_uneven_map_takes_from_those_that_hold_the_most() -> None:
    uneven = PartitionMap(3, np.array([0] * 9 + [1] * 3, np.int32), (0, 1))
    after = uneven.with_node(2, np.random.default_rng(0))
    assert sizes(after) == [5, 3, 4]


def test_which_blocks_move_is_left_to_chance() -> None:
    first = PartitionMap.random(1000, range(4), np.random.default_rng(0))
    one, other = (first.without([1], np.random.default_rng(seed)) for seed in (1, 2))
    assert (one.owners != other.owners).any()
    one, other = (first.with_node(4, np.random.default_rng(seed)) for seed in (1, 2))
    assert set(one.held_by(4)) != set(other.held_by(4))


def test_blocks_are_split_by_their_owners() -> None:
    partition = PartitionMap(0, np.array([0, 1, 0, 3, 1], np.int32), (0, 1, 2, 3))
    parts = partition.split(np.array([0, 1, 3, 4]))
    assert {node: ids.tolist() for node, ids in parts.items()} == {0: [0], 1: [1, 4], 3: [3]}


def test_a_map_cannot_be_changed_in_place() -> None:
    partition = PartitionMap.random(10, [0, 1], np.random.default_rng(0))
    with pytest.raises(ValueError, match="read-only"):
        partition.owners[0] = 5


def test_millions_of_blocks_are_four_bytes_each() -> None:
    rng = np.random.default_rng(0)
    partition = PartitionMap.random(2_000_000, range(4), rng).without([2], rng).with_node(9, rng)
    assert partition.owners.nbytes == 8_000_000
    assert sizes(partition) == [500_000] * 4


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda map, rng: map.without([0, 1], rng), "all of the nodes 0, 1 are lost"),
        (lambda map, rng: map.with_node(1, rng), "node 1 has already joined"),
        (lambda map, rng: map.with_node(2, rng).with_node(3, rng), "4 nodes are more than the 3 blocks"),
        (lambda map, rng: PartitionMap.random(3, range(4), rng), "4 nodes are more than the 3 blocks"),
    ],
)
def test_impossible_maps_are_refused(change: object, line: str) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(BadInput, match=line):
        change(PartitionMap.random(3, [0, 1], rng), rng)  # type: ignore[operator]
