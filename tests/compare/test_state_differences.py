"""Two nested states are equal if and only if all tensors and plain values have the same bits, types and places."""

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.compare.report import lines, rows, verdict
from holdfast.compare.state_differences import StateComparison, compare


def state(**changes: Any) -> dict[str, Any]:
    """Return a state with tensors and plain values, of which `changes` replaces some."""
    weights = torch.arange(6.0).reshape(3, 2)
    return {"model": {"weight": weights, "bias": torch.zeros(3)}, "lr": 0.1, "steps": [1, (2, 3)], **changes}


def model(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**state()["model"], **changes}


def report(found: StateComparison) -> list[str]:
    return [verdict(found), *(" | ".join(row) for row in rows(found)), *lines(found, "a", "b")]


def test_equal_states_are_counted() -> None:
    assert report(compare(state(), state())) == ["equal: 2 tensors, 36 bytes, the same bits; 4 plain values, the same"]


def test_a_changed_element_is_counted_and_measured() -> None:
    other = state()
    other["model"]["weight"][1, 1] += 0.25
    assert report(compare(state(), other)) == [
        "different: 1 of 2 tensors",
        "model/weight | float32 [3, 2] | 1 of 6 | 0.25",
    ]


def test_a_dtype_and_a_shape_that_differ_are_shown() -> None:
    other = state(model=model(weight=torch.zeros(2, 3), bias=torch.zeros(3, dtype=torch.float16)))
    assert report(compare(state(), other)) == [
        "different: 2 of 2 tensors",
        "model/weight | float32 [3, 2] and float32 [2, 3] |  | ",
        "model/bias | float32 [3] and float16 [3] |  | ",
    ]


def test_what_only_one_state_has_is_named_once() -> None:
    extra = {"ema": {"weight": torch.zeros(2)}, "best": 1.5, "nothing": {}}
    assert report(compare(state(), state(**extra))) == [
        "different: 3 in one run only",
        "only in b: ema/weight, a tensor float32 [2]",
        "only in b: best, 1.5",
        "only in b: nothing, a dict",
    ]
    assert report(compare(state(**extra), state()))[1].startswith("only in a: ema/weight")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (0, False),
        ("1", 1),
        (None, 0),
        (1.0, math.nan),
        (b"a", "a"),
        ([1, 2], (1, 2)),
        ([], ()),
        ({}, []),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, Counter(a=1)),
        (torch.zeros(()), 0.0),
        (np.float32(0.0), np.float32(-0.0)),
        (np.float32(1.0), np.float64(1.0)),
        (np.arange(3), np.arange(3, dtype=np.int32)),
    ],
)
def test_values_that_are_not_the_same_differ(one: Any, other: Any) -> None:
    for a, b in ((one, other), (other, one)):
        assert not compare({"x": a}, {"x": b}).is_equal
        assert compare({"x": a}, {"x": a}).is_equal


def test_nan_as_a_plain_value_equals_nan() -> None:
    assert compare({"loss": math.nan}, {"loss": float("nan")}).is_equal


def test_keys_with_the_same_words_are_not_mixed_up() -> None:
    assert not compare({"a": {1: 0}}, {"a": {"1": 0}}).is_equal
    assert not compare({"a/b": 1, "a": {"b": 2}}, {"a/b": 2, "a": {"b": 1}}).is_equal


def test_the_order_of_keys_does_not_count() -> None:
    assert compare({"a": 1, "b": 2}, {"b": 2, "a": 1}).is_equal


def test_the_versions_of_layers_count() -> None:
    one, other = (nn.BatchNorm1d(2).state_dict() for _ in range(2))
    assert compare({"model": one}, {"model": other}).is_equal
    other._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    assert report(compare({"model": one}, {"model": other}))[1] == "model/(attributes)/_metadata//version: 2 and 1"


def test_a_deep_state_is_compared() -> None:
    one, other = 1, 2
    for _ in range(500):
        one, other = [one], [other]  # type: ignore[assignment]
    assert not compare({"x": one}, {"x": other}).is_equal


def test_of_many_differences_the_first_are_shown_and_the_rest_counted() -> None:
    one = {"t": [torch.zeros(1)] * 25, "v": [0] * 21, "only": {"x": [0] * 22}}
    other = {"t": [torch.ones(1)] * 25, "v": [1] * 21, "only": {}}
    found = report(compare(one, other))
    assert found[0] == "different: 25 of 25 tensors, 21 of 43 plain values, 22 in one run only"
    assert [line for line in found if line.startswith("and ")] == [
        "and 5 more tensors",
        "and 1 more plain value",
        "and 2 more items",  # the list that has them is not one of them
    ]


def test_a_long_value_is_cut() -> None:
    (line,) = report(compare({"x": "a" * 1000}, {"x": "b"}))[1:]
    assert len(line) < 100


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
TREES = st.recursive(
    PLAIN | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def texts(tree: Any) -> str:
    """Return a tree as text, with the bits of its tensors."""
    if isinstance(tree, torch.Tensor):
        return f"tensor{tree.view(torch.int32).tolist()}" if tree.numel() else "tensor[]"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {texts(tree[key])}" for key in sorted(tree)) + "}"
    return f"[{', '.join(map(texts, tree))}]" if isinstance(tree, list) else repr(tree)


@given(TREES, TREES)
def test_states_are_equal_if_and_only_if_their_texts_are(one: Any, other: Any) -> None:
    assert compare({"x": one}, {"x": one}).is_equal
    assert compare({"x": one}, {"x": other}).is_equal == (texts(one) == texts(other))
