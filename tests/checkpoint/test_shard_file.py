"""Shard files: any part can be read and is verified, and no damage goes unnoticed."""

import math
import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from any_division import layouts, values_of
from holdfast.checkpoint import payload, shard_file
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.payload import DIGEST_BYTES, DIGESTS
from holdfast.checkpoint.shard_file import ShardFile
from holdfast.checkpoint.store import DirectoryStore, Store, read
from holdfast.errors import BadInput, Corrupt
from snapshots import damage, same
from stores import CountingStore

NAME = "shard"
SMALL = 256  # bytes of a chunk in most tests, so that small files have many
AHEAD = 8 * SMALL


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "CHUNK", SMALL)
        patch.setattr(shard_file, "CHUNK", SMALL)
        patch.setattr(shard_file, "SEGMENT", AHEAD)
        yield


@pytest.fixture
def real_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    chunk = 1 << 20
    monkeypatch.setattr(payload, "CHUNK", chunk)
    monkeypatch.setattr(shard_file, "CHUNK", chunk)
    monkeypatch.setattr(shard_file, "SEGMENT", 8 * chunk)
    return chunk


def in_memory() -> ObjectStore:
    return ObjectStore(f"memory://{uuid.uuid4().hex}")


def put(store: Store, tensors: dict[str, Any]) -> Digest:
    return shard_file.put(store, NAME, payload.encode(tensors, digests=True))


def several_chunks(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a": torch.randn(130, 3), "step": torch.tensor(7), "b": torch.randn(600), "c": torch.randn(200).bfloat16()}


states = layouts().map(lambda made: values_of(made[1]))


# What is written.


@given(states)
def test_any_shard_file_can_be_read_by_the_safetensors_library(tensors: dict[str, torch.Tensor]) -> None:
    store = in_memory()
    put(store, tensors)
    back = safetensors.torch.load(read(store, NAME))
    del back[DIGESTS]
    assert same({name: back[name] for name in tensors}, tensors)
    assert back.keys() == tensors.keys()


@given(states)
def test_the_last_tensor_holds_the_digest_of_every_chunk_before_it(tensors: dict[str, torch.Tensor]) -> None:
    store = in_memory()
    digest = put(store, tensors)
    data = read(store, NAME)
    table = safetensors.torch.load(data)[DIGESTS].numpy().tobytes()
    before = data[: -len(table)]
    assert data.endswith(table)
    chunks = [before[start : start + SMALL] for start in range(0, len(before), SMALL)]
    assert table == b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks)
    assert digest == Digest(len(data), xxhash.xxh3_128_hexdigest(table))


@given(st.data())
def test_a_file_does_not_depend_on_the_pieces_in_which_it_was_written(data: st.DataObject) -> None:
    whole = b"".join(payload.encode(several_chunks(), digests=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    one, other = in_memory(), in_memory()
    assert shard_file.put(one, NAME, [whole]) == shard_file.put(other, NAME, pieces)
    assert read(one, NAME) == read(other, NAME)


@pytest.mark.parametrize("extra", range(-20, 21))
def test_a_file_of_about_a_whole_number_of_chunks_is_good(extra: int) -> None:
    store = in_memory()
    header = payload.layout({"a": torch.zeros(4096, dtype=torch.uint8)}, digests=True).length - 4096
    tensors = {"a": torch.arange(16 * SMALL - header + extra).to(torch.uint8)}
    file = ShardFile(store, NAME, put(store, tensors))
    file.check()
    assert same(payload.decode(file.read_all(), NAME), tensors)


def test_the_name_of_the_digests_is_refused_for_a_tensor() -> None:
    with pytest.raises(BadInput, match="reserved"):
        put(in_memory(), {DIGESTS: torch.zeros(3)})


# Reading.


@given(st.data())
def test_any_ranged_reads_in_any_order_are_the_bytes_that_were_written(data: st.DataObject) -> None:
    store = in_memory()
    digest = put(store, several_chunks())
    whole = read(store, NAME)
    file = ShardFile(store, NAME, digest)
    readable = st.integers(0, len(whole) - math.ceil(len(whole) / (SMALL + DIGEST_BYTES)) * DIGEST_BYTES)
    for start, stop in data.draw(st.lists(st.tuples(readable, readable).map(sorted), min_size=1, max_size=6)):
        assert file.read(start, stop).tobytes() == whole[start:stop]
    assert file.read_all().tobytes() == whole


def test_bytes_outside_of_the_file_are_refused() -> None:
    store = in_memory()
    file = ShardFile(store, NAME, put(store, several_chunks()))
    for start, stop in ((-1, 4), (4, 3), (0, len(read(store, NAME)))):
        with pytest.raises(Corrupt):
            file.read(start, stop)


def test_what_was_read_stays_the_same_while_more_is_read() -> None:
    store = in_memory()
    file = ShardFile(store, NAME, put(store, several_chunks()))
    first = file.read(100, 200)
    kept = first.tobytes()
    for start in range(0, 4000, 500):
        file.read(start, start + 500)
    assert first.tobytes() == kept


def test_a_small_part_that_is_kept_does_not_keep_what_was_read_around_it() -> None:
    store = in_memory()
    file = ShardFile(store, NAME, put(store, several_chunks()))
    part = file.read(100, 200)
    assert part.base is None or part.base.nbytes <= 200


def test_entries_point_at_the_values(store: Store, real_chunks: int) -> None:
    tensors = {"a": torch.randn(700_000), "step": torch.tensor(7.0), "b": torch.arange(9).bfloat16()}
    file = ShardFile(store, NAME, put(store, tensors))
    file.check()
    assert list(file.entries) == list(tensors)
    for name, value in tensors.items():
        entry = file.entries[name]
        back = payload.as_array(file.read(entry.start, entry.end), entry, entry.shape)
        assert same({name: back}, {name: value})


# Damage.


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def opened_and_checked(store: Store, digest: Digest) -> None:
    ShardFile(store, NAME, digest).check()


def test_a_flipped_bit_in_any_byte_is_found_by_check() -> None:
    store = in_memory()
    digest = put(store, {"a": torch.randn(60, 3), "step": torch.tensor(7), "b": torch.randn(40).bfloat16()})
    data = read(store, NAME)
    assert len(data) > 4 * SMALL
    for byte in range(len(data)):
        store.put(NAME, [flipped(data, 8 * byte + byte % 8)])
        with pytest.raises(Corrupt):
            opened_and_checked(store, digest)
        with pytest.raises(Corrupt):
            ShardFile(store, NAME, digest).read_all()


@given(st.data())
def test_a_flipped_bit_is_found_exactly_when_its_chunk_is_read(data: st.DataObject) -> None:
    plain = in_memory()
    digest = put(plain, several_chunks())
    whole = read(plain, NAME)
    length = len(whole) - math.ceil(len(whole) / (SMALL + DIGEST_BYTES)) * DIGEST_BYTES
    store = CountingStore(plain)
    file = ShardFile(store, NAME, digest)
    bit = data.draw(st.integers(0, 8 * length - 1))
    plain.put(NAME, [flipped(whole, bit)])
    for start, stop in data.draw(st.lists(st.tuples(*[st.integers(0, length)] * 2).map(sorted), max_size=6)):
        store.reads.clear()
        try:
            assert file.read(start, stop).tobytes() == whole[start:stop]
            is_found = False
        except Corrupt:
            is_found = True
        assert is_found == any(first <= bit // 8 < last for _, first, last in store.reads)


@given(st.data())
def test_a_file_of_another_length_is_found(data: st.DataObject) -> None:
    store = in_memory()
    digest = put(store, several_chunks())
    whole = read(store, NAME)
    length = data.draw(st.integers(0, len(whole) + 600).filter(lambda length: length != len(whole)))
    store.put(NAME, [(whole + bytes(600))[:length]])
    with pytest.raises(Corrupt, match=f"{length} bytes"):
        ShardFile(store, NAME, digest)


@pytest.mark.parametrize("cut", [0, 1, SMALL, AHEAD])
def test_a_file_that_shrinks_while_it_is_open_is_found(tmp_path: Path, cut: int) -> None:
    store = DirectoryStore(tmp_path)
    digest = put(store, several_chunks())
    file = ShardFile(store, NAME, digest)
    (tmp_path / NAME).write_bytes(read(store, NAME)[:cut])
    with pytest.raises(Corrupt):
        file.check()
    with pytest.raises(Corrupt):
        file.read(3000, 3100)


def test_a_file_that_is_removed_while_it_is_open_is_found() -> None:
    store = in_memory()
    file = ShardFile(store, NAME, put(store, several_chunks()))
    damage(store, NAME, None)
    for work in (file.check, file.read_all, lambda: file.read(3000, 3100)):
        with pytest.raises(Corrupt, match="missing"):
            work()


def test_another_file_of_the_same_length_is_found() -> None:
    store = in_memory()
    digest = put(store, several_chunks(1))
    put(store, several_chunks(2))
    with pytest.raises(Corrupt, match="digests of its chunks"):
        ShardFile(store, NAME, digest)


def test_the_digests_of_another_file_do_not_make_its_values_good() -> None:
    store = in_memory()
    other = put(store, several_chunks(2))
    values = read(store, NAME)
    digest = put(store, several_chunks(1))
    table = ShardFile(store, NAME, digest)
    size = math.ceil(digest.length / (SMALL + DIGEST_BYTES)) * DIGEST_BYTES
    store.put(NAME, [values[:-size], read(store, NAME)[-size:]])  # the values of one, the digests of the other
    with pytest.raises(Corrupt):
        table.check()
    for committed in (digest, other):
        with pytest.raises(Corrupt):
            opened_and_checked(store, committed)


def test_two_chunks_that_change_places_with_their_digests_are_found() -> None:
    store = in_memory()
    digest = put(store, several_chunks())
    data = bytearray(read(store, NAME))
    table = len(data) - math.ceil(len(data) / (SMALL + DIGEST_BYTES)) * DIGEST_BYTES
    for size, start in ((SMALL, 0), (DIGEST_BYTES, table)):
        one, two = slice(start + 3 * size, start + 4 * size), slice(start + 5 * size, start + 6 * size)
        data[one], data[two] = data[two], data[one]
    store.put(NAME, [bytes(data)])
    with pytest.raises(Corrupt):
        opened_and_checked(store, digest)


@given(st.integers(0, 3000))
def test_a_length_that_no_shard_file_has_is_corrupt(length: int) -> None:
    store = in_memory()
    store.put(NAME, [bytes(length)])
    with pytest.raises(Corrupt):
        ShardFile(store, NAME, Digest(length, "0" * 32))


@given(st.binary(max_size=2000))
def test_a_hostile_file_with_true_digests_is_corrupt_or_readable(data: bytes) -> None:
    store = in_memory()
    digest = shard_file.put(store, NAME, [data or b"x"])
    with pytest.raises(Corrupt):
        ShardFile(store, NAME, digest)


# How much is read.


def test_a_part_is_read_without_the_rest_of_the_file() -> None:
    plain = in_memory()
    digest = put(plain, {"a": torch.zeros(100_000)})
    store = CountingStore(plain)
    file = ShardFile(store, NAME, digest)
    table = math.ceil(digest.length / (SMALL + DIGEST_BYTES)) * DIGEST_BYTES
    assert store.bytes_read <= table + AHEAD
    for start, stop in ((200_000, 200_004), (100_000, 190_000)):
        store.reads.clear()
        file.read(start, stop)
        assert store.bytes_read <= max(AHEAD, stop - start + 2 * SMALL)


@given(st.lists(st.integers(1, SMALL // 4), min_size=1, max_size=200))
def test_reading_in_the_order_of_the_file_reads_each_byte_about_once(sizes: list[int]) -> None:
    plain = in_memory()
    digest = put(plain, {f"{number}": torch.zeros(size) for number, size in enumerate(sizes)})
    store = CountingStore(plain)
    file = ShardFile(store, NAME, digest)
    for entry in file.entries.values():
        file.read(entry.start, entry.end)
    assert store.bytes_read <= 1.4 * digest.length + AHEAD


def test_reading_a_part_needs_memory_for_the_part_only(tmp_path: Path, real_chunks: int) -> None:
    store = DirectoryStore(tmp_path)
    digest = put(store, {"a": torch.zeros(16 << 20)})  # 64 MiB
    tracemalloc.start()
    try:
        file = ShardFile(store, NAME, digest)
        file.read(40 << 20, (40 << 20) + 4)
        file.check()
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_reading_a_file_part_by_part_keeps_one_segment_in_memory(tmp_path: Path, real_chunks: int) -> None:
    store, segment = DirectoryStore(tmp_path), 8 * real_chunks
    digest = put(store, {"a": torch.zeros(3 * segment, dtype=torch.uint8)})
    file = ShardFile(store, NAME, digest)
    start = file.entries["a"].start
    tracemalloc.start()
    try:
        for part in range(24):
            file.read(start + part * real_chunks, start + (part + 1) * real_chunks)
        assert tracemalloc.get_traced_memory()[1] < segment + 2 * real_chunks
    finally:
        tracemalloc.stop()


def test_progress_is_told_of_every_byte() -> None:
    store, written, seen = in_memory(), [], []
    parts = payload.encode(several_chunks(), digests=True)
    digest = shard_file.put(store, NAME, parts, written.append)
    assert sum(written) == digest.length
    file = ShardFile(store, NAME, digest, seen.append)
    file.read_all()
    assert sum(seen) == digest.length
    table = math.ceil(digest.length / (SMALL + DIGEST_BYTES)) * DIGEST_BYTES
    seen.clear()
    file.check()
    assert sum(seen) == digest.length - table


def test_a_large_file_is_read_by_several_threads_as_by_one(tmp_path: Path, real_chunks: int) -> None:
    store = DirectoryStore(tmp_path)
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (25 << 20) + 3, np.uint8))
    file = ShardFile(store, NAME, put(store, {"a": values}))
    assert same(payload.decode(file.read_all(), NAME), {"a": values})
    entry = file.entries["a"]
    assert file.read(entry.start + 5, entry.end).tobytes() == values[5:].numpy().tobytes()
