"""Permutation: one-to-one at any size, even as far as can be measured, and paid for by the element."""

import math
import random
import tracemalloc
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.sampler import shuffle
from holdfast.sampler.shuffle import LARGEST, permuted

SEED = 20240229  # of what is drawn below; a test that fails says it
keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), keys)
def test_every_element_comes_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 10_007, 65_536])
def test_every_element_comes_once_at_sizes_that_just_fill_or_miss_a_table(size: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(size), size, key=size)), np.arange(size))


@given(st.integers(10**5, 10**9), keys, st.data())
def test_a_sample_of_a_large_size_stays_inside_and_apart(size: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1000))
    far = np.random.default_rng(SEED).integers(0, size, 1000)
    places = np.unique(np.concatenate((far, np.arange(start, start + 1000))))
    sent = permuted(places, size, key)
    assert len(np.unique(sent)) == len(places)
    assert 0 <= sent.min() <= sent.max() < size


@given(st.integers(2, LARGEST), keys, st.data())
def test_an_element_does_not_depend_on_its_company(size: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = permuted(places, size, key)
    assert [int(permuted(place, size, key)) for place in places] == together.tolist()


@given(st.integers(1, 500), st.lists(keys, min_size=1, max_size=4))
def test_keys_may_come_one_for_each_row(size: int, several: list[int]) -> None:
    places = np.arange(size)
    rows = permuted(np.tile(places, (len(several), 1)), size, np.array(several, dtype=np.uint64)[:, None])
    assert np.array_equal(rows, [permuted(places, size, key) for key in several])


def test_known_elements_never_change() -> None:
    assert permuted(range(10), 10, 0).tolist() == [3, 9, 2, 4, 5, 6, 1, 7, 0, 8]
    assert permuted([0, 1, 2, 10**9 - 1], 10**9, 7).tolist() == [819142465, 542910371, 470950186, 426817531]
    assert permuted([0, 1, 2**40 - 1], 2**40, 2**64 - 1).tolist() == [143992671344, 389257714092, 470888702449]


@pytest.mark.parametrize("size", [10, 1797, 10**9 + 7, 2**40])
def test_the_array_arithmetic_equals_the_definition(size: int) -> None:
    rng = random.Random(SEED)
    for key in (0, 1, rng.getrandbits(64)):
        places = [0, size - 1, *(rng.randrange(size) for _ in range(50))]
        assert permuted(places, size, key).tolist() == [_by_hand(place, size, key) for place in places], SEED


def _by_hand(place: int, size: int, key: int) -> int:
    """The definition again, in Python's own integers: what another implementation would compute."""
    wrap = 2**64
    height = math.ceil((size - 1).bit_length() / 2)
    width = math.ceil(size / 2**height)
    bits = width.bit_length()
    while True:
        row, column, state = place % 2**height, place // 2**height, key
        for number in range(10 if size >= 64 else 32):
            state = (state + 0x9E3779B97F4A7C15) % wrap
            x = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % wrap
            x = (x ^ x >> 27) * 0x94D049BB133111EB % wrap
            x ^= x >> 31
            x = (x ^ (row if number % 2 else column)) * 0xBF58476D1CE4E5B9 % wrap
            x = (x ^ x >> 32) * 0x94D049BB133111EB % wrap
            if number % 2:
                column = (column + ((x >> bits) * width >> 64 - bits)) % width
            else:
                row = (row + (x >> 32)) % 2**height
        place = column * 2**height + row
        if place < size:
            return place


def evenness(counts: Ids) -> float:
    """How many standard deviations chi-square is above what even chances give; 5 is one chance in a million."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2).sum() / expected)
    return (chi_square - (counts.size - 1)) / math.sqrt(2 * (counts.size - 1))


def many_keys(count: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 2**64, count, dtype=np.uint64)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_few_elements_come_equally_often(size: int) -> None:
    several = many_keys(100_000)
    orders = permuted(np.tile(np.arange(size), (len(several), 1)), size, several[:, None])
    code = orders @ size ** np.arange(size)
    known = np.sort([np.array(order) @ size ** np.arange(size) for order in permutations(range(size))])
    counts = np.bincount(np.searchsorted(known, code), minlength=len(known))
    assert counts.sum() == len(several)
    assert abs(evenness(counts)) < 5, SEED


@pytest.mark.slow  # seconds
@pytest.mark.parametrize("size", [16, 63, 64, 100])
@pytest.mark.parametrize("apart", [1, 8])  # neighbours in a column of the table, and in a row
def test_a_pair_lands_on_all_pairs_of_places_equally_often(size: int, apart: int) -> None:
    several = many_keys(200_000)
    first, second = (permuted(np.full(len(several), place), size, several) for place in (0, apart))
    counts = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    assert not np.diagonal(counts).any()
    assert abs(evenness(counts[~np.eye(size, dtype=bool)])) < 5, SEED


@pytest.mark.parametrize("size", [10**8, 10**9, 2**40])
def test_a_window_of_a_large_size_is_spread_evenly(size: int) -> None:
    sent = permuted(np.arange(size // 2, size // 2 + 200_000), size, SEED)
    assert abs(evenness(np.bincount(sent * 1000 // size, minlength=1000))) < 5, SEED
    # What follows what is spread evenly too, so that neighbours in a file do not stay neighbours in a window.
    gaps = np.diff(sent) % size
    assert abs(evenness(np.bincount(gaps * 1000 // size, minlength=1000))) < 5, SEED


def test_two_keys_give_unrelated_orders() -> None:
    size = 100_000
    one, other = (permuted(np.arange(size), size, key) for key in (SEED, SEED + 1))
    assert (one == other).sum() < 10  # one is expected, as between any two shuffles
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size), SEED


def test_memory_is_used_only_for_requested_elements() -> None:
    places = np.arange(10**9 - 256, 10**9)
    permuted(places, 10**9, 0)  # what numpy loads once is not counted
    tracemalloc.start()
    try:
        permuted(places, 10**9, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * places.nbytes


@given(st.integers(64, LARGEST), keys)
def test_few_elements_go_through_the_network_more_than_once(size: int, key: int) -> None:
    through, passed = shuffle._through, 0

    def counting(x: np.ndarray, *others: object) -> np.ndarray:
        nonlocal passed
        passed += x.size
        return through(x, *others)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "_through", counting)
        permuted(np.arange(min(size, 500)), size, key)
    assert passed < 4 * min(size, 500)


@pytest.mark.parametrize("size", [0, -1, LARGEST + 1])
def test_a_size_that_cannot_be_shuffled_is_refused(size: int) -> None:
    with pytest.raises(BadInput, match=rf"A permutation must have .* \(got {size}\)"):
        permuted([0], size, 0)


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(BadInput, match=r"not all in 0\.\.4"):
        permuted([0, index], 5, 0)


def test_no_indexes_give_no_elements() -> None:
    assert permuted([], 5, 0).tolist() == []
