"""Reading of snapshots that several ranks saved: any part of any tensor, verified, without reading the rest."""

import itertools
import json
import math
import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from any_division import boxes_in, index, layouts, save_divided, values_of, write_shards
from holdfast.checkpoint import payload, shard_file, snapshot
from holdfast.checkpoint.manifest import shard_name
from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.sharding import Box, ShardedTensor, Sharding, is_empty, overlap, sizes
from holdfast.checkpoint.store import DirectoryStore, Store, read
from holdfast.errors import Corrupt
from snapshots import damage, put_byte, same
from stores import CountingStore, one_line

SMALL = 256
AHEAD = 8 * SMALL
STEP = 5


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "CHUNK", SMALL)
        patch.setattr(shard_file, "CHUNK", SMALL)
        patch.setattr(shard_file, "SEGMENT", AHEAD)
        yield


def in_memory() -> ObjectStore:
    return ObjectStore(f"memory://{uuid.uuid4().hex}")


def rows(*shape: int, ranks: int, dtype: str = "F32") -> ShardedTensor:
    """A tensor that is divided by its rows."""
    return ShardedTensor(dtype, shape, Sharding((ranks,), ((0, 0),)))


def saved(layout: dict[str, ShardedTensor], ranks: int, store: Store | None = None) -> tuple[Any, dict[str, Any]]:
    store = store or in_memory()
    tensors = values_of(layout)
    save_divided(store, STEP, tensors, layout, ranks)
    return store, tensors


# N ranks saved, and any number of ranks read.


@given(st.data())
def test_any_box_of_any_tensor_is_what_was_saved_whoever_saved_it(data: st.DataObject) -> None:
    world_size, layout = data.draw(layouts())
    store, tensors = saved(layout, world_size)
    reader = SnapshotReader(store, STEP)
    for name in data.draw(st.permutations(list(layout))):
        box = data.draw(boxes_in(layout[name].shape))
        assert same({name: reader.read(name, box)}, {name: tensors[name][index(box)]})
        assert same({name: reader.read(name)}, {name: tensors[name]})
    reader.check()


@given(layouts())
def test_a_whole_snapshot_comes_back_whoever_saved_it(made: tuple[int, dict[str, ShardedTensor]]) -> None:
    world_size, layout = made
    store, tensors = saved(layout, world_size)
    back = snapshot.load(store, STEP)
    assert same(back.tensors, tensors)
    assert back.extra == {"step": STEP}
    assert len(back.manifest.shards) == world_size


@given(st.data())
def test_a_snapshot_in_memory_gives_the_same_parts(data: st.DataObject) -> None:
    world_size, layout = data.draw(layouts())
    store, tensors = saved(layout, world_size)
    reader = SnapshotReader(store, STEP)
    reader.preload()
    for name in store.names():
        store.remove(name)
    for name in layout:
        box = data.draw(boxes_in(layout[name].shape))
        assert same({name: reader.read(name, box)}, {name: tensors[name][index(box)]})


@pytest.mark.parametrize(("before", "after"), [*itertools.product([1, 2, 3, 4, 7], repeat=2)])
def test_what_n_ranks_saved_is_read_by_m_ranks(before: int, after: int) -> None:
    layout = {
        "a": rows(10, 3, ranks=before),
        "b": rows(2, 5, ranks=before),
        "n": ShardedTensor("I64", (), Sharding((before,))),
    }
    store, tensors = saved(layout, before)
    for name in ("a", "b"):
        boxes = [rows(*layout[name].shape, ranks=after).sharding.held_box(layout[name].shape, r) for r in range(after)]
        parts = [SnapshotReader(store, STEP).read(name, box) for box in boxes]
        assert torch.equal(torch.cat(parts).view(torch.int32), tensors[name].view(torch.int32))


def test_every_store_reads_parts(store: Store) -> None:
    layout = {"a": rows(1000, 3, ranks=3), "b": ShardedTensor("BF16", (40, 30), Sharding((3,), ((0, 1),)))}
    _, tensors = saved(layout, 3, store)
    reader = SnapshotReader(store, STEP)
    reader.check()
    box = ((320, 350), (1, 3))
    assert same({"a": reader.read("a", box)}, {"a": tensors["a"][index(box)]})
    assert same({"b": reader.read("b", ((3, 40), (5, 25)))}, {"b": tensors["b"][3:40, 5:25]})


# Damage.


@given(st.data())
def test_a_flipped_bit_in_any_file_is_found_by_check_and_never_returned(data: st.DataObject) -> None:
    layout = {
        "a": rows(70, 9, ranks=3),
        "b": rows(50, ranks=3, dtype="BF16"),
        "n": ShardedTensor("I64", (), Sharding((3,))),
    }
    store, tensors = saved(layout, 3)
    name = data.draw(st.sampled_from([file for file in store.names() if file != "latest.json"]))
    content = bytearray(read(store, name))
    bit = data.draw(st.integers(0, 1 << 30)) % (8 * len(content))  # the length varies with the digits of the time
    content[bit // 8] ^= 1 << bit % 8
    damage(store, name, bytes(content))
    with pytest.raises(Corrupt):
        snapshot.check(store, STEP)
    with pytest.raises(Corrupt):
        snapshot.load(store, STEP)
    key = data.draw(st.sampled_from(["a", "b"]))
    box = data.draw(boxes_in(layout[key].shape))
    try:
        part = SnapshotReader(store, STEP).read(key, box)
    except Corrupt:
        return
    assert same({key: part}, {key: tensors[key][index(box)]})


@pytest.mark.parametrize("rank", range(3))
def test_a_missing_shard_file_is_found_by_whoever_needs_it(rank: int) -> None:
    layout = {"a": rows(9, ranks=3)}
    store, tensors = saved(layout, 3)
    damage(store, shard_name(STEP, rank, 3), None)
    reader = SnapshotReader(store, STEP)
    for row in range(9):
        if row // 3 == rank:
            with pytest.raises(Corrupt, match=f"shard-0000{rank}-of-00003.safetensors is missing"):
                reader.read("a", ((row, row + 1),))
        else:
            assert same({"a": reader.read("a", ((row, row + 1),))}, {"a": tensors["a"][row : row + 1]})
    with pytest.raises(Corrupt):
        reader.check()


def test_two_shard_files_that_change_places_are_found() -> None:
    store, _ = saved({"a": rows(80, ranks=4)}, 4)
    names = [shard_name(STEP, rank, 4) for rank in (1, 2)]
    one, two = (read(store, name) for name in names)
    assert len(one) == len(two)
    damage(store, names[0], two)
    damage(store, names[1], one)
    with pytest.raises(Corrupt):
        snapshot.check(store, STEP)
    with pytest.raises(Corrupt):
        SnapshotReader(store, STEP).read("a", ((25, 26),))
    assert SnapshotReader(store, STEP).read("a", ((5, 6),)).shape == (1,)


def test_a_shard_file_of_another_snapshot_is_found() -> None:
    layout = {"a": rows(80, ranks=4)}
    store, _ = saved(layout, 4)
    save_divided(store, STEP + 1, values_of(layout, seed=1), layout, 4)
    damage(store, shard_name(STEP, 2, 4), read(store, shard_name(STEP + 1, 2, 4)))
    with pytest.raises(Corrupt):
        snapshot.check(store, STEP)
    snapshot.check(store, STEP + 1)
    assert snapshot.newest(store).step == STEP + 1


def test_the_newest_snapshot_whose_files_are_all_good_is_used() -> None:
    store, layout = in_memory(), {"a": rows(80, ranks=4)}
    for step in (1, 2, 3):
        save_divided(store, step, values_of(layout, seed=step), layout, 4)
    damage(store, shard_name(3, 3, 4), None)
    found = snapshot.newest(store)
    assert found.step == 2
    assert [passed.name for passed in found.passed_over] == ["step-00000003/"]
    assert same(found.tensors, values_of(layout, seed=2))


FORGED: list[tuple[dict[str, ShardedTensor], dict[str, ShardedTensor]]] = [
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(8, 2, ranks=2), "b": rows(8, ranks=2)}),  # a tensor that no file has
    ({"a": rows(8, 2, ranks=2), "b": rows(8, ranks=2)}, {"a": rows(8, 2, ranks=2)}),  # one that was not announced
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(8, 2, ranks=2, dtype="I32")}),
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(2, 8, ranks=2)}),
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(1 << 60, ranks=2)}),
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(*[2] * 60, ranks=2)}),
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(*[1] * 70, ranks=2)}),
    ({"a": rows(8, 2, ranks=2)}, {"a": ShardedTensor("F32", (8, 2), Sharding((2,)))}),
    ({"a": rows(8, 2, ranks=2)}, {"a": ShardedTensor("F32", (8, 2), Sharding((2,), ((0, 1),)))}),
    ({"a": rows(8, 2, ranks=2)}, {"a": rows(0, 1 << 62, ranks=2)}),
]


@pytest.mark.parametrize(("written", "announced"), FORGED)
def test_files_that_are_not_what_the_layout_says_are_corrupt(
    written: dict[str, ShardedTensor], announced: dict[str, ShardedTensor]
) -> None:
    store = in_memory()
    shards = write_shards(store, STEP, values_of(written), written, 2)
    snapshot.commit(store, snapshot.draft(STEP, {}, announced, world=2), shards)
    for work in (SnapshotReader.check, SnapshotReader.read_all, SnapshotReader.preload, read_each):
        with pytest.raises(Corrupt) as error:
            work(SnapshotReader(store, STEP))
        one_line(error)


def read_each(reader: SnapshotReader) -> None:
    for name in reader.layout:
        reader.read(name)


def test_a_layout_that_is_not_one_is_corrupt() -> None:
    store, layout = in_memory(), {"a": rows(8, ranks=2)}
    shards = write_shards(store, STEP, values_of(layout), layout, 2)
    draft = snapshot.draft(STEP, {}, layout, world=2)
    for bad in (
        None,
        [],
        {},
        {"meshes": [[3]], "tensors": {}},
        {"meshes": [[2]], "tensors": {"a": ["F32", [8], 1, []]}},
    ):
        extra = json.dumps({**json.loads(draft.extra), "layout": bad}).encode()
        forged = snapshot.SnapshotDraft(step=STEP, position=draft.position, extra=extra, saved=draft.saved)
        for name in store.names("step-00000005/m"):
            store.remove(name)
        snapshot.commit(store, forged, shards)
        with pytest.raises(Corrupt, match="divided"):
            SnapshotReader(store, STEP)


# How much is read.


def needed(layout: dict[str, ShardedTensor], name: str, box: Box) -> int:
    """The bytes of the rows that hold `box` in the files of all ranks: files are contiguous by rows."""
    each = payload.empty(layout[name].dtype, ()).element_size()
    total = 0
    for _, part in layout[name].parts(box):
        common = overlap(box, part)
        total += each * math.prod([*sizes(common)[:1], *sizes(part)[1:]])
    return total


@given(st.data())
def test_a_part_is_read_without_the_rest_of_the_snapshot(data: st.DataObject) -> None:
    layout = {"a": rows(400, 30, ranks=4), "b": ShardedTensor("F32", (60, 200), Sharding((2, 2), ((0, 1), (1, 0))))}
    plain, tensors = saved(layout, 4)
    store = CountingStore(plain)
    reader = SnapshotReader(store, STEP)
    name = data.draw(st.sampled_from(sorted(layout)))
    box = data.draw(boxes_in(layout[name].shape))
    assert same({name: reader.read(name, box)}, {name: tensors[name][index(box)]})
    parts = layout[name].parts(box)
    opening = sum(AHEAD + shard.length // 16 for shard in (reader.manifest.shards[rank] for rank, _ in parts))
    assert store.bytes_read <= needed(layout, name, box) + len(parts) * (AHEAD + 2 * SMALL) + opening
    assert {file for file, _, _ in store.reads} <= {shard_name(STEP, rank, 4) for rank, _ in parts}
    assert bool(parts) == (not is_empty(box))


def test_reading_all_tensors_in_the_order_of_the_files_reads_each_byte_about_once() -> None:
    """Optimizers mix the dtypes of moments and step counters, and a file holds wide dtypes first."""
    layout: dict[str, ShardedTensor] = {}
    for number in range(200):
        layout[f"{number}/step"] = ShardedTensor("F32", (), Sharding((2,)))
        layout[f"{number}/moment"] = rows(64, ranks=2, dtype="BF16")
        layout[f"{number}/count"] = ShardedTensor("I64", (), Sharding((2,)))
    plain, tensors = saved(layout, 2)
    store = CountingStore(plain)
    reader = SnapshotReader(store, STEP)
    assert sorted(reader.in_file_order()) == sorted(layout)
    for name in reader.in_file_order():
        assert same({name: reader.read(name)}, {name: tensors[name]})
    assert store.bytes_read <= 1.4 * reader.manifest.bytes + 2 * AHEAD


def test_a_whole_snapshot_is_read_once_and_takes_its_own_memory_and_that_of_two_files(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (payload, shard_file):
            patch.setattr(module, "CHUNK", 1 << 20)
        patch.setattr(shard_file, "SEGMENT", 8 << 20)
        layout = {"a": rows(8 << 20, ranks=8), "n": ShardedTensor("F32", (), Sharding((8,)))}
        plain, tensors = saved(layout, 8, DirectoryStore(tmp_path))
        store = CountingStore(plain)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            back = snapshot.load(store, STEP)  # type: ignore[arg-type]
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    assert same(back.tensors, tensors)
    own = sum(tensor.nbytes for tensor in tensors.values())
    assert peak - own < 20 << 20, "besides the tensors: two files of 4 MiB and a window"
    assert store.bytes_read <= 3 * back.manifest.bytes


def test_a_snapshot_of_many_ranks_is_checked_in_little_memory(tmp_path: Path) -> None:
    layout = {"a": rows(64 * 600, ranks=64)}
    store, _ = saved(layout, 64, DirectoryStore(tmp_path))
    tracemalloc.start()
    try:
        reader = SnapshotReader(store, STEP)
        before = tracemalloc.get_traced_memory()[0]
        reader.check()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 64 * 1600


def test_damage_in_one_row_does_not_hide_the_other_ranks_rows(tmp_path: Path) -> None:
    store, tensors = saved({"a": rows(4000, 4, ranks=2)}, 2, DirectoryStore(tmp_path))
    path = tmp_path / shard_name(STEP, 1, 2)
    position = path.stat().st_size // 2
    put_byte(path, position, path.read_bytes()[position] ^ 1)
    reader = SnapshotReader(store, STEP)
    assert same({"a": reader.read("a", ((0, 2000), (0, 4)))}, {"a": tensors["a"][:2000]})
    with pytest.raises(Corrupt):
        reader.read("a", ((2000, 4000), (0, 4)))
