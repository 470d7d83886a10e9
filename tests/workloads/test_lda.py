"""LDA: every draw is from the exact conditional, and what is drawn depends on stream and iteration alone."""

import itertools
from collections import Counter
from math import exp, lgamma, perm

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.lab.simulate.lanes import trajectory
from holdfast.workloads.corpora import Corpus
from holdfast.workloads.gibbs import TOPICS, sweep, uniform_number
from holdfast.workloads.lda import LANES, LatentDirichletAllocation, lda
from holdfast.workloads.tally import Topics
from holdfast.workloads.workload import Arrays, Clock, stacked, unstacked


def some_corpus(lengths: list[int], vocabulary: int, seed: int = 0) -> Corpus:
    words = np.random.default_rng(seed).integers(vocabulary, size=sum(lengths), dtype=np.int32)
    words[:vocabulary] = np.arange(vocabulary)
    return Corpus("some", words, np.append(0, np.cumsum(lengths)), vocabulary)


def some_topics(workload: LatentDirichletAllocation, seed: int) -> Arrays:
    return {"topics": np.random.default_rng(seed).integers(TOPICS, size=len(workload.data.words), dtype=np.uint8)}


def at(iteration: int, *streams: int) -> Clock:
    return Clock(np.full(len(streams), iteration), np.array(streams))


SMALL = LatentDirichletAllocation(some_corpus([40, 0, 25, 60, 1], 30), criterion=0)


def plain_sweep(data: Corpus, topics: list[int], uniforms: list[float], number: int = TOPICS) -> list[int]:
    """Collapsed Gibbs sampling as the textbook has it: all counts recomputed for every token, in double precision."""
    z, words = list(topics), data.words.tolist()
    document = np.repeat(np.arange(len(data.bounds) - 1), np.diff(data.bounds)).tolist()
    for i, (word, own) in enumerate(zip(words, document, strict=True)):
        others = [j for j in range(len(z)) if j != i]
        in_document = Counter(z[j] for j in others if document[j] == own)
        in_word, in_all = Counter(z[j] for j in others if words[j] == word), Counter(z[j] for j in others)
        weights = [(in_document[k] + 1) * (in_word[k] + 1) / (in_all[k] + data.vocabulary) for k in range(number)]
        sums = np.cumsum(weights)
        z[i] = int(np.searchsorted(sums, uniforms[i] * sums[-1], side="right"))
    return z


def direct_loss(data: Corpus, topics: list[int], number: int = TOPICS) -> float:
    """−log p(w, z), from the definition: Dirichlet-multinomial words in every topic, and topics in every document."""
    loss = 0.0
    for k in range(number):
        words = [int(word) for word, topic in zip(data.words, topics, strict=True) if topic == k]
        loss += lgamma(len(words) + data.vocabulary) - lgamma(data.vocabulary)
        loss -= sum(lgamma(n + 1) for n in Counter(words).values())
    for first, last in itertools.pairwise(data.bounds):
        loss += lgamma(last - first + number) - lgamma(number)
        loss -= sum(lgamma(n + 1) for n in Counter(topics[first:last]).values())
    return loss


@pytest.mark.parametrize("lanes", [1, 3, LANES])
def test_every_token_draws_what_the_textbook_says(lanes: int) -> None:
    states = [some_topics(SMALL, seed) for seed in range(lanes)]
    advanced = SMALL.advance(stacked(states), at(5, *range(lanes)))["topics"]
    for lane, state in enumerate(states):
        first, second = SMALL._keys(lane, 5)
        uniforms = [float(uniform_number(i, first, second)) for i in range(len(SMALL.data.words))]
        assert advanced[:, lane].tolist() == plain_sweep(SMALL.data, state["topics"].tolist(), uniforms)


def test_a_word_more_frequent_than_two_bytes_can_count_is_counted() -> None:
    words = np.zeros(70_000, dtype=np.int32)
    words[::7] = 1
    workload = LatentDirichletAllocation(Corpus("two words", words, np.array([0, 35_000, 70_000]), 2), criterion=0)
    stack = stacked([{"topics": np.full(len(words), 7, dtype=np.uint8)}])
    assert workload.loss(stack)[0] == pytest.approx(direct_loss(workload.data, stack["topics"][:, 0].tolist()))
    twenty = LatentDirichletAllocation(Corpus("one word", words * 0, np.array([0, 70_000]), 1), criterion=0)
    topics = twenty.advance(stack, at(0, 0))["topics"][:, 0].tolist()
    uniforms = [float(uniform_number(i, *twenty._keys(0, 0))) for i in range(100)]
    counts = Counter({7: 70_000})  # one word in one document: the conditional is (n + 1)² / (n + 1)
    for i, uniform in enumerate(uniforms):
        counts[7] -= 1
        sums = np.cumsum([counts[k] + 1.0 for k in range(TOPICS)])
        assert topics[i] == int(np.searchsorted(sums, uniform * sums[-1], side="right"))
        counts[topics[i]] += 1


def test_in_the_long_run_topics_are_as_frequent_as_the_exact_posterior_has_them() -> None:
    data = Corpus("tiny", np.array([0, 0, 1, 0, 1], dtype=np.int32), np.array([0, 3, 5]), 2)
    workload = LatentDirichletAllocation(data, criterion=0)
    exact = {}
    for labels in itertools.product(range(5), repeat=5):
        if labels == canonical(labels):  # topics are interchangeable: one labelling stands for all with its pattern
            exact[labels] = perm(TOPICS, len(set(labels))) * exp(-direct_loss(data, list(labels)))
    total = sum(exact.values())
    stack, seen = stacked([some_topics(workload, seed) for seed in range(LANES)]), Counter[tuple[int, ...]]()
    sweeps = 3000
    for iteration in range(sweeps):
        stack = workload.advance(stack, at(iteration, *range(LANES)))
        seen.update(canonical(tuple(lane)) for lane in stack["topics"].T.tolist())
    assert len(exact) == 52
    for labels, weight in exact.items():
        assert seen[labels] / (sweeps * LANES) == pytest.approx(weight / total, abs=0.006)


def canonical(labels: tuple[int, ...]) -> tuple[int, ...]:
    """The same pattern of equal labels, numbered by first appearance."""
    order = list(dict.fromkeys(labels))
    return tuple(order.index(label) for label in labels)


def test_a_model_with_more_topics_draws_what_the_textbook_says_and_has_its_loss() -> None:
    many = LatentDirichletAllocation(SMALL.data, criterion=0, topics=200)
    state = many.start(3)
    uniforms = [float(uniform_number(i, *many._keys(0, 5))) for i in range(len(many.data.words))]
    advanced = many.advance(stacked([state]), at(5, 0))["topics"][:, 0].tolist()
    assert advanced == plain_sweep(many.data, state["topics"].tolist(), uniforms, 200)
    assert many.loss(stacked([state])) == pytest.approx(direct_loss(many.data, state["topics"].tolist(), 200))
    assert state["topics"].max() > 150
    assert many.name == "lda-some-200"


def test_updated_counts_equal_recomputed_counts() -> None:
    data, topics = SMALL.data, some_topics(SMALL, 4)["topics"].reshape(-1, 1)
    counts, totals = counted(data, topics)
    sweep(
        data.words,
        data.bounds,
        topics,
        counts,
        totals,
        SMALL._reciprocal,
        np.ones((2, 1), dtype=np.uint32),
        (0,),
        (0,) * TOPICS,
    )
    anew, totals_anew = counted(data, topics)
    assert np.array_equal(counts, anew)
    assert np.array_equal(totals, totals_anew)


def counted(data: Corpus, topics: Topics) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    pairs = np.bincount(data.words * TOPICS + topics[:, 0], minlength=data.vocabulary * TOPICS)
    counts = (pairs + 1).astype(np.uint16).reshape(data.vocabulary, TOPICS, 1)
    return counts, np.bincount(topics[:, 0], minlength=TOPICS).reshape(-1, 1)


def test_the_loss_is_the_joint_likelihood_from_its_definition() -> None:
    states = [some_topics(SMALL, seed) for seed in range(3)]
    expected = [direct_loss(SMALL.data, state["topics"].tolist()) for state in states]
    assert SMALL.loss(stacked(states)).tolist() == pytest.approx(expected)
    assert SMALL.loss(stacked(states[:1])).tolist() == SMALL.loss(stacked(states)).tolist()[:1]  # bit for bit


def test_a_trial_does_not_depend_on_its_neighbours() -> None:
    states = [some_topics(SMALL, seed) for seed in range(LANES)]
    together = SMALL.advance(stacked(states), at(2, *range(LANES)))
    for lane in (0, 7, LANES - 1):
        alone = SMALL.advance(stacked([states[lane]]), at(2, lane))
        assert np.array_equal(unstacked(alone, 0)["topics"], unstacked(together, lane)["topics"])


def test_an_iteration_leaves_the_state_it_starts_from_alone() -> None:
    stack = stacked([some_topics(SMALL, 0)])
    before = stack["topics"].copy()
    SMALL.advance(stack, at(0, 0))
    assert np.array_equal(stack["topics"], before)


def test_draws_depend_on_stream_and_iteration_alone() -> None:
    state = some_topics(SMALL, 0)
    perturbed = {"topics": state["topics"].copy()}
    perturbed["topics"][:10] = 0
    same, other_stream, other_iteration = (
        SMALL.advance(stacked([state]), when)["topics"] for when in (at(3, 1), at(3, 2), at(4, 1))
    )
    assert np.array_equal(same, SMALL.advance(stacked([state]), at(3, 1))["topics"])
    assert not np.array_equal(same, other_stream)
    assert not np.array_equal(same, other_iteration)
    # A perturbed twin draws with the same numbers, so where its counts agree, it mostly draws the same topics.
    twin = SMALL.advance(stacked([perturbed]), at(3, 1))["topics"]
    assert np.mean(twin == same) > 0.6 > np.mean(other_stream == same)


def test_random_numbers_are_uniform_and_those_of_neighbours_unrelated() -> None:
    first, second = SMALL._keys(0, 0)
    numbers = np.array([uniform_number(i, first, second) for i in range(20_000)], dtype=np.float64)
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(np.full(10, 2000), abs=200)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03
    other = np.array([uniform_number(i, *SMALL._keys(0, 1)) for i in range(20_000)], dtype=np.float64)
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.03
    assert 0 <= numbers.min() < numbers.max() < 1


def test_distance_is_total_variation_times_length() -> None:
    data = Corpus("two", np.zeros(6, dtype=np.int32), np.array([0, 4, 6]), 1)
    workload = LatentDirichletAllocation(data, criterion=0)
    a = {"topics": np.array([0, 0, 1, 2, 5, 5], dtype=np.uint8)}
    b = {"topics": np.array([1, 0, 0, 3, 5, 5], dtype=np.uint8)}
    # First document: (2, 1, 1, 0) against (2, 1, 0, 1) quarters, a total variation of 1/4, times 4 tokens.
    assert workload.norm(workload.blocks, a, b).tolist() == [1, 0]
    assert workload.norm(workload.blocks, a, {"topics": a["topics"] + np.uint8(10)}).tolist() == [4, 2]


def test_distances_of_documents_are_those_of_their_counts() -> None:
    a, b = (some_topics(SMALL, seed)["topics"] for seed in (0, 1))
    pairs = [(a[first:last], b[first:last]) for first, last in itertools.pairwise(SMALL.data.bounds)]
    counted = [np.abs(np.subtract(*(np.bincount(x, minlength=TOPICS) for x in pair))).sum() / 2 for pair in pairs]
    assert SMALL.norm(SMALL.blocks, {"topics": a}, {"topics": b}).tolist() == counted


def test_documents_with_the_topics_of_their_tokens_are_the_blocks() -> None:
    assert len(SMALL.blocks) == 5
    assert SMALL.blocks.sizes.tolist() == [40, 0, 25, 60, 1]
    a, b = some_topics(SMALL, 0), some_topics(SMALL, 1)
    SMALL.blocks.copy(a, b, np.array([2]))
    assert np.array_equal(b["topics"][40:65], a["topics"][40:65])
    assert np.array_equal(b["topics"][:40], some_topics(SMALL, 1)["topics"][:40])


def test_the_start_is_uniform_and_follows_from_the_seed() -> None:
    workload = lda("generated")
    topics = workload.start()["topics"]
    assert topics.dtype == np.uint8
    assert np.array_equal(topics, workload.start()["topics"])
    assert np.bincount(topics, minlength=TOPICS) == pytest.approx(np.full(TOPICS, len(topics) / TOPICS), rel=0.12)


def test_generated_text_reaches_its_criterion_while_the_loss_still_falls() -> None:
    workload = lda("generated")
    run = trajectory(workload, limit=60)
    assert workload.name == "lda-generated"
    assert 15 <= run.length <= 30
    assert run.losses[-1] < run.losses[-6] - 1000
