"""Nested states come apart and back together exactly, through JSON and tensors alone."""

import json
import math
import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, Corrupt


def through_json(state: Any) -> Any:
    flat = flatten(state)
    return unflatten(flat.tensors, json.loads(json.dumps(flat.extra, allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True) if len(a) == len(b) else [(("length", 0), ("differs", 0))]
        return all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
numbers = st.lists(st.integers(-9, 9), max_size=4)
leaves = scalars | numbers.map(torch.tensor) | numbers.map(lambda n: np.array(n, np.int16)) | st.just(np.float32(0.1))
keys = st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(states)
def test_any_state_comes_back_exactly(state: Any) -> None:
    assert same(through_json(state), state)


def test_a_model_and_its_optimizer_come_back_through_a_snapshot(tmp_path: Any) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random.getstate()}
    flat = flatten(state)
    snapshot.save(DirectoryStore(tmp_path), 1, flat.tensors, flat.extra)
    loaded = snapshot.newest(DirectoryStore(tmp_path))
    back = unflatten(loaded.tensors, loaded.extra)
    assert same(back, state)
    assert back["model"]._metadata == model.state_dict()._metadata
    optimizer.load_state_dict(back["optimizer"])
    random.setstate(back["random"])


def test_tensors_are_named_by_their_path() -> None:
    flat = flatten({"optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}, "list": [torch.ones(1)]}})
    assert list(flat.tensors) == ["optimizer/state/0/exp_avg", "optimizer/list/0"]


def test_paths_that_collide_and_reserved_names_still_come_back() -> None:
    state = {
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.ones(2),
        1: np.ones(1),
        "1": np.zeros(1),
    }
    assert same(through_json(state), state)
    assert len(flatten(state).tensors) == 5


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), Pair(1, 2), torch.float32, lambda: 0, 1j, np.array([object()]), torch.zeros(2).to_sparse()],
)
def test_anything_else_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(BadInput, match="optimizer/groups/1/bad"):
        flatten({"optimizer": {"groups": [1, {"bad": value}]}})


def test_keys_that_are_no_plain_values_are_refused() -> None:
    with pytest.raises(BadInput, match="model has a key of type tuple"):
        flatten({"model": {(1, 2): 3}})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(BadInput, match="contains itself"):
        flatten(state)


def test_bytes_too_large_for_json_are_refused() -> None:
    with pytest.raises(BadInput, match="blob"):
        flatten({"blob": bytes((1 << 20) + 1)})


@pytest.mark.parametrize(
    "extra", [{}, {"state": {"tensor": "gone"}}, {"state": {"pickle": ""}}, {"state": {"a": 1, "b": 2}}]
)
def test_a_description_that_makes_no_sense_is_corrupt(extra: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        unflatten({}, extra)


def test_a_tree_that_names_one_tensor_many_times_is_corrupt() -> None:
    many = {"state": {"dict": [[f"w{i}", {"tensor": "w"}] for i in range(1000)]}}
    with pytest.raises(Corrupt):
        unflatten({"w": torch.zeros(1)}, many)
    assert list(unflatten({"w": torch.zeros(1)}, {"state": {"dict": [["w", {"tensor": "w"}]]}})) == ["w"]


@pytest.mark.parametrize(
    "tree",
    [
        {"ordered": [[], {"dict": [["items", 1]]}]},
        {"ordered": [[], {"dict": [[1, 1]]}]},
        {"ordered": [[], 7]},
        {"dict": [[[1], 2]]},
        {"dict": 7},
        {"float": []},
        {"float": "\x1b[31m"},
        {"bytes": 7},
        {"bytes": "\u0663"},
        {"scalar": ["w"]},
        {"tensor": {}},
        {"tuple": None},
        {"counter": [["a", 1, 2]]},
    ],
)
def test_a_tree_of_the_wrong_types_is_corrupt_in_one_line(tree: Any) -> None:
    with pytest.raises(Corrupt) as error:
        unflatten({"w": torch.zeros(2)}, {"state": tree})
    assert str(error.value).isprintable()


def test_a_tree_nested_without_end_is_corrupt() -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(Corrupt):
        unflatten({}, {"state": tree})
