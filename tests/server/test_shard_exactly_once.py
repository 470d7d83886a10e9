"""Whatever is delivered again, lost or moved, a block has each round of each worker once since it was restored."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.blocks.partition_map import PartitionMap
from holdfast.server.shard import BlocksMoved, Shard, restored
from holdfast.workloads.divided import RoundId
from marked_workload import (
    COLUMNS,
    COUNT,
    EVERY,
    FULL,
    ITERATIONS,
    ROUNDS,
    WORKERS,
    WORKLOAD,
    a_shard,
    marks_of,
    packed,
    push_of,
    when_is,
)

# Pushes that are applied as they come.


def test_a_push_is_applied_at_once_and_once_and_not_after_a_later_one() -> None:
    shard = a_shard()
    first, second = when_is(0), when_is(1)
    assert shard.apply(first, 0, push_of(0, first), 0).tolist() == EVERY.tolist()
    assert shard.apply(first, 0, push_of(0, first), 0).tolist() == []
    assert shard.apply(second, 1, push_of(1, second), 0).tolist() == EVERY.tolist()
    assert shard.apply(first, 1, push_of(1, first), 0).tolist() == []
    had = marks_of([shard])
    assert (had[:, [0, WORKERS + 1]] == 1).all()
    assert had.sum() == 2 * len(had)


def test_a_moved_block_remembers_the_pushes_applied_to_it() -> None:
    one, other, ids = a_shard([0, 1]), a_shard([2]), np.array([1])
    one.apply(when_is(0), 0, push_of(0, when_is(0), np.array([0, 1])), 0)
    other.adopt(one.give(ids), 1)
    assert other.apply(when_is(0), 0, push_of(0, when_is(0), np.array([1, 2])), 1).tolist() == [2]
    assert other.apply(when_is(0), 1, push_of(1, when_is(0), np.array([1, 2])), 1).tolist() == [1, 2]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, WORKERS - 1), min_size=4, max_size=20), st.integers(0, 2**32))
def test_workers_that_run_ahead_of_each_other_have_each_round_applied_once_while_blocks_move(
    order: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shards, under, done = [a_shard(), a_shard([])], 0, [0] * WORKERS
    sent: list[tuple[int, RoundId]] = []

    def deliver(worker: int, when: RoundId) -> None:
        for shard in shards:
            shard.apply(when, worker, push_of(worker, when, shard.ids), under)

    for worker in order:
        if done[worker] == ROUNDS * ITERATIONS:
            continue
        sent.append((worker, when_is(done[worker])))
        done[worker] += 1
        deliver(*sent[-1])
        for index in rng.integers(0, len(sent), rng.poisson(2)):
            deliver(*sent[index])
        giver, taker = (shards[i] for i in rng.permutation(2))
        moving, under = giver.ids[rng.random(len(giver.ids)) < 0.5], under + 1
        taker.adopt(giver.give(moving), under)
        giver.drop(moving, under)
    expected = [done[column % WORKERS] > column // WORKERS for column in range(COLUMNS)]
    assert (marks_of(shards) == expected).all()


# Rounds that are repeated.


class Cluster:
    """Nodes, and a network that may deliver every message again at any time, however old it is."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.map = PartitionMap.random(COUNT, range(nodes), self.rng)
        self.shards = {node: a_shard(self.map.held_by(node)) for node in self.map.nodes}
        self.sent: list[tuple[int, Callable[[Shard], Any]]] = []
        self.saved, self.saved_at = WORKLOAD.start(), np.zeros(COUNT, np.int64)
        self.open, self.joined = 0, nodes
        self.expected, self.expected_saved = np.zeros((2, COUNT, COLUMNS))

    def send(self, node: int, message: Callable[[Shard], Any]) -> None:
        """Deliver a message, and perhaps some old ones before and after."""
        self.sent.append((node, message))
        self.deliver_again()
        message(self.shards[node])
        self.deliver_again()

    def deliver_again(self) -> None:
        for index in self.rng.integers(0, len(self.sent), self.rng.poisson(0.7)):
            node, message = self.sent[index]
            if node in self.shards:
                with suppress(BlocksMoved):
                    message(self.shards[node])

    def messages_of_round(self) -> list[tuple[int, Callable[[Shard], Any]]]:
        """Every worker's pushes in any order, then the commits."""
        when, under = when_is(self.open), self.map.version
        pushes = [
            (node, lambda shard, w=worker, i=ids: shard.push(when, w, push_of(w, when, i), under))
            for worker in range(WORKERS)
            for node, ids in self.map.split(EVERY).items()
        ]
        commits = [(node, lambda shard: shard.commit(when, range(WORKERS), under)) for node in self.map.nodes]
        mixed = [pushes[i] for i in self.rng.permutation(len(pushes))]
        return mixed + [commits[i] for i in self.rng.permutation(len(commits))]

    def lose(self) -> None:
        """A node dies; its blocks come back from what was saved, and the open round is theirs to do."""
        if len(self.map.nodes) == 1:
            return
        node = int(self.rng.choice(self.map.nodes))
        del self.shards[node]
        before, self.map = self.map, self.map.without([node], self.rng)
        self.expected[before.held_by(node)] = self.expected_saved[before.held_by(node)]
        for heir, ids in self.map.split(before.held_by(node)).items():
            holding = restored(ids, packed(self.saved, ids), self.saved_at[ids], self.open)
            self.send(heir, lambda shard, h=holding, v=self.map.version: shard.adopt(h, v))

    def join(self) -> None:
        """A node joins, and others give it blocks."""
        if len(self.map.nodes) == COUNT:
            return
        node, self.joined = self.joined, self.joined + 1
        before, self.map = self.map, self.map.with_node(node, self.rng)
        self.shards[node] = Shard(WORKLOAD)
        for giver, ids in before.split(self.map.held_by(node)).items():
            holding = self.shards[giver].give(ids)
            self.send(node, lambda shard, h=holding, v=self.map.version: shard.adopt(h, v))
            self.send(giver, lambda shard, i=ids, v=self.map.version: shard.drop(i, v))

    def finish(self) -> None:
        """All nodes have committed the open round."""
        self.expected[:, self.open * WORKERS : (self.open + 1) * WORKERS] = 1
        self.open += 1

    def save(self) -> None:
        """Some blocks become their saved values, on nodes and in the store."""
        iteration = self.open // ROUNDS
        for node in self.map.nodes:
            held = self.shards[node].ids
            ids = held[self.rng.random(len(held)) < 0.3]
            WORKLOAD.blocks.unpack(self.shards[node].mark_saved(ids, iteration), ids, self.saved)
            self.saved_at[ids] = iteration
            self.expected_saved[ids] = self.expected[ids]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.data(), st.integers(0, 2**32))
def test_in_any_interleaving_a_block_has_every_round_of_every_worker_exactly_once_since_it_was_restored(
    nodes: int, data: st.DataObject, seed: int
) -> None:
    cluster, strikes = Cluster(nodes, seed), data.draw(st.integers(0, 6))
    while cluster.open < ROUNDS * ITERATIONS:
        messages = cluster.messages_of_round()
        strike = data.draw(st.sampled_from([None, cluster.lose, cluster.join])) if strikes else None
        until = data.draw(st.integers(0, len(messages))) if strike else len(messages)
        for message in messages[:until]:
            cluster.send(*message)
        if strike:
            strikes -= 1
            strike()
            continue
        cluster.finish()
        if cluster.open % ROUNDS == 0:
            cluster.save()
    shards = list(cluster.shards.values())
    assert np.array_equal(marks_of(shards), cluster.expected[FULL])
    assert all((shard.versions == cluster.open).all() for shard in shards)
