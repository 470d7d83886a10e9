"""What a node holds: whatever is asked twice, lost, moved or repeated, a block has each round of each worker once."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.blocks import Blocks, Floats, Ids, Norm, along, euclidean, ragged, whole
from holdfast.errors import BadInput
from holdfast.policy import Policy
from holdfast.server.candidates import Candidates
from holdfast.server.layout import Layout, join, take
from holdfast.server.partition import PartitionMap
from holdfast.server.selection import converse, exchange
from holdfast.server.shard import Moved, Shard, restored
from holdfast.workloads.divided import Push, When
from holdfast.workloads.workload import Arrays, Clock, Stack

WORKERS, ROUNDS, ITERATIONS = 3, 2, 3
COLUMNS = WORKERS * ROUNDS * ITERATIONS
NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Marks:
    """Rows, two whole arrays and documents of unequal length; a push marks the column of its round and its worker.

    So a block shows which pushes it has had, and how often; a companion of the rows counts how often it was changed.
    """

    name: str = "marks"
    criterion: float = 0.0
    stochastic: bool = False
    steady: bool = True
    lanes: int = 1
    rounds: int = ROUNDS
    norm: Norm = field(default=euclidean, repr=False)

    @cached_property
    def blocks(self) -> Blocks:
        state = self.start()
        rows, layers = along(state, "rows", companions=["changes"]), whole(state, ["layer", "bias"])
        return rows + layers + ragged(state, "words", [0, 2, 2, 5, 6])

    def start(self, stream: int = 0) -> Arrays:
        marks = {"rows": 5, "words": 6, "layer": 2, "bias": 1}
        return {name: np.zeros((n, COLUMNS)) for name, n in marks.items()} | {"changes": np.zeros(5)}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        raise NotImplementedError

    def loss(self, stack: Stack) -> Floats:
        raise NotImplementedError

    def part(self, worker: int, workers: int) -> Any:
        return worker

    def pulls(self, part: Any, round: int) -> Ids:
        return np.arange(len(self.blocks))

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        return {"marks": np.array([sum(array.sum() for array in held.values())])}

    def compute(self, part: Any, when: When, pulled: Arrays, summed: Arrays) -> Push:
        marked = self.start()
        del marked["changes"]
        for array in marked.values():
            array[:, (when.iteration * ROUNDS + when.round) * WORKERS + part] = 1
        return Push(self.pulls(part, when.round), marked)

    def apply(self, when: When, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        for name, marks in pushed.items():
            held[name] += marks
        if "changes" in held:
            held["changes"] += 1

    def measure(self, part: Any, pulled: Arrays, summed: Arrays) -> float:
        return 0.0

    def total(self, measures: Sequence[float]) -> float:
        return 0.0


WORKLOAD = Marks()
COUNT = len(WORKLOAD.blocks)
EVERY = np.arange(COUNT)
FULL = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]  # all blocks but the document without words


def a_shard(ids: Sequence[int] | Ids = EVERY) -> Shard:
    """A node before the first round, under the map of version 0."""
    shard, chosen = Shard(WORKLOAD), np.array(ids, np.int64)
    shard.adopt(restored(chosen, packed(WORKLOAD.start(), chosen), np.zeros(len(chosen), np.int64), 0), 0)
    return shard


def packed(state: Arrays, ids: Ids) -> Arrays:
    return {name: np.asarray(array) for name, array in WORKLOAD.blocks.pack(state, ids).items()}


def push_of(worker: int, when: When, ids: Ids = EVERY) -> Push:
    """What a worker pushes for some blocks."""
    return _push_of(worker, when, tuple(ids.tolist()))


@cache
def _push_of(worker: int, when: When, chosen: tuple[int, ...]) -> Push:
    ids = np.array(chosen, np.int64)
    everything = WORKLOAD.compute(worker, when, {}, {})
    layout = Layout(WORKLOAD.blocks, everything.ids)
    return Push(ids, take(everything.values, layout.places(layout.positions(ids))))


def when_is(number: int) -> When:
    return When(*divmod(number, ROUNDS), stream=0)


def marks_of(shards: Sequence[Shard]) -> np.ndarray:
    """Which pushes each block has had: a row for each block of `FULL`; within a block all rows agree."""
    ids = np.concatenate([shard.ids for shard in shards])
    assert len(ids) == COUNT
    assert set(ids) == set(EVERY)
    _, values = join(WORKLOAD.blocks, [(shard.ids, shard.pull(shard.ids)) for shard in shards])
    words = values["words"]
    assert (words[[0, 2, 2]] == words[[1, 3, 4]]).all()
    assert (values["layer"][0] == values["layer"][1]).all()
    return np.concatenate([values["rows"], values["layer"][:1], values["bias"], words[[0, 2, 5]]])


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# The words of a round.


def test_what_is_pulled_is_packed_as_the_workload_packs_it_and_is_a_copy() -> None:
    shard, ids = a_shard([0, 2, 5, 7, 8, 9]), np.array([2, 5, 9])
    pulled = shard.pull(ids)
    assert same(pulled, packed(WORKLOAD.start(), ids))
    for array in pulled.values():
        array += 1
    assert same(shard.pull(ids), packed(WORKLOAD.start(), ids))


def test_a_round_is_applied_when_it_is_committed_and_not_before() -> None:
    shard, when = a_shard(), when_is(0)
    for worker in range(WORKERS):
        assert shard.push(when, worker, push_of(worker, when), 0).tolist() == EVERY.tolist()
    assert not marks_of([shard]).any()
    applied = shard.commit(when, range(WORKERS), 0)
    assert applied.ids.tolist() == EVERY.tolist()
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
    assert again.ids.tolist() == []
    assert again.ignored.tolist() == EVERY.tolist()
    assert same(shard.pull(EVERY), once)


def test_blocks_for_which_nothing_was_pushed_go_on_unchanged() -> None:
    shard, when = a_shard(), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([1, 6, 9])), 0)
    shard.push(when, 2, push_of(2, when, np.array([0, 1])), 0)
    assert shard.commit(when, range(WORKERS), 0).ids.tolist() == EVERY.tolist()
    had = marks_of([shard])[:, :WORKERS]
    assert np.flatnonzero(had[:, 0]).tolist() == [1, 6, FULL.index(9)]
    assert np.flatnonzero(had[:, 2]).tolist() == [0, 1]
    assert shard.pull(EVERY)["changes"].tolist() == [1, 1, 0, 0, 0]
    assert shard.versions.tolist() == [1] * COUNT


def test_blocks_that_miss_an_earlier_round_are_named_and_left_alone() -> None:
    shard, when = a_shard(), when_is(1)
    shard.push(when, 0, push_of(0, when), 0)
    applied = shard.commit(when, range(WORKERS), 0)
    assert applied.behind.tolist() == EVERY.tolist()
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


def test_what_is_pushed_is_kept_until_its_round_is_committed() -> None:
    shard, when, marks = a_shard(), when_is(0), np.ones((1, COLUMNS))
    kept = weakref.ref(marks)
    shard.push(when, 0, Push(np.array([0]), {"rows": marks}), 0)
    del marks
    assert kept() is not None
    shard.commit(when, [0], 0)
    assert kept() is None


def test_what_is_pushed_is_not_changed() -> None:
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


# Other maps.


def test_blocks_that_are_elsewhere_have_moved() -> None:
    shard = a_shard([0, 1])
    for ask in (
        lambda: shard.pull(np.array([1, 2])),
        lambda: shard.push(when_is(0), 0, push_of(0, when_is(0), np.array([1, 2])), 0),
        lambda: shard.give(np.array([2])),
        lambda: shard.mark_saved(np.array([2]), 1),
    ):
        with pytest.raises(Moved, match="block 2 is not on this node"):
            ask()


def test_whoever_goes_by_an_older_map_than_the_blocks_is_refused() -> None:
    shard = a_shard([0, 1])
    shard.adopt(a_shard([2]).give(np.array([2])), 5)
    for ask in (
        lambda: shard.push(when_is(0), 0, push_of(0, when_is(0), np.array([1])), 4),
        lambda: shard.commit(when_is(0), [0], 4),
        lambda: shard.adopt(a_shard([3]).give(np.array([3])), 4),
        lambda: shard.drop(np.array([1]), 4),
    ):
        with pytest.raises(Moved, match="version 4 is older than this node's blocks, of version 5"):
            ask()
    assert shard.ids.tolist() == [0, 1, 2]


def test_adopted_blocks_are_not_committed_with_what_was_pushed_before() -> None:
    shard, when = a_shard([0, 1]), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1])), 0)
    shard.adopt(a_shard([2]).give(np.array([2])), 1)
    with pytest.raises(Moved):
        shard.commit(when, [0], 0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1, 2])), 1)
    shard.commit(when, [0], 1)
    assert shard.pull(np.array([0, 1, 2]))["rows"][:, 0].tolist() == [1, 1, 1]


def test_what_was_pushed_by_an_older_map_is_forgotten_when_blocks_come_since_its_round_is_repeated() -> None:
    shard, when = a_shard([0, 1]), when_is(0)
    shard.push(when, 0, push_of(0, when, np.array([0, 1])), 0)
    shard.push(when, 1, push_of(1, when, np.array([0, 1])), 1)
    shard.adopt(a_shard([2]).give(np.array([2])), 1)
    shard.commit(when, [0, 1], 1)
    assert shard.pull(np.array([0, 1]))["rows"][:, :2].tolist() == [[0, 1], [0, 1]]


def test_a_push_by_a_newer_map_takes_the_place_of_an_older_one_and_never_the_other_way_round() -> None:
    shard, when, ids = a_shard(), when_is(0), np.array([0])
    for amount, under in [(1.0, 0), (5.0, 2), (3.0, 1)]:
        shard.push(when, 0, Push(ids, {"rows": np.full((1, COLUMNS), amount)}), under)
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
    assert np.allclose(shard.norms(), lengths)
    shard.mark_saved(np.array([0, 5]), 1)
    assert np.allclose(shard.distances(), np.where(np.isin(EVERY, [0, 5]), 0, lengths))
    assert np.allclose(shard.norms(), lengths)


def test_a_save_returns_what_is_to_be_written_and_the_same_when_asked_again() -> None:
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
    alone, several = a_shard(), [a_shard([0, 3, 7]), a_shard([1, 2, 5, 9]), a_shard([4, 6, 8, 10])]
    for shard in (alone, *several):
        ids = shard.ids[shard.ids % 2 == 1]
        shard.push(when, 0, push_of(0, when, ids), 0)
        shard.commit(when, [0], 0)
    assert chosen(policy, several) == set(policy.choose(4, alone.standing(ranking)).ids.tolist())


def chosen(policy: Policy, shards: Sequence[Shard]) -> set[int]:
    nodes = [Candidates(policy, 4, shard.ids, shard.standing(policy.ranking), COUNT) for shard in shards]
    selection = converse(exchange(policy, Fraction(0)), lambda question: [node.answer(question) for node in nodes])
    return {int(block) for node in nodes for block in node.taken(selection.verdict)}


def test_an_empty_node_says_nothing_and_takes_part_in_everything() -> None:
    shard = Shard(WORKLOAD)
    assert shard.pull(NOTHING) == {}
    assert shard.distances().tolist() == []
    assert shard.commit(when_is(0), [0], 0).ids.tolist() == []
    assert shard.mark_saved(NOTHING, 1) == {}
    assert shard.standing("relative").sizes.tolist() == []


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


def test_what_was_applied_as_it_came_is_known_wherever_the_block_goes() -> None:
    one, other, ids = a_shard([0, 1]), a_shard([2]), np.array([1])
    one.apply(when_is(0), 0, push_of(0, when_is(0), np.array([0, 1])), 0)
    other.adopt(one.give(ids), 1)
    assert other.apply(when_is(0), 0, push_of(0, when_is(0), np.array([1, 2])), 1).tolist() == [2]
    assert other.apply(when_is(0), 1, push_of(1, when_is(0), np.array([1, 2])), 1).tolist() == [1, 2]


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


# Everything that can go wrong, in any order.


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
                with suppress(Moved):
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
