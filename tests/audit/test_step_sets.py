"""Sets of steps: the shortcuts for ranges give what the definitions give."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.step_columns import counting
from holdfast.audit.step_sets import common, distinct, twice_in, union, without

ranges = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ends: counting(ends[0], ends[1]))
numbers = st.lists(st.integers(0, 30), max_size=12).map(lambda given: np.array(given, np.int64))
steps = ranges | numbers


@given(st.lists(steps, max_size=4))
def test_a_union_has_every_number_once(arrays: list[np.ndarray]) -> None:  # type: ignore[type-arg]
    assert union(arrays).tolist() == sorted({number for array in arrays for number in array.tolist()})
    assert union([*arrays, *arrays]).tolist() == union(arrays).tolist()


@given(steps, steps)
def test_without_leaves_the_numbers_of_the_first_alone(one: np.ndarray, other: np.ndarray) -> None:  # type: ignore[type-arg]
    left = without(np.unique(one), np.unique(other)).tolist()
    assert left == sorted({*one.tolist()} - {*other.tolist()})


@given(steps, steps)
def test_common_numbers_are_in_both(one: np.ndarray, other: np.ndarray) -> None:  # type: ignore[type-arg]
    assert common(distinct(one), distinct(other)).tolist() == sorted({*one.tolist()} & {*other.tolist()})


@given(steps)
def test_distinct_numbers_are_sorted_and_occur_once(one: np.ndarray) -> None:  # type: ignore[type-arg]
    assert distinct(one).tolist() == sorted({*one.tolist()})


@given(steps, steps)
def test_numbers_that_occur_twice_are_found(one: np.ndarray, other: np.ndarray) -> None:  # type: ignore[type-arg]
    both = np.concatenate([one, other])
    assert twice_in(both).tolist() == sorted({n for n in both.tolist() if both.tolist().count(n) > 1})


def test_the_union_of_a_view_that_is_not_sorted_is_sorted() -> None:
    assert union([np.array([3, 1, 1])]).tolist() == [1, 3]
    assert union([counting(0, 9)[::-1]]).tolist() == [*range(9)]
