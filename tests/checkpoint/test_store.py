"""Every Store passes one suite; what only a directory promises comes after it."""

import errno
import fcntl
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint import objects
from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.place import open_store, store_for
from holdfast.checkpoint.store import DirectoryStore, Store, read
from holdfast.errors import BadInput, CommitConflict, NotAStore, StorageFailed
from stores import broken_off, one_line


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    """Here a directory is one on a disk: what the store asks of a file system is asked of a real one."""
    return on_disk


# Every store.


def test_what_is_put_is_read_back(store: Store) -> None:
    store.put("a/b/value", [b"one", memoryview(b"two"), b""])
    assert read(store, "a/b/value") == b"onetwo"


def test_an_empty_value_is_a_value(store: Store) -> None:
    store.put("nothing", [])
    assert read(store, "nothing") == b""
    assert store.names() == ["nothing"]


def test_put_replaces_the_whole_value(store: Store) -> None:
    store.put("value", [b"a long old value"])
    store.put("value", [b"new"])
    assert read(store, "value") == b"new"


def test_a_name_is_created_only_once(store: Store) -> None:
    store.create("commit", [b"first"])
    with pytest.raises(CommitConflict) as error:
        store.create("commit", [b"second"])
    assert "commit" in one_line(error)
    assert read(store, "commit") == b"first"


def test_of_many_writers_that_create_one_name_exactly_one_succeeds(store: Store) -> None:
    # fsspec's memory looks and then writes: it serves one thread, and no two processes can share it.
    at_once = 1 if str(store).startswith("memory:") else 8

    def attempt(number: int) -> int | None:
        try:
            store.create("race", [b"%d" % number])
        except CommitConflict:
            return None
        return number

    with ThreadPoolExecutor(at_once) as pool:
        winners = [number for number in pool.map(attempt, range(8)) if number is not None]
    assert len(winners) == 1
    assert read(store, "race") == b"%d" % winners[0]


def test_names_are_listed_in_order_and_by_prefix(store: Store) -> None:
    for name in ("b/2", "a", "b/1", "bc"):
        store.put(name, [b"x"])
    assert store.names() == ["a", "b/1", "b/2", "bc"]
    assert store.names("b/") == ["b/1", "b/2"]
    assert store.names("nothing-like-it") == []


def test_an_empty_store_has_no_names(store: Store) -> None:
    assert store.names() == []


def test_a_removed_value_is_gone_and_removing_it_again_is_no_error(store: Store) -> None:
    store.put("folder/value", [b"x"])
    store.remove("folder/value")
    store.remove("folder/value")
    assert store.names() == []
    with pytest.raises(FileNotFoundError), store.open("folder/value"):
        pass


def test_reading_in_small_pieces_gives_all_bytes_in_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    value = bytes(range(100))
    store.put("value", [value])
    monkeypatch.setattr(objects, "BLOCK", 10)
    with store.open("value") as reader:
        assert reader.length == 100
        pieces, room = [], memoryview(bytearray(7))
        while count := reader.readinto(room):
            pieces.append(bytes(room[:count]))
    assert b"".join(pieces) == value


def test_a_write_that_breaks_off_leaves_the_old_value_and_nothing_else(store: Store) -> None:
    store.put("value", [b"old"])
    with pytest.raises((RuntimeError, StorageFailed)):
        store.put("value", broken_off(b"half of the new"))
    assert read(store, "value") == b"old"
    assert store.names() == ["value"]


def test_names_that_would_leave_the_store_are_refused(store: Store) -> None:
    for name in ("../outside", "/absolute", "", "a//b", "a/../../b", "half.tmp"):
        with pytest.raises(BadInput):
            store.put(name, [b"x"])


# Opening what must already be there.


def test_opening_a_missing_directory_a_file_or_an_empty_url_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "missing", tmp_path / "file", "memory://nothing-here"):
        with pytest.raises(NotAStore) as error:
            open_store(place)
        assert str(place) in one_line(error)


def test_a_store_is_opened_by_path_or_by_url(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put("a", [b"1"])
    ObjectStore("memory://opened").put("a", [b"2"])
    assert read(open_store(tmp_path), "a") == b"1"
    assert read(open_store(str(tmp_path)), "a") == b"1"
    assert read(open_store("memory://opened"), "a") == b"2"


# A place to save to.


def test_a_directory_a_file_url_and_a_bucket_can_be_saved_to(tmp_path: Path, s3: dict[str, object]) -> None:
    bucket = f"s3://holdfast/{uuid.uuid4().hex}"
    for place, options in (
        (tmp_path / "a" / "b", {}),
        (str(tmp_path / "c"), {}),
        (f"file://{tmp_path}/with%20space", {}),
        (bucket, s3),
    ):
        store = store_for(place, **options)  # type: ignore[arg-type]
        assert store.names() == []  # nothing is left of having tried
        store.put("value", [b"x"])
        assert read(open_store(place, **options), "value") == b"x"  # type: ignore[arg-type]
    assert (tmp_path / "with space" / "value").exists()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("gopher://somewhere/run", "gopher:// stores are unknown"),
        ("simplecache::s3://holdfast/run", "stores are unknown"),
        ("file://elsewhere/run", "is not a path on this machine"),
        ("file://", "is not a path"),
        ("memory://run", "a run has several"),
    ],
)
def test_a_place_that_no_run_can_save_to_is_refused_in_one_line(place: str, says: str) -> None:
    with pytest.raises(BadInput) as error:
        store_for(place)
    assert says in one_line(error)


def test_a_kind_of_store_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not there
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for way in (store_for, open_store):
        with pytest.raises(BadInput, match=r"pip install 'holdfast\[s3\]'") as error:
            way("s3://holdfast/run")
        one_line(error)


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path, s3: dict[str, object]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for place, options in (
        (tmp_path / "file" / "run", {}),
        ("/proc/run", {}),
        (tmp_path / "dangling", {}),
        ("s3://nowhere/run", s3),
    ):
        with pytest.raises(StorageFailed) as error:
            store_for(place, **options)  # type: ignore[arg-type]
        assert str(place) in one_line(error)


def test_what_a_killed_try_left_in_a_place_is_cleared_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "probe-0123").write_text("x")
    assert store_for(tmp_path).names() == []


# Moving, and what killed writers left.


def test_a_folder_moves_whole_and_only_to_a_new_name(store: Store) -> None:
    for name in ("a/1", "a/2", "ab/1", "c/1"):
        store.put(name, [name.encode()])
    store.move("a", "b")
    assert store.names() == ["ab/1", "b/1", "b/2", "c/1"]
    assert read(store, "b/2") == b"a/2"
    with pytest.raises(CommitConflict):
        store.move("b", "c")
    store.move("gone", "d")
    assert store.names() == ["ab/1", "b/1", "b/2", "c/1"]


# Directories.


def test_leftovers_of_killed_writers_have_no_name_and_are_swept(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("step-1/value", [b"x"])
    leftover = tmp_path / "step-1" / "other.0123.tmp"
    leftover.write_bytes(b"half")
    assert store.names() == ["step-1/value"]
    store.sweep("other")
    assert leftover.exists()
    store.sweep("step-")
    assert not leftover.exists()


def test_a_filesystem_without_hard_links_still_refuses_a_taken_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    store = DirectoryStore(tmp_path)
    store.create("commit", [b"first"])
    with pytest.raises(CommitConflict):
        store.create("commit", [b"second"])
    assert read(store, "commit") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["commit"]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct writes")
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("length", [(1 << 20) - 1, 1 << 20, (3 << 20) + 12345])
def test_memory_that_begins_on_a_page_is_written_as_it_lies_wherever_the_filesystem_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, refused: bool
) -> None:
    memory = mmap.mmap(-1, length)
    memory[:] = random.Random(length).randbytes(length)
    original, direct = os.write, []

    def write(descriptor: int, data: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and refused:
            raise OSError(errno.EINVAL, "this filesystem cannot")
        count = original(descriptor, data)
        direct.append(count if is_direct else 0)
        return count

    monkeypatch.setattr(os, "write", write)
    store = DirectoryStore(tmp_path)
    store.put("whole", [memoryview(memory)])
    assert read(store, "whole") == memory[:]
    assert sum(direct) % mmap.PAGESIZE == 0
    store.put("after an odd start", [b"odd", memoryview(memory), b"end"])
    assert read(store, "after an odd start") == b"odd" + memory[:] + b"end"
    if length < 1 << 20 or refused:
        assert not any(direct)


def test_a_file_in_place_of_the_directory_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageFailed) as error:
        DirectoryStore(tmp_path / "file").put("value", [b"x"])
    assert "cannot write" in one_line(error)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (errno.EIO, "try again")]
)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_refusal_at_any_call_keeps_the_old_value_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, advice: str
) -> None:
    store = DirectoryStore(tmp_path)
    store.put("value", [b"old"])

    def refused(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refused)
        with pytest.raises(StorageFailed) as error:
            store.put("value", [b"new"])
    assert os.strerror(number) in one_line(error)
    assert advice in str(error.value)
    assert read(store, "value") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["value"]


def test_a_file_size_limit_stops_a_real_write_and_keeps_the_old_value(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("value", [b"old"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with pytest.raises(StorageFailed) as error:
            store.put("value", [bytes(1 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "File too large" in one_line(error)
    assert read(store, "value") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["value"]


UNPRIVILEGED = """
import os, sys
from holdfast.errors import StorageFailed
from holdfast.checkpoint.store import DirectoryStore, read
if os.geteuid() == 0:
    os.setegid(65534); os.seteuid(65534)  # root may write anywhere
store = DirectoryStore(sys.argv[1])
assert read(store, "value") == b"old"
try:
    store.put("value", [b"new"])
except StorageFailed as error:
    print(error)
"""


def test_a_read_only_directory_can_be_read_and_refuses_writes_in_one_line() -> None:
    # Not in tmp_path, whose parents other users may not enter.
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        store = DirectoryStore(place)
        store.put("value", [b"old"])
        place.chmod(0o555)
        child = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, folder], capture_output=True, text=True, timeout=60, check=True
        )
        place.chmod(0o755)
        assert "Permission denied" in child.stdout
        assert child.stdout.count("\n") == 1
        assert read(store, "value") == b"old"
        assert [path.name for path in place.iterdir()] == ["value"]
