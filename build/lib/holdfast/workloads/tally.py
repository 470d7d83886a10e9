"""Topic counts of the documents or words of a corpus, for many Gibbs chains at once."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core.cgutils import create_struct_proxy
from numba.extending import intrinsic

CACHE_LINE = 64  # bytes

_BYTE = ir.IntType(8)
_INT = ir.IntType(32)


@intrinsic
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Load the cache line of `array[at]` into the CPU cache ahead of a write."""

    def generate(context: Any, build: Any, signature: Any, values: Any) -> Any:
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
        instruction = build.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        element = build.gep(first_element(context, build, signature.args[0], values[0]), [values[1]])
        write, keep, data = _INT(1), _INT(3), _INT(1)
        build.call(instruction, [build.bitcast(element, pointer), write, keep, data])
        return context.get_dummy_value()

    return types.void(array, at), generate


def first_element(context: Any, build: Any, kind: Any, array: Any) -> Any:
    return create_struct_proxy(kind)(context, build, value=array).data  # type: ignore[no-untyped-call]


Tokens: TypeAlias = npt.NDArray[np.int32]
Bounds: TypeAlias = npt.NDArray[np.int64]
Topics: TypeAlias = npt.NDArray[np.uint8]
Counts: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Floats: TypeAlias = npt.NDArray[np.float64]

_AHEAD = 16  # tokens: far enough for their topics to arrive in time, and not so far that they are gone again


@njit(cache=True)
def tally(groups: Bounds, tokens: Tokens, topics: Topics, counts: Counts) -> None:
    """Add to `counts[g]` how often each topic occurs in group g, the tokens `tokens[groups[g]:groups[g+1]]`."""
    width = np.uint64(topics.shape[1])
    row = np.uint64(counts.shape[1]) * width
    flat_topics, flat_counts = topics.reshape(-1), counts.reshape(-1)
    for g in range(len(groups) - 1):
        _add(tokens[groups[g] : groups[g + 1]], flat_topics, flat_counts, np.uint64(g) * row, width)


@njit(cache=True, nogil=True)
def tally_documents(words: Tokens, bounds: Bounds, documents: Bounds, topics: Topics, counts: Counts) -> None:
    """Add 1 to `counts[word, topic]` for each token of `documents`; document d is `words[bounds[d]:bounds[d+1]]`."""
    row = np.uint64(counts.shape[1])
    flat = counts.reshape(-1)
    at = np.uint64(0)
    for d in documents:
        for i in range(bounds[d], bounds[d + 1]):
            flat[np.uint64(words[i]) * row + np.uint64(topics[at])] += 1
            at += np.uint64(1)


@njit(cache=True)
def tallied(table: Floats, groups: Bounds, tokens: Tokens, topics: Topics, number: int) -> tuple[Floats, Bounds]:
    """Count each of `number` topics in each group of tokens, separately for every Markov chain, for the loss of LDA.

    The last axis of `topics` is the chain. Group g has the tokens `tokens[groups[g]:groups[g+1]]`. Return for each
    chain the sum of `table[count + 1]` (log gamma), and the number of tokens of each topic and chain."""
    width = np.uint64(topics.shape[1])
    row = np.uint64(number) * width
    counts, totals = np.empty(row, np.uint32), np.zeros(row, np.int64)
    sums = np.zeros(width)
    flat = topics.reshape(-1)
    for g in range(len(groups) - 1):
        counts[:] = 1
        _add(tokens[groups[g] : groups[g + 1]], flat, counts, np.uint64(0), width)
        for k in range(number):
            for lane in range(width):
                here = np.uint64(k) * width + lane
                totals[here] += counts[here] - 1
                sums[lane] += table[counts[here]]
    return sums, totals.reshape((number, topics.shape[1]))


@njit(cache=True, nogil=True)  # a node answers workers meanwhile
def parted(groups: Bounds, one: Topics, other: Topics) -> Bounds:
    """Return for each group of tokens the L1 distance between its topic counts under two assignments of topics.

    Group g has the tokens `groups[g]:groups[g+1]`; `one` and `other` have the topic of each token."""
    differs = np.zeros(256, np.int64)  # one for each value of a byte
    sums = np.zeros(len(groups) - 1, np.int64)
    for g in range(len(groups) - 1):
        first, last = np.uint64(groups[g]), np.uint64(groups[g + 1])
        for i in range(first, last):
            differs[np.uint64(one[i])] += 1
            differs[np.uint64(other[i])] -= 1
        for i in range(first, last):
            for topic in (np.uint64(one[i]), np.uint64(other[i])):
                sums[g] += abs(differs[topic])
                differs[topic] = 0
    return sums


@njit(cache=True, inline="always")
def _add(tokens, topics, counts, first, width):  # type: ignore[no-untyped-def]
    for i in range(len(tokens)):
        later = np.uint64(tokens[min(i + _AHEAD, len(tokens) - 1)])
        prefetch(topics, later * width)  # type: ignore[call-arg]  # the first parameter is not for callers
        at = np.uint64(tokens[i]) * width
        for lane in range(width):
            counts[first + np.uint64(topics[at + lane]) * width + lane] += 1
