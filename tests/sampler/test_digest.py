"""Samples: a digest of ids that ignores order, adds up, and notices every change."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadInput, Corrupt
from holdfast.sampler.digest import Samples

identifiers = st.integers(-(2**63), 2**63 - 1)
several = st.lists(identifiers, max_size=50)


@given(st.data(), several)
def test_order_does_not_matter(data: st.DataObject, ids: list[int]) -> None:
    assert Samples.of(data.draw(st.permutations(ids))) == Samples.of(ids)


@given(several, several)
def test_the_shares_of_a_window_add_up_to_the_window(left: list[int], right: list[int]) -> None:
    assert Samples.of(left) + Samples.of(right) == Samples.of(left + right)
    assert Samples.of(left + right) - Samples.of(right) == Samples.of(left)


@given(st.lists(several, max_size=5))
def test_any_division_into_shares_has_the_same_sum(shares: list[list[int]]) -> None:
    assert sum(map(Samples.of, shares), Samples()) == Samples.of([i for share in shares for i in share])


@given(several, identifiers, identifiers)
def test_an_exchanged_id_changes_the_digest(ids: list[int], one: int, other: int) -> None:
    same = Samples.of([*ids, one]).digest == Samples.of([*ids, other]).digest
    assert same == (one == other)


@given(several, identifiers)
def test_a_dropped_or_repeated_id_changes_count_and_digest(ids: list[int], one: int) -> None:
    without, once, twice = (Samples.of([*ids, *[one] * times]) for times in (0, 1, 2))
    assert len({without.count, once.count, twice.count}) == 3
    assert len({without.digest, once.digest, twice.digest}) == 3


@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 1000))
def test_moving_two_ids_apart_by_the_same_distance_is_noticed(one: int, other: int, distance: int) -> None:
    if one != other + distance:  # else the two merely exchange places
        assert Samples.of([one, other]) != Samples.of([one - distance, other + distance])


def test_the_digest_of_known_ids_never_changes() -> None:
    assert Samples.of([]) == Samples() == Samples(0, "0" * 32)
    assert Samples.of([0]).digest == _by_hand([0])
    assert Samples.of(range(1000)) == Samples(1000, "432ade2ad696236243acc6342749f815")


def _by_hand(ids: list[int]) -> str:
    """The definition again, in Python's own integers: what another implementation would write."""
    wrap = 2**64
    sums = [0, 0]
    for i in ids:
        x = (i + 0x9E3779B97F4A7C15) % wrap
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % wrap
        x = (x ^ x >> 27) * 0x94D049BB133111EB % wrap
        sums[0] = (sums[0] + (x ^ x >> 31)) % wrap
        x = (i + 0xD1B54A32D192ED03) % wrap
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % wrap
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 % wrap
        sums[1] = (sums[1] + (x ^ x >> 33)) % wrap
    return "".join(f"{total:016x}" for total in sums)


@given(several)
def test_the_array_arithmetic_equals_the_definition(ids: list[int]) -> None:
    assert Samples.of(ids).digest == _by_hand(ids)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.dtype(">i8")])
def test_the_type_and_shape_of_the_array_do_not_matter(dtype: np.dtype) -> None:
    ids = np.arange(120).astype(dtype)
    assert Samples.of(ids) == Samples.of(range(120)) == Samples.of(ids.reshape(3, 40)) == Samples.of(ids[::-1])
    assert Samples.of(torch.arange(120)) == Samples.of(range(120))


@pytest.mark.parametrize("ids", [[0.5], ["a"], [2**70], [True]])
def test_ids_that_are_not_integers_are_refused(ids: list[object]) -> None:
    with pytest.raises(BadInput, match="must be integers"):
        Samples.of(ids)


def test_more_samples_than_there_are_cannot_be_subtracted() -> None:
    with pytest.raises(BadInput, match="Cannot take 2 samples out of 1"):
        Samples.of([1]) - Samples.of([1, 2])


@given(several)
def test_samples_survive_json(ids: list[int]) -> None:
    samples = Samples.of(ids)
    assert Samples.from_json(json.loads(json.dumps(samples.to_json()))) == samples


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {},
        {"count": 1},
        {"count": -1, "digest": "0" * 32},
        {"count": True, "digest": "0" * 32},
        {"count": 1, "digest": "0" * 31},
        {"count": 1, "digest": "+" + "0" * 31},
    ],
)
def test_json_of_another_shape_is_corrupt(value: object) -> None:
    with pytest.raises(Corrupt, match="Not a count and digest"):
        Samples.from_json(value)


@given(st.integers(0, 4).flatmap(lambda width: st.lists(st.lists(identifiers, min_size=width, max_size=width))))
def test_rows_computed_together_equal_rows_computed_alone(rows: list[list[int]]) -> None:
    array = np.array(rows, dtype=np.int64).reshape(len(rows), -1 if rows and rows[0] else 0)
    assert Samples.of_each(array) == [Samples.of(row) for row in rows]


@given(st.lists(several, max_size=5))
def test_the_total_is_the_sum(shares: list[list[int]]) -> None:
    assert Samples.total(map(Samples.of, shares)) == sum(map(Samples.of, shares), Samples())


@given(identifiers, several)
def test_the_id_of_one_sample_is_recovered_from_its_digest(one: int, others: list[int]) -> None:
    assert Samples.of([one]).only_id == one
    assert (Samples.of([one, *others]) - Samples.of(others)).only_id == one


@given(several)
def test_no_id_is_recovered_from_several_samples_or_none(ids: list[int]) -> None:
    assert len(ids) == 1 or Samples.of(ids).only_id is None
