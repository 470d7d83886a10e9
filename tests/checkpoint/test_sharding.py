"""Laws of the division of tensors among ranks: every value is saved once, where torch has it."""

import copy
import itertools
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_division
from torch.distributed.tensor.placement_types import _StridedShard

from any_division import boxes_in, divisions, index, layouts, meshes, shapes
from holdfast.checkpoint import sharding
from holdfast.checkpoint.sharding import ShardedTensor, Sharding, is_empty, overlap, sizes, within
from holdfast.errors import Corrupt

# Every value is saved once.


@given(divisions())
def test_the_boxes_of_all_ranks_cover_every_value_exactly_once(division: tuple[tuple[int, ...], Sharding]) -> None:
    shape, rule = division
    tensor = ShardedTensor("F32", shape, rule)
    count = np.zeros(shape, int)
    for rank in range(rule.world_size):
        box = tensor.box(rank)
        if box is not None:
            count[index(box)] += 1
    assert (count == 1).all()


@given(divisions())
def test_rank_0_saves_the_first_value_of_every_tensor(division: tuple[tuple[int, ...], Sharding]) -> None:
    shape, rule = division
    box = ShardedTensor("F32", shape, rule).box(0)
    assert box is not None
    assert all(start == 0 for start, _ in box)


@given(divisions())
def test_a_rank_saves_what_it_has_or_nothing(division: tuple[tuple[int, ...], Sharding]) -> None:
    shape, rule = division
    for rank in range(rule.world_size):
        box = rule.box(shape, rank)
        assert is_empty(box) or box == rule.held_box(shape, rank)


def test_a_number_is_saved_by_rank_0_alone() -> None:
    tensor = ShardedTensor("F32", (), Sharding((2, 3)))
    assert [tensor.box(rank) for rank in range(6)] == [(), None, None, None, None, None]
    assert tensor.parts(()) == [(0, ())]


def test_a_tensor_without_values_is_saved_by_rank_0_alone() -> None:
    tensor = ShardedTensor("F32", (4, 0), Sharding((3,), ((0, 0),)))
    assert [tensor.box(rank) for rank in range(3)] == [((0, 4), (0, 0)), None, None]
    assert tensor.parts(tensor.whole) == [(0, tensor.whole)]


@given(st.integers(1 << 53, (1 << 62) - 1), st.integers(1, 9))
def test_sizes_that_no_float_can_hold_are_divided_exactly(size: int, count: int) -> None:
    boxes = [Sharding((count,), ((0, 0),)).box((size,), rank)[0] for rank in range(count)]
    assert boxes[0][0] == 0
    assert boxes[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(boxes))
    assert boxes[0][1] == -(-size // count)


# A reader finds all ranks that have a part of a box.


@given(st.data())
def test_parts_are_exactly_the_ranks_whose_box_overlaps(data: st.DataObject) -> None:
    shape, rule = data.draw(divisions())
    tensor = ShardedTensor("F32", shape, rule)
    wanted = data.draw(boxes_in(shape))
    found = tensor.parts(wanted)
    boxes = {rank: box for rank in range(rule.world_size) if (box := tensor.box(rank)) is not None}
    if is_empty(tensor.whole):
        assert found == [(0, tensor.whole)]
    else:
        expected = {rank: box for rank, box in boxes.items() if not is_empty(overlap(box, wanted))}
        assert dict(found) == (expected if not is_empty(wanted) else {})
    assert len(dict(found)) == len(found)


@given(st.data())
def test_the_parts_of_any_box_put_together_are_the_box(data: st.DataObject) -> None:
    shape, rule = data.draw(divisions())
    tensor = ShardedTensor("F32", shape, rule)
    wanted = data.draw(boxes_in(shape))
    values = np.arange(math.prod(shape)).reshape(shape)
    result = np.full(sizes(wanted), -1)
    for _, part in tensor.parts(wanted):
        common = overlap(wanted, part)
        result[within(common, wanted)] = values[index(part)][within(common, part)]
    assert np.array_equal(result, values[index(wanted)])


def test_the_time_to_find_a_part_does_not_grow_with_the_ranks() -> None:
    many = 1 << 40
    tensor = ShardedTensor("F32", (many * 2, 3), Sharding((many,), ((0, 0),)))
    assert tensor.parts(((many, many + 3), (1, 2))) == [
        (many // 2, ((many, many + 2), (0, 3))),
        (many // 2 + 1, ((many + 2, many + 4), (0, 3))),
    ]


# The division is torch's own.


@given(st.data())
def test_a_tensor_is_divided_as_torch_divides_a_dtensor(data: st.DataObject) -> None:
    shape, mesh = data.draw(shapes.filter(bool)), data.draw(meshes)
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    chosen = [data.draw(dims) for _ in mesh]
    placements = [Replicate() if dim is None else Shard(dim) for dim in chosen]
    rule = Sharding(mesh, tuple((mesh_dim, dim) for mesh_dim, dim in enumerate(chosen) if dim is not None))
    agree(shape, rule, placements)


@given(st.data())
def test_fsdp_divides_what_tensor_parallelism_left_as_torch_does(data: st.DataObject) -> None:
    replicas, fsdp, tp = (data.draw(st.integers(1, 3)) for _ in range(3))
    dim, tp_dim = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    # For an uneven division, torch's placement does not say what FSDP does: FSDP divides the local tensor.
    shape = tuple(data.draw(st.integers(0, 3)) * fsdp * tp for _ in range(2))
    mine: Placement = _StridedShard(dim, split_factor=tp) if dim == tp_dim else Shard(dim)
    agree(shape, Sharding((replicas, fsdp, tp), ((2, tp_dim), (1, dim))), [Replicate(), mine, Shard(tp_dim)])


def agree(shape: tuple[int, ...], rule: Sharding, placements: Sequence[Placement]) -> None:
    for rank in range(rule.world_size):
        coordinates = [int(number) for number in np.unravel_index(rank, rule.mesh)]
        local_shape, offset = torch_division(shape, rule.mesh, coordinates, placements)
        held = rule.held_box(shape, rank)
        assert sizes(held) == tuple(local_shape)
        if not is_empty(held):
            assert tuple(start for start, _ in held) == tuple(offset)


@given(st.data())
def test_an_uneven_division_of_a_division_is_what_torch_chunk_does_twice(data: st.DataObject) -> None:
    size, fsdp, tp = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rule = Sharding((fsdp, tp), ((1, 0), (0, 0)))
    for rank in range(fsdp * tp):
        own = chunk(chunk(torch.arange(size), tp, rank % tp), fsdp, rank // tp)
        ((start, stop),) = rule.held_box((size,), rank)
        assert list(range(start, stop)) == own.tolist()


def chunk(tensor: torch.Tensor, count: int, number: int) -> torch.Tensor:
    chunks = torch.chunk(tensor, count)
    return chunks[number] if number < len(chunks) and len(tensor) else tensor[:0]


@given(st.data())
def test_replicas_save_different_rows_and_together_all_of_them(data: st.DataObject) -> None:
    rows, replicas, shards = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rule = Sharding((replicas, shards), ((1, 0), (0, 0)))
    saved = [rule.box((rows,), rank)[0] for rank in range(replicas * shards)]
    assert sorted(row for start, stop in saved for row in range(start, stop)) == list(range(rows))
    held = Sharding((replicas, shards), ((1, 0),))
    for rank, (start, stop) in enumerate(saved):
        ((first, last),) = held.held_box((rows,), rank)
        assert start == stop or first <= start <= stop <= last


# JSON.


@given(layouts())
def test_a_layout_survives_json(made: tuple[int, dict[str, ShardedTensor]]) -> None:
    world_size, layout = made
    back = sharding.from_json(json.loads(json.dumps(sharding.to_json(layout))), world_size)
    assert back == layout
    assert list(back) == list(layout)


def good() -> Any:
    rule = Sharding((2, 3), ((1, 0), (0, 1)))
    return sharding.to_json({"a": ShardedTensor("F32", (4, 5), rule), "b": ShardedTensor("I64", (), Sharding((6,)))})


HOSTILE: list[Any] = [
    *(None, True, -1, 1 << 63, 1 << 200, 1.5, "", "x", [], [[]], [0], [0, 0], ["F32", [4, 5], 0, [[0, 0]]], {}),
    *({"": 0}, {"a": {}}, [[0, 0], [0, 1]], [[1, 2]], [[2, 0]], [[0, -1]], [[True, 0]], [[0, 0, 0]], [[0, 0.0]]),
    *([-4, 5], [4.0, 5], [True], "F32", "F33", [2, 3], [6, 0], [[2, 3], [0]], [[2, -3]], [[6, 1.0]], [["2", "3"]]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], by)
    return value


@pytest.mark.parametrize("path", places(good()), ids=repr)
def test_a_layout_with_one_hostile_value_is_corrupt_or_usable(path: tuple[Any, ...]) -> None:
    for value in HOSTILE:
        try:
            layout = sharding.from_json(replaced(good(), path, value), 6)
        except Corrupt:
            continue
        for tensor in layout.values():
            parts = tensor.parts(tensor.whole)
            assert all(0 <= rank < 6 and tensor.box(rank) == box for rank, box in parts)
            assert sum(math.prod(sizes(box)) for _, box in parts) == math.prod(tensor.shape)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


@given(any_json | st.fixed_dictionaries({"meshes": any_json, "tensors": any_json}))
def test_any_other_json_is_corrupt_or_an_empty_layout(value: Any) -> None:
    with suppress(Corrupt):
        assert sharding.from_json(value, 6) == {}


def test_a_mesh_of_other_ranks_than_those_that_saved_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="6"):
        sharding.from_json(good(), 4)


def test_a_mesh_of_very_many_dimensions_is_corrupt() -> None:
    mesh = [1] * 100_000
    splits = [[mesh_dim, 0] for mesh_dim in range(len(mesh))]
    with pytest.raises(Corrupt, match="dimensions"):
        sharding.from_json({"meshes": [mesh], "tensors": {"a": ["F32", [4], 0, splits]}}, 1)


@pytest.mark.parametrize("dtype", ["F33", "", "float32", "__class__"])
def test_a_dtype_that_no_file_can_have_is_corrupt(dtype: str) -> None:
    with pytest.raises(Corrupt, match="dtype"):
        sharding.from_json({"meshes": [[1]], "tensors": {"a": [dtype, [4], 0, []]}}, 1)
