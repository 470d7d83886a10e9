"""Blocks: what is cut out of a state comes back where it was, whatever the kind of array."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.division import Blocks, along, euclidean, partition, ragged, whole
from holdfast.errors import BadInput


@st.composite
def divided_states(draw: st.DrawFn) -> tuple[dict[str, Any], Blocks]:
    """A state of random shapes, numpy or torch, divided in one of every way."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, 8), max_size=5)))
    state: dict[str, Any] = {
        "weight": rng.normal(size=(rows, columns)),
        "moment": rng.normal(size=(rows, columns)),
        "kernel": rng.normal(size=(2, columns, 3)).astype(np.float32),
        "tokens": rng.integers(0, 20, size=8),
        "bias": rng.normal(size=3),
        "count": np.array(7.0),
    }
    if draw(st.booleans()):
        state = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    blocks = (
        along(state, "weight", size=draw(st.integers(1, 3)), companions=["moment"])
        + along(state, "kernel", dim=1)
        + ragged(state, "tokens", [0, *cuts, 8])
        + whole(state, ["bias", "count"])
    )
    return state, blocks


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else np.zeros_like(v) for n, v in state.items()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(np.asarray(a[name]), np.asarray(b[name])) for name in a)


@given(divided_states(), st.data())
def test_copying_some_blocks_and_then_the_others_copies_the_whole_state(
    divided: tuple[dict[str, Any], Blocks], data: st.DataObject
) -> None:
    state, blocks = divided
    chosen = np.array(data.draw(st.lists(st.sampled_from(range(len(blocks))), unique=True)), dtype=np.int64)
    others = np.setdiff1d(np.arange(len(blocks)), chosen)
    target = zeros(state)
    blocks.copy(state, target, chosen)
    blocks.copy(state, target, others)
    assert equal(target, state)


@given(divided_states(), st.data())
def test_copied_blocks_are_at_distance_zero_and_the_others_have_not_moved(
    divided: tuple[dict[str, Any], Blocks], data: st.DataObject
) -> None:
    state, blocks = divided
    chosen = np.array(data.draw(st.lists(st.sampled_from(range(len(blocks))), unique=True)), dtype=np.int64)
    target = zeros(state)
    before = euclidean(blocks, state, target)
    blocks.copy(state, target, chosen)
    after = euclidean(blocks, state, target)
    others = np.setdiff1d(np.arange(len(blocks)), chosen)
    assert np.all(after[chosen] == 0)
    assert np.array_equal(after[others], before[others])


@given(divided_states())
def test_block_distances_add_up_to_the_distance_of_the_states(divided: tuple[dict[str, Any], Blocks]) -> None:
    state, blocks = divided
    other = zeros(state)
    total = sum(float(np.sum(np.square(np.asarray(state[f.array], dtype=np.float64)))) for f in blocks.families)
    assert np.sum(euclidean(blocks, state, other) ** 2) == pytest.approx(total)


@given(divided_states(), st.data())
def test_unpacking_what_was_packed_restores_it_in_any_order(
    divided: tuple[dict[str, Any], Blocks], data: st.DataObject
) -> None:
    state, blocks = divided
    ids = np.array(data.draw(st.permutations(range(len(blocks)))), dtype=np.int64)
    target = zeros(state)
    blocks.unpack(blocks.pack(state, ids), ids, target)
    assert equal(target, state)


@given(divided_states())
def test_every_number_belongs_to_one_block(divided: tuple[dict[str, Any], Blocks]) -> None:
    state, blocks = divided
    assert blocks.sizes.sum() == sum(np.asarray(state[f.array]).size for f in blocks.families)
    assert len(blocks.sizes) == len(blocks)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 2**32))
def test_a_partition_is_even_and_complete(count: int, nodes: int, seed: int) -> None:
    owner = partition(count, nodes, np.random.default_rng(seed))
    sizes = np.bincount(owner, minlength=nodes)
    assert sizes.sum() == count
    assert sizes.max(initial=0) - sizes.min() <= 1
    assert np.array_equal(owner, partition(count, nodes, np.random.default_rng(seed)))


def test_companions_travel_with_their_block() -> None:
    live = {"w": np.ones((3, 2)), "m": np.full((3, 2), 5.0)}
    saved = {"w": np.zeros((3, 2)), "m": np.zeros((3, 2))}
    along(live, "w", companions=["m"]).copy(saved, live, np.array([1]))
    assert live["m"].tolist() == [[5, 5], [0, 0], [5, 5]]


def test_blocks_of_parameters_that_need_gradients_can_be_restored() -> None:
    layer = torch.nn.Linear(2, 3)
    live = dict(layer.named_parameters())
    whole(live).copy({name: torch.zeros_like(value) for name, value in live.items()}, live, np.array([0]))
    assert layer.weight.abs().sum() == 0
    assert layer.bias.abs().sum() > 0


def test_a_block_has_a_readable_name() -> None:
    state = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
    blocks = along(state, "w") + whole(state, ["b"])
    assert [blocks.name(i) for i in range(len(blocks))] == ["w[0]", "w[1]", "w[2]", "b"]


def test_whole_leaves_companions_to_their_arrays() -> None:
    state = {"w": np.zeros(2), "w.m": np.zeros(2), "b": np.zeros(1)}
    blocks = whole(state, companions={"w": ["w.m"]})
    assert len(blocks) == 2
    assert blocks.members == ("w", "w.m", "b")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: along(s, "nothing"), "no array 'nothing'"),
        (lambda s: along(s, "w", dim=2), "cannot be cut along dimension 2"),
        (lambda s: along(s, "w", size=0), "size must be at least 1"),
        (lambda s: ragged(s, "w", [0, 2]), "rise from 0 to its length 3"),
        (lambda s: ragged(s, "w", [0, 2, 1, 3]), "rise from 0"),
        (lambda s: along(s, "w", companions=["b"]), "as long as"),
        (lambda s: along(s, "w") + whole(s), "would belong to two"),
        (lambda s: along(s, "w").pack(s, np.array([3])), "block 3 does not exist"),
        (lambda s: along(s, "w").pack(s, np.array([-1])), "block -1 does not exist"),
        (lambda s: partition(3, 0, np.random.default_rng(0)), "nodes must be at least 1"),
    ],
)
def test_impossible_divisions_are_refused_in_one_line(make: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make({"w": np.zeros((3, 2)), "b": np.zeros(2)})
