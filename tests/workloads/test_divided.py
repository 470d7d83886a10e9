"""Workloads in rounds: divided among workers and nodes, an iteration is that of the simulator."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from holdfast.blocks.division import Ids, partition
from holdfast.blocks.recoveries import partial, recover
from holdfast.errors import BadInput
from holdfast.lab.simulate.lanes import continue_training
from holdfast.theory.bounds import partial_size
from holdfast.workloads.corpora import Corpus
from holdfast.workloads.divided import RoundId, balanced_share, share
from holdfast.workloads.lda import LatentDirichletAllocation
from holdfast.workloads.local_server import SimulatedServer
from holdfast.workloads.registry import load_workload
from holdfast.workloads.workload import Arrays, stacked

EXACT = {"mlr-digits": 1e-5, "mf-generated": 1e-10, "cnn-digits": 1e-5}  # how far apart, relative to the largest value
SMALL = (*EXACT, "lda-generated")
ITERATIONS = 3

every_workload = pytest.mark.parametrize("name", SMALL)
workload = cache(load_workload)


def owners(name: str, nodes: int, seed: int = 0) -> Ids:
    return partition(len(workload(name).blocks), nodes, np.random.default_rng(seed))


def in_rounds(name: str, state: Arrays, first: int, last: int, workers: int, owners: Ids | None = None) -> Arrays:
    """The state before iteration `last`, from that before iteration `first`, on stream 0."""
    rounds = SimulatedServer(workload(name), workers, owners)
    with threadpool_limits(1):
        for iteration in range(first, last):
            state = rounds.advance(state, iteration)
    return state


@cache
def on_one_node(name: str, workers: int) -> Arrays:
    """The state after the first iteration."""
    return in_rounds(name, workload(name).start(), 0, 1, workers)


@cache
def simulated(name: str, iterations: int) -> Arrays:
    return continue_training(workload(name), workload(name).start(), 0, iterations)


def loss(name: str, state: Arrays) -> float:
    return float(workload(name).loss(stacked([state]))[0])


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def apart(a: Arrays, b: Arrays) -> float:
    """The largest difference, relative to the largest value of its array."""
    return max(float(np.abs(a[name] - b[name]).max() / max(np.abs(b[name]).max(), 1e-30)) for name in b)


class TestAnIteration:
    @pytest.mark.parametrize("name", EXACT)
    @pytest.mark.parametrize("workers", [1, 2, 3])
    @pytest.mark.parametrize("nodes", [1, 3])
    def test_in_rounds_is_that_of_the_simulator_to_rounding(self, name: str, workers: int, nodes: int) -> None:
        state = in_rounds(name, workload(name).start(), 0, ITERATIONS, workers, owners(name, nodes))
        assert apart(state, simulated(name, ITERATIONS)) < EXACT[name]

    @pytest.mark.parametrize("name", ["mlr-digits", "mf-generated", "lda-generated"])
    def test_with_one_worker_is_that_of_the_simulator_to_the_bit(self, name: str) -> None:
        state = in_rounds(name, workload(name).start(), 0, ITERATIONS, 1, owners(name, 3))
        assert same(state, simulated(name, ITERATIONS))

    def test_of_a_network_with_one_worker_is_that_of_the_simulator_to_the_bit_but_for_its_average(self) -> None:
        name = "cnn-digits"
        state = in_rounds(name, workload(name).start(), 0, ITERATIONS, 1, owners(name, 3))
        trained = {key: value for key, value in simulated(name, ITERATIONS).items() if not key.endswith(".average")}
        assert same({key: state[key] for key in trained}, trained)

    @pytest.mark.parametrize("workers", [2, 3])
    def test_of_a_topic_model_with_several_workers_finds_topics_as_good(self, workers: int) -> None:
        name = "lda-generated"
        state = in_rounds(name, workload(name).start(), 0, 15, workers, owners(name, 3))
        assert loss(name, state) == pytest.approx(loss(name, simulated(name, 15)), rel=0.02)
        assert loss(name, state) < 0.95 * loss(name, workload(name).start())

    @every_workload
    @settings(max_examples=6)
    @given(data=st.data())
    def test_does_not_depend_on_which_node_holds_which_block(self, name: str, data: st.DataObject) -> None:
        workers = data.draw(st.integers(1, 3))
        seed, nodes = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(2, 7))
        anywhere = np.random.default_rng(seed).integers(nodes, size=len(workload(name).blocks))
        start = workload(name).start()
        assert same(in_rounds(name, start, 0, 1, workers, anywhere), on_one_node(name, workers))

    @every_workload
    def test_leaves_the_state_it_starts_from_alone(self, name: str) -> None:
        start = workload(name).start()
        in_rounds(name, start, 0, 1, 2)
        assert same(start, workload(name).start())

    @every_workload
    def test_follows_the_stream(self, name: str) -> None:
        state = simulated(name, ITERATIONS)
        ours = SimulatedServer(workload(name), 2)
        first, second, again = (ours.advance(state, 3, stream) for stream in (1, 2, 1))
        assert same(first, again)
        draws = name.startswith(("lda", "cnn"))  # the others draw at the start at most
        assert same(first, second) != draws


class TestTheLoss:
    @every_workload
    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_measured_by_workers_is_that_of_the_simulator(self, name: str, workers: int) -> None:
        state = simulated(name, ITERATIONS)
        measured = SimulatedServer(workload(name), workers, owners(name, 3)).loss(state)
        assert measured == pytest.approx(loss(name, state), rel=1e-6 if name.startswith(("mlr", "cnn")) else 1e-12)

    def test_of_topics_has_what_belongs_to_no_word_once_where_workers_are_more_than_words(self) -> None:
        corpus = Corpus("tiny", np.array([0, 1, 1, 0, 1], np.int32), np.array([0, 3, 5]), vocabulary=2)
        tiny = LatentDirichletAllocation(corpus, criterion=0)
        assert SimulatedServer(tiny, workers=5).loss(tiny.start()) == pytest.approx(
            tiny.loss(stacked([tiny.start()]))[0]
        )


class TestAFailure:
    @pytest.mark.parametrize(("name", "workers"), [(name, 2) for name in EXACT] + [("lda-generated", 1)])
    def test_at_a_boundary_is_the_perturbation_of_the_simulator(self, name: str, workers: int) -> None:
        """A node dies after the third iteration; its blocks come back as they were after the first, on the others."""
        ours, owner = workload(name), owners(name, 3)
        lost = np.flatnonzero(owner == 1)
        saved = in_rounds(name, ours.start(), 0, 1, workers, owner)
        live = in_rounds(name, saved, 1, 3, workers, owner)
        theirs, before = {key: value.copy() for key, value in simulated(name, 3).items()}, simulated(name, 1)

        size = partial_size(ours.norm(ours.blocks, live, saved), lost)
        assert size > 0
        assert size == pytest.approx(partial_size(ours.norm(ours.blocks, theirs, before), lost), rel=1e-4)

        recover(partial, ours.blocks, live, saved, lost)
        recover(partial, ours.blocks, theirs, before, lost)
        owner[lost] = np.arange(len(lost)) % 2 * 2  # nodes 0 and 2 take them over
        ended = in_rounds(name, live, 3, 5, workers, owner)
        assert apart(ended, continue_training(ours, theirs, 3, 5)) <= EXACT.get(name, 0)


class TestWorkers:
    @every_workload
    def test_that_are_more_than_there_is_input_push_nothing(self, name: str) -> None:
        """As many workers as a batch has samples, or more: some have no part of some batch, or of any."""
        ours = workload(name)
        workers = {"mlr-digits": 310, "mf-generated": 260, "lda-generated": 210, "cnn-digits": 70}[name]
        parts = [ours.part(worker, workers) for worker in range(workers)]
        state, last = simulated(name, ITERATIONS), ours.rounds
        everything = np.arange(len(ours.blocks))
        summed = ours.summary(everything, state)
        pulled = [
            {} if not len(ours.pulls(part, last)) else ours.blocks.pack(state, ours.pulls(part, last)) for part in parts
        ]
        measures = [ours.measure(part, item, summed) for part, item in zip(parts, pulled, strict=True)]  # type: ignore[arg-type]
        assert ours.total(measures) == pytest.approx(loss(name, state), rel=1e-5)
        idle = 0
        for part in parts:
            ids = ours.pulls(part, 0)
            values = ours.blocks.pack(state, ids) if len(ids) else {}
            idle += not len(ours.compute(part, RoundId(3, 0, 0), values, summed).ids)  # type: ignore[arg-type]
        assert idle > 0

    @every_workload
    def test_do_not_change_what_they_are_given(self, name: str) -> None:
        ours, state = workload(name), simulated(name, ITERATIONS)
        part, summed = ours.part(0, 2), ours.summary(np.arange(len(ours.blocks)), state)
        pulled = ours.blocks.pack(state, ours.pulls(part, 0))
        for array in (*pulled.values(), *summed.values()):
            array.flags.writeable = False  # type: ignore[union-attr]
        ours.compute(part, RoundId(3, 0, 0), pulled, summed)  # type: ignore[arg-type]

    def test_there_is_at_least_one(self) -> None:
        with pytest.raises(BadInput, match="workers must be at least 1"):
            SimulatedServer(workload("mlr-digits"), 0)

    def test_whose_counts_are_of_another_moment_sample_all_the_same(self) -> None:
        """Counts that lack the worker's own tokens must not fall below zero when these leave their topics."""
        ours = workload("lda-generated")
        part, nothing = ours.part(1, 2), ours.summary(np.zeros(0, np.int64), {})
        pulled = ours.blocks.pack(ours.start(), ours.pulls(part, 0))
        topics = ours.compute(part, RoundId(0, 0, 0), pulled, nothing).values["topics"]  # type: ignore[arg-type]
        counts = np.bincount(topics, minlength=20)
        assert counts.max() < 0.5 * counts.sum()  # one topic would have it all, had its count wrapped around


class TestShares:
    @given(length=st.integers(0, 50), workers=st.integers(1, 9))
    def test_cover_every_place_once(self, length: int, workers: int) -> None:
        places = np.arange(length)
        shares = [places[share(length, worker, workers)] for worker in range(workers)]
        assert np.array_equal(np.concatenate(shares), places)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    @given(weights=st.lists(st.integers(0, 100), max_size=50), workers=st.integers(1, 9))
    def test_that_are_balanced_cover_every_place_once_and_differ_by_the_heaviest_at_most(
        self, weights: list[int], workers: int
    ) -> None:
        heavy = np.array(weights, np.int64)
        shares = [balanced_share(heavy, worker, workers) for worker in range(workers)]
        assert np.array_equal(np.concatenate([heavy[item] for item in shares]), heavy)
        carried = [int(heavy[item].sum()) for item in shares]
        assert max(carried) - min(carried) <= 2 * max(weights, default=0)

    @every_workload
    def test_of_the_input_are_made_by_the_worker_alone(self, name: str) -> None:
        """A part depends on its number and the number of workers alone: a worker that takes it over makes the same."""
        ours, again = workload(name), load_workload(name)
        state = simulated(name, ITERATIONS)
        summed = ours.summary(np.arange(len(ours.blocks)), state)
        pushes = []
        for item in (ours, again):
            part = item.part(1, 3)
            pulled = item.blocks.pack(state, item.pulls(part, 0))
            pushes.append(item.compute(part, RoundId(3, 0, 7), pulled, summed))  # type: ignore[arg-type]
        assert np.array_equal(pushes[0].ids, pushes[1].ids)
        assert same(pushes[0].values, pushes[1].values)
