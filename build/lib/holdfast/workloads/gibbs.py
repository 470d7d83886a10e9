"""A sweep of collapsed Gibbs sampling over a corpus: every token draws a new topic, in many chains at once.

Chains are stored side by side on the last axis of arrays. Both priors are 1, so a count plus its prior is an integer.
Indices are unsigned and arrays flat, because compiled code would check for negative indices at every step.
Everything that determines a draw is in this file, because numba recompiles only if the file of a function has changed.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from holdfast.workloads.tally import CACHE_LINE, Bounds, Counts, Tokens, Topics, first_element, prefetch

TOPICS = 20  # unless a model has more

Keys: TypeAlias = npt.NDArray[np.uint32]
Table: TypeAlias = npt.NDArray[np.float32]
Lanes: TypeAlias = tuple[int, ...]  # only its length matters: it is part of the type, so the compiler knows it
Kinds: TypeAlias = tuple[int, ...]  # likewise: as long as there are topics, a multiple of _GROUP and at most 255
Vector: TypeAlias = Any  # an instruction's result, with a number for each lane

_AHEAD = 4  # tokens: far enough for a word's counts to arrive in time, and not so far that they are gone again
_GROUP = 5  # topics summed one after the other: an addition waits for the one before, but groups do not wait for groups

_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()
_BYTE = ir.IntType(8)
_INT = ir.IntType(32)


@njit(cache=True)
def sweep(
    words: Tokens,
    bounds: Bounds,
    topics: Topics,
    counts: Counts,
    totals: Bounds,
    reciprocal: Table,
    keys: Keys,
    lanes: Lanes,
    kinds: Kinds,
    first: int = 0,
) -> None:
    """Run one Gibbs sweep for many chains at once: draw a new topic for each token, given the topics of all others.

    The arrays are changed in place, and the last axis of all state arrays is the chain. `topics` has a row for each
    token; `counts` holds for each word and topic the number of tokens plus 1, and `totals` the number of tokens of each
    topic. Document d has the tokens `bounds[d]:bounds[d+1]`. `keys` has two random keys for each chain, `reciprocal` is
    the result of `reciprocals`, and the lengths of the tuples `lanes` and `kinds` are the numbers of chains and topics.
    `words` may be a part of the corpus that begins at token `first`. Probabilities have single precision.

    The conditional distribution is p(z_i = k | all other z) ∝ (n_dk + 1) (n_wk + 1) / (n_k + V)."""
    width = np.uint64(len(lanes))
    row = np.uint64(len(kinds)) * width
    state = topics.reshape(-1), counts.reshape(-1), totals.reshape(-1)
    document = np.empty(row, np.float32)  # n_dk + 1
    share = np.empty(row, np.float32)  # (n_dk + 1) / (n_k + V): only the topics a token leaves and joins change
    uniform = np.empty(width, np.float32)
    for d in range(len(bounds) - 1):
        _open(state, document, share, reciprocal, np.uint64(bounds[d]), np.uint64(bounds[d + 1]), width)
        for i in range(bounds[d], bounds[d + 1]):
            word, at = np.uint64(words[i]) * row, np.uint64(i) * width
            soon = np.uint64(words[min(i + _AHEAD, len(words) - 1)]) * row
            for near in range(soon, soon + row, np.uint64(CACHE_LINE // counts.itemsize)):
                prefetch(state[1], near)  # type: ignore[call-arg]
            for lane in range(len(lanes)):
                uniform[lane] = uniform_number(first + i, keys[0, lane], keys[1, lane])
            _count(state, document, share, reciprocal, word, at, width, -1)
            _draw_topics(share, state[1], word, uniform, state[0], at, lanes, kinds)  # type: ignore[call-arg]
            _count(state, document, share, reciprocal, word, at, width, 1)


def reciprocals(tokens: int, vocabulary: int) -> Table:
    """Return a table of 1 / (n + V) for every possible number n of tokens in a topic; V is the vocabulary size."""
    return (1 / (np.arange(tokens + 1) + vocabulary)).astype(np.float32)


@njit(cache=True)
def uniform_number(token, first, second):  # type: ignore[no-untyped-def]
    """Return a random number in [0, 1) that depends only on the number `token` and the keys `first` and `second`."""
    x = _mixed(np.uint32(np.uint32(token) * np.uint32(0x9E3779B9)) + first)
    return np.float32(np.int32(_mixed(x + second) >> np.uint32(8))) * np.float32(2.0**-24)


@njit(cache=True, inline="always")
def _mixed(x):  # type: ignore[no-untyped-def]
    x = np.uint32(x)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97))
    return np.uint32(x ^ (x >> np.uint32(15)))


@njit(cache=True, inline="always")
def _open(state, document, share, reciprocal, first, last, width):  # type: ignore[no-untyped-def]
    topics, _, totals = state
    document[:] = 1
    for at in range(first * width, last * width, width):
        for lane in range(width):
            document[np.uint64(topics[at + lane]) * width + lane] += 1
    for k in range(len(document)):
        share[k] = document[k] * reciprocal[totals[k]]


@njit(cache=True, inline="always")
def _count(state, document, share, reciprocal, word, at, width, sign):  # type: ignore[no-untyped-def]
    """Add the token at index `at` to the topic counts of `width` Markov chains, or remove it if `sign` is -1."""
    topics, counts, totals = state
    for lane in range(width):
        k = np.uint64(topics[at + lane]) * width + lane
        document[k] += np.float32(sign)
        totals[k] += sign
        share[k] = document[k] * reciprocal[np.uint64(totals[k])]
        counts[word + k] += sign


@intrinsic
def _draw_topics(
    typing: Any, share: Any, counts: Any, row: Any, uniform: Any, topics: Any, at: Any, lanes: Any, kinds: Any
) -> Any:
    """Write a random topic for each chain to `topics[at:]`, with probabilities proportional to `share` times `counts`.

    Arrays are flat. `share`, and `counts` from index `row` on, hold the values of all chains for the first topic, then
    for the second, and so on. `uniform` has one random number for each chain, which selects a topic by the cumulative
    probabilities. The lengths of the tuples `lanes` and `kinds` are the numbers of chains and topics. The function
    emits vector instructions itself, because the compiler would process the chains one by one, which is far slower.
    """
    width = len(lanes)
    floats, whole = ir.VectorType(_FLOAT, width), ir.VectorType(ir.IntType(counts.dtype.bitwidth), width)
    results = ir.VectorType(_BYTE, width)

    def generate(context: Any, build: Any, signature: Any, values: Any) -> Any:
        def address(argument: int, index: Any, kind: ir.Type) -> Any:
            data = first_element(context, build, signature.args[argument], values[argument])
            return build.bitcast(build.gep(data, [index]), kind.as_pointer())

        def probability(topic: int) -> Vector:
            first = _INDEX(topic * width)
            count = build.load(address(1, build.add(values[2], first), whole), align=counts.dtype.bitwidth // 8)
            return build.fmul(build.load(address(0, first, floats), align=4), build.uitofp(count, floats))

        sums = _running_sums(build, probability, len(kinds))
        threshold = build.fmul(build.load(address(3, _INDEX(0), floats), align=4), sums[-1])
        topic = _how_many(build, [build.fcmp_ordered("<=", part, threshold) for part in sums], width)
        build.store(build.trunc(topic, results), address(4, values[5], results), align=1)
        return context.get_dummy_value()

    return types.void(share, counts, row, uniform, topics, at, lanes, kinds), generate


def _running_sums(build: Any, probability: Callable[[int], Vector], topics: int) -> list[Vector]:
    sums: list[Vector] = []
    for first in range(0, topics, _GROUP):
        group = [probability(first)]
        for topic in range(first + 1, first + _GROUP):
            group.append(build.fadd(group[-1], probability(topic)))
        sums += [build.fadd(sums[-1], part) for part in group] if sums else group
    return sums


def _how_many(build: Any, conditions: list[Vector], width: int) -> Vector:
    kind = ir.VectorType(_INT, width)
    groups = []
    for first in range(0, len(conditions), _GROUP):
        count = ir.Constant(kind, [0] * width)
        for condition in conditions[first : first + _GROUP]:
            count = build.add(count, build.zext(condition, kind))
        groups.append(count)
    while len(groups) > 1:
        groups = [build.add(groups[0], groups[1]), *groups[2:]]
    return groups[0]
