"""The file of a snapshot's tensors: plain safetensors, aligned, independent of what becomes of the file."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from holdfast.blocks.division import Array
from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, Corrupt
from snapshots import same, saved, tensors_of


def test_any_safetensors_reader_opens_the_payload(tmp_path: Path) -> None:
    saved(DirectoryStore(tmp_path), 3)
    theirs = safetensors.torch.load_file(tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors")
    assert set(theirs) == {*tensors_of(3), payload.DIGESTS}
    for name, value in tensors_of(3).items():
        assert torch.equal(theirs[name], torch.as_tensor(value))


def test_loaded_tensors_are_writable_and_do_not_follow_the_file(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1)
    back = snapshot.load(store, 1)
    (tmp_path / "step-00000001" / "shard-00000-of-00001.safetensors").write_bytes(b"overwritten since")
    assert same(back.tensors, tensors_of(1))
    back.tensors["array"][...] = 9


def test_values_are_aligned_to_their_numbers(tmp_path: Path) -> None:
    odd = {"bytes": np.zeros(3, np.uint8), "wide": np.zeros(2, np.float64), "half": np.zeros(1, np.float16)}
    store = DirectoryStore(tmp_path)
    snapshot.save(store, 1, odd, {})
    assert all(
        value.flags.aligned for value in snapshot.load(store, 1).tensors.values() if isinstance(value, np.ndarray)
    )


@pytest.mark.parametrize(
    "value",
    [np.array(["text"]), np.zeros(2, np.complex128), torch.zeros(2, 2).to_sparse(), [1.0], np.ma.masked_array([1])],
)
def test_what_the_format_cannot_hold_is_refused_by_name_and_writes_nothing(tmp_path: Path, value: Array) -> None:
    store = DirectoryStore(tmp_path)
    with pytest.raises(BadInput, match="moments"):
        snapshot.save(store, 1, {"moments": value}, {})
    assert store.names() == []


def test_a_stranger_cannot_make_the_reader_look_outside_the_file() -> None:
    whole = np.frombuffer(b"".join(payload.encode({"w": np.ones(2)})), np.uint8)
    assert payload.decode(whole, "x")["w"].tolist() == [1.0, 1.0]
    for old, new in (
        (b"[0,16]", b"[0,99]"),
        (b"[0,16]", b"[8,16]"),
        (b"[0,16]", b"[-8,8]"),
        (b'"shape":[2]', b'"shape":[9]'),
        (b"F64", b"F65"),
    ):
        assert old in whole.tobytes()
        with pytest.raises(Corrupt, match="well-formed"):
            payload.decode(np.frombuffer(whole.tobytes().replace(old, new), np.uint8), "x")
    for bad in (b"", b"123", b"\xff" * 8 + b"{}", whole.tobytes()[:-1]):
        with pytest.raises(Corrupt):
            payload.decode(np.frombuffer(bad, np.uint8), "x")
