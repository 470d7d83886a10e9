"""While a script builds its model, the newest snapshot is on its way into the system's cache."""

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.manifest import shard_name
from holdfast.checkpoint.place import read_ahead
from holdfast.checkpoint.store import DirectoryStore
from holdfast.distributed.ranks import join
from holdfast.errors import Corrupt
from holdfast.runs.config import RunConfig
from holdfast.train.state import attempt

DEADLINE = 30.0
MANY = 3_000_000  # values of 4 bytes: several requests to read ahead


@pytest.fixture
def store(on_disk: Path) -> DirectoryStore:
    """A directory with two snapshots, of which nothing is in the system's cache."""
    store = DirectoryStore(on_disk / "checkpoints")
    for step in (1, 2):
        snapshot.save(store, step, {"weight": np.full(MANY, step, np.float32)}, {})
        path = tensors_of(store, step)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if cached(path) > 0.1:
            pytest.skip("the temporary files of this machine are in memory, from which nothing is read ahead")
    return store


def tensors_of(store: DirectoryStore, step: int) -> Path:
    return store.path / shard_name(step, 0, 1)


def cached(path: Path) -> float:
    """The part of a file that is in the system's cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return resident(mapped)


def resident(mapped: mmap.mmap) -> float:
    """The part of mapped memory that is in the system's cache."""
    memory = np.frombuffer(mapped, np.uint8)
    pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mincore(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(pages.ctypes.data)
    )
    del memory  # or the mapping could not be closed
    assert done == 0, os.strerror(ctypes.get_errno())
    return float((pages & 1).mean())


def wait_until_cached(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while cached(path) < 1.0:
        assert time.monotonic() < deadline, f"only {cached(path):.0%} of {path} is in the cache"
        time.sleep(0.005)


def wait_until_over() -> None:
    for thread in threading.enumerate():
        if thread.name == "holdfast-ahead":
            thread.join(DEADLINE)
            assert not thread.is_alive()


def test_the_newest_snapshot_is_read_ahead_and_no_other(store: DirectoryStore) -> None:
    read_ahead(store)
    wait_until_cached(tensors_of(store, 2))
    assert cached(tensors_of(store, 1)) < 0.1


def test_the_first_rank_of_a_node_reads_ahead_before_its_script_has_a_model(
    store: DirectoryStore, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    begun = attempt.begin(on_disk, join(DEADLINE), RunConfig(script="train.py", seed=0))
    wait_until_cached(tensors_of(store, 2))
    begun.record.close()


def test_what_cannot_be_read_ahead_is_left_to_the_reader_proper(store: DirectoryStore) -> None:
    path = tensors_of(store, 2)
    path.unlink()
    os.mkfifo(path)
    read_ahead(store)
    read_ahead(DirectoryStore(store.path / "nowhere"))
    wait_until_over()
    with pytest.raises(Corrupt, match="a named pipe"):
        snapshot.load(store, 2)


def test_no_more_is_read_ahead_than_was_committed_whatever_the_file_has(store: DirectoryStore) -> None:
    path = tensors_of(store, 2)
    committed = path.stat().st_size
    os.truncate(path, 1 << 40)  # a terabyte of nothing, which costs a stranger nothing
    read_ahead(store)
    wait_until_over()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 2 * committed, access=mmap.ACCESS_READ) as mapped:
        assert resident(mapped) < 0.7
    with pytest.raises(Corrupt, match="bytes"):
        snapshot.load(store, 2)


def test_a_snapshot_for_which_there_is_no_memory_is_not_read_ahead(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.memory.available", lambda: 1 << 20)
    read_ahead(store)
    wait_until_over()
    assert cached(tensors_of(store, 2)) < 0.1
