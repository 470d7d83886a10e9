"""Places of blocks among others packed with them: what is taken out, put together and added up is what `Blocks` says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.division import Blocks, Ids, along, ragged, whole
from holdfast.errors import BadInput
from holdfast.workloads.block_layout import BlockLayout, Layouts, Places, merged, require_fit, summed, take
from holdfast.workloads.divided import Push
from holdfast.workloads.workload import Arrays

STATE: Arrays = {
    "rows": np.arange(12.0).reshape(4, 3),
    "rows.moment": -np.arange(4.0),
    "columns": np.arange(10).reshape(2, 5),
    "texts": np.arange(9, dtype=np.uint8),
    "bias": np.array([-0.0, 7.0]),
    "scalar": np.array(3),
}
BLOCKS: Blocks = (
    along(STATE, "rows", companions=["rows.moment"])
    + along(STATE, "columns", dim=1, size=2)
    + ragged(STATE, "texts", [0, 2, 2, 7, 9])
    + whole(STATE, ["bias", "scalar"])
)
ALL = np.arange(len(BLOCKS))

some_blocks = st.sets(st.sampled_from(ALL.tolist()), min_size=1).map(lambda found: np.array(sorted(found)))


def packed(ids: Ids) -> Arrays:
    return dict(BLOCKS.pack(STATE, ids))  # type: ignore[arg-type]


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def places(ids: Ids, wanted: Ids) -> Places:
    layout = BlockLayout(BLOCKS, ids)
    return layout.places(layout.positions(wanted))


@given(ids=some_blocks, data=st.data())
def test_blocks_taken_out_of_others_are_those_of_the_state(ids: Ids, data: st.DataObject) -> None:
    wanted = np.array(sorted(data.draw(st.sets(st.sampled_from(ids.tolist()), min_size=1))))
    assert same(take(packed(ids), places(ids, wanted)), packed(wanted))


@given(ids=some_blocks, seed=st.integers(0, 99))
def test_blocks_dealt_to_several_sides_come_together_to_the_bit(ids: Ids, seed: int) -> None:
    owner = np.random.default_rng(seed).integers(3, size=len(ids))
    sides = [ids[owner == side] for side in range(3) if np.any(owner == side)]
    assert same(merged(BlockLayout(BLOCKS, ids), [(places(ids, side), packed(side)) for side in sides]), packed(ids))
    assert same(summed(Layouts(BLOCKS), ids, [Push(side, packed(side)) for side in sides]), packed(ids))


@given(ids=some_blocks, data=st.data())
def test_pushes_of_two_workers_are_added_up_for_the_blocks_of_a_node(ids: Ids, data: st.DataObject) -> None:
    other = np.array(sorted(data.draw(st.sets(st.sampled_from(ids.tolist()), min_size=1))))
    total = summed(Layouts(BLOCKS), ids, [Push(ALL, packed(ALL)), Push(other, packed(other))])
    expected = {name: value.copy() for name, value in STATE.items()}
    twice = {name: np.asarray(value + value) for name, value in packed(other).items()}
    BLOCKS.unpack(twice, other, expected)
    assert same(total, dict(BLOCKS.pack(expected, ids)))  # type: ignore[arg-type]


def test_a_push_may_be_wider_than_the_block_and_leave_out_companions() -> None:
    sums = {"rows": np.ones((2, 4))}
    total = summed(Layouts(BLOCKS), ALL[:3], [Push(ALL[:2], sums), Push(ALL[1:3], sums)])
    assert total["rows"].tolist() == [[1] * 4, [2] * 4, [1] * 4]
    assert list(total) == ["rows"]


def test_a_push_for_an_array_without_such_blocks_is_refused() -> None:
    with pytest.raises(BadInput, match="array 'texts' belongs to none of the 2 blocks it is sent for"):
        require_fit(BlockLayout(BLOCKS, ALL[:2]), {"texts": np.ones(2)})
