"""Snapshots: what is saved comes back exactly, and what is damaged is never used."""

import errno
import logging
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint import manifest, retention, scrub, snapshot
from holdfast.checkpoint.digest import FORMAT, seal
from holdfast.checkpoint.store import DirectoryStore, Reader, Store, refusal
from holdfast.errors import BadInput, CommitConflict, Corrupt, FutureVersion, NoSnapshot, StorageFailed
from snapshots import STEP_FILES, damage, draft_of, put_byte, resume, same, saved, tensors_of, written

# Saving and loading.


def test_a_snapshot_comes_back_exactly_from_every_store(store: Store) -> None:
    manifest = snapshot.save(store, 50, tensors_of(50), {"lr": 0.1}, epoch=2, cursor=7, world=4, config="abc")
    back = snapshot.load(store, 50)
    assert same(back.tensors, tensors_of(50))
    assert back.extra == {"lr": 0.1}
    assert back.manifest == manifest
    assert (back.step, manifest.epoch, manifest.cursor, manifest.world, manifest.config) == (50, 2, 7, 4, "abc")
    assert store.names() == ["latest.json", *sorted(f"step-00000050/{name}" for name in STEP_FILES)]


@pytest.mark.parametrize("extra", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": {1}}])
def test_an_extra_that_json_would_change_is_refused(tmp_path: Path, extra: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="flatten"):
        snapshot.save(DirectoryStore(tmp_path), 1, {}, extra)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        snapshot.save(DirectoryStore(tmp_path), -1, {}, {})


# Committing.


def test_a_good_snapshot_is_never_replaced(store: Store) -> None:
    saved(store, 1)
    with pytest.raises(CommitConflict, match="step 1"):
        snapshot.save(store, 1, tensors_of(2), {})
    assert same(snapshot.load(store, 1).tensors, tensors_of(1))


def test_a_corrupt_snapshot_of_the_same_step_is_replaced(store: Store) -> None:
    saved(store, 1)
    damage(store, "step-00000001/extra.json", b"{}")
    saved(store, 1)
    assert same(snapshot.newest(store).tensors, tensors_of(1))


class ForgetfulStore(DirectoryStore):
    """A store whose answer to a successful commit is lost, so that its client tries again."""

    def create(self, name, parts):  # type: ignore[no-untyped-def]
        parts = list(parts)
        super().create(name, parts)
        super().create(name, parts)


def test_a_retried_commit_that_meets_itself_succeeds(tmp_path: Path) -> None:
    store = saved(ForgetfulStore(tmp_path), 1)
    assert snapshot.newest(store).step == 1


def test_a_draft_that_is_committed_again_meets_itself_and_another_one_a_conflict(store: Store) -> None:
    draft = draft_of(1, tensors_of(1), {"lr": 0.1}, epoch=2)
    shards = written(store, 1, tensors_of(1))
    first = snapshot.commit(store, draft, shards)
    names = store.names()
    assert snapshot.commit(store, draft, shards) == first
    assert store.names() == names
    assert manifest.missing(store, first) == []
    with pytest.raises(CommitConflict, match="step 1"):
        snapshot.commit(store, draft_of(1, tensors_of(1), {"lr": 0.1}, epoch=2), shards)
    assert same(snapshot.load(store, 1).tensors, tensors_of(1))


def test_no_shard_file_is_written_over_that_of_a_committed_snapshot(store: Store) -> None:
    saved(store, 1)
    with pytest.raises(CommitConflict, match="step 1"):
        written(store, 1, tensors_of(2))
    assert same(snapshot.load(store, 1).tensors, tensors_of(1))


def test_a_commit_whose_extra_is_lost_writes_it_again(store: Store) -> None:
    draft, shards = draft_of(1, tensors_of(1), {}), written(store, 1, tensors_of(1))
    first = snapshot.commit(store, draft, shards)
    store.remove("step-00000001/extra.json")
    assert manifest.missing(store, first) == ["step-00000001/extra.json"]
    assert snapshot.commit(store, draft, shards) == first
    assert same(snapshot.newest(store).tensors, tensors_of(1))


def test_a_commit_by_somebody_else_in_the_meantime_is_a_conflict(tmp_path: Path) -> None:
    class Raced(DirectoryStore):
        def create(self, name, parts):  # type: ignore[no-untyped-def]
            super().create(name, [b"somebody else's"])
            super().create(name, parts)

    with pytest.raises(CommitConflict):
        saved(Raced(tmp_path), 1)


def test_a_snapshot_that_is_committed_while_leftovers_are_cleared_is_kept(tmp_path: Path) -> None:
    class Raced(DirectoryStore):
        def names(self, prefix: str = "") -> list[str]:
            listed = super().names(prefix)
            if manifest.manifest_name(1) not in listed:
                saved(DirectoryStore(tmp_path), 1)
            return listed

    manifest.clear_uncommitted(Raced(tmp_path))
    assert snapshot.newest(DirectoryStore(tmp_path)).step == 1


def test_the_next_save_clears_what_a_killed_save_left(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1)
    for name in (
        "step-00000002/shard-00000-of-00001.safetensors",
        "step-00000002/extra.json.12.tmp",
        "latest.json.34.tmp",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    assert manifest.steps(store) == [1]
    assert snapshot.newest(store).passed_over == ()
    saved(store, 3)
    assert not (tmp_path / "step-00000002").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_stops_a_save_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1)
    names = store.names()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        with pytest.raises(StorageFailed) as error:
            snapshot.save(store, 2, {"w": torch.zeros(1 << 16)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "step-00000002/shard-00000-of-00001.safetensors" in str(error.value)
    assert "\n" not in str(error.value)
    assert store.names() == names
    assert not list(tmp_path.rglob("*.tmp"))
    assert same(snapshot.newest(store).tensors, tensors_of(1))
    assert snapshot.newest(saved(store, 2)).step == 2  # room again: it goes on


# Falling back.


def test_the_newest_good_snapshot_is_found_and_what_was_passed_over_is_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    saved(store, 1, 2, 3)
    damage(store, "step-00000003/shard-00000-of-00001.safetensors", b"short")
    damage(store, "step-00000002/extra.json", None)
    with caplog.at_level(logging.WARNING):
        back = snapshot.newest(store)
    assert back.step == 1
    assert [passed.name for passed in back.passed_over] == ["step-00000003/", "step-00000002/"]
    assert "5 bytes" in back.passed_over[0].why
    assert "missing" in back.passed_over[1].why
    assert len(caplog.records) == 2


@pytest.mark.slow  # each byte of three files; test_shard_file.py flips those of a shard in the fast tests
@pytest.mark.parametrize("file", STEP_FILES)
def test_every_flipped_byte_is_detected_and_the_previous_snapshot_used(tmp_path: Path, file: str) -> None:
    store = DirectoryStore(tmp_path)
    for step in (1, 2):
        snapshot.save(store, step, {"w": torch.full((2,), step), "b": np.ones(1)}, {"step": step})
    path = tmp_path / "step-00000002" / file
    good = path.read_bytes()
    for position, byte in enumerate(good):
        put_byte(path, position, byte ^ 1 << (position % 8))
        with pytest.raises(Corrupt):
            snapshot.load(store, 2)
        back = snapshot.newest(store)
        assert back.step == 1
        assert back.extra == {"step": 1}
        assert len(back.passed_over) == 1
        assert [finding.name for finding in scrub.verify(store)] == ["step-00000002/manifest.json"]
        put_byte(path, position, byte)
    assert path.read_bytes() == good
    assert snapshot.newest(store).step == 2


@pytest.mark.parametrize("file", STEP_FILES)
@pytest.mark.parametrize("change", ["truncated", "emptied", "lengthened", "swapped"])
def test_files_of_another_length_or_of_another_step_are_detected(tmp_path: Path, file: str, change: str) -> None:
    store = saved(DirectoryStore(tmp_path), 1, 2)
    path = tmp_path / "step-00000002" / file
    good = path.read_bytes()
    other = (tmp_path / "step-00000001" / file).read_bytes()
    path.write_bytes({"truncated": good[:-1], "emptied": b"", "lengthened": good + b" ", "swapped": other}[change])
    assert snapshot.newest(store).step == 1


def test_a_missing_manifest_means_that_there_is_no_snapshot(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1, 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    assert manifest.steps(store) == [1]
    assert snapshot.newest(store).passed_over == ()
    with pytest.raises(NoSnapshot, match="step 2"):
        snapshot.load(store, 2)


@pytest.mark.parametrize("pointer", [None, b"", b"garbage", seal({"step": 77})])
def test_readers_do_without_the_pointer_to_the_latest(tmp_path: Path, pointer: bytes | None) -> None:
    store = saved(DirectoryStore(tmp_path), 1, 2)
    damage(store, "latest.json", pointer)
    assert snapshot.newest(store).step == 2
    assert snapshot.newest(saved(store, 3)).step == 3


def test_an_empty_store_or_one_with_only_bad_snapshots_has_no_snapshot(store: Store) -> None:
    with pytest.raises(NoSnapshot, match="none at all"):
        snapshot.newest(store)
    saved(store, 1)
    damage(store, "step-00000001/extra.json", b"")
    with pytest.raises(NoSnapshot, match=r"extra\.json"):
        snapshot.newest(store)


def test_a_future_format_asks_for_an_upgrade_rather_than_falling_back(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1)
    damage(store, "step-00000002/manifest.json", seal({"format": FORMAT + 1, "new": "fields"}))
    with pytest.raises(FutureVersion, match="upgrade"):
        snapshot.newest(store)
    assert "upgrade" in scrub.verify(store)[0].why


def test_a_manifest_that_lacks_fields_or_names_other_files_is_corrupt(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1)
    good = {"length": 1, "xxh3": "0" * 32}
    pair = [1, "0" * 32]
    whole = {"epoch": 0, "cursor": 0, "world": 1, "config": "", "saved": 0.0, "step": 1, "extra": good}
    for record in (
        {"step": 1},
        whole,
        {**whole, "shards": []},
        {**whole, "shards": [1]},
        {**whole, "shards": {"../../secret": pair}},
        {**whole, "shards": [[1, "0"]]},
        {**whole, "shards": [[*pair, "../../secret"]]},
        {**whole, "shards": [pair], "extra": pair},
        {**whole, "shards": [pair], "payloads": {"../../secret": good}},
    ):
        damage(store, "step-00000001/manifest.json", seal(record))
        with pytest.raises(Corrupt):
            snapshot.load(store, 1)


# Keeping.


def test_only_the_last_snapshots_are_kept(store: Store) -> None:
    saved(store, 1, 2, 3, 4)
    assert retention.keep_last(store, 2) == [1, 2]
    assert manifest.steps(store) == [3, 4]
    assert not store.names("step-00000001")
    assert retention.keep_last(store, 5) == []


def test_the_newest_good_snapshot_is_kept_however_old(store: Store) -> None:
    saved(store, 1, 2, 3, 4)
    for step in (3, 4):
        damage(store, f"step-0000000{step}/extra.json", b"{}")
    assert retention.keep_last(store, 1) == [1, 3]
    assert snapshot.newest(store).step == 2


def test_removal_takes_the_manifest_first(tmp_path: Path) -> None:
    removed: list[str] = []

    class Recording(DirectoryStore):
        def remove(self, name: str) -> None:
            removed.append(name)
            super().remove(name)

    store = saved(Recording(tmp_path), 1, 2)
    retention.keep_last(store, 1)
    assert removed[0] == "step-00000001/manifest.json"
    assert len(removed) == 3


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        retention.keep_last(DirectoryStore(tmp_path), 0)


# Reading what the storage refuses.


class Unreadable(DirectoryStore):
    """A store that refuses to read each of these names a number of times, as a disk does with a bad sector."""

    def __init__(self, path: Path, *names: str, times: int = 1 << 30) -> None:
        super().__init__(path)
        self.left = dict.fromkeys(names, times)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        if self.left.get(name, 0):
            self.left[name] -= 1
            raise refusal("read", self.path / name, OSError(errno.EIO, "Input/output error"))
        with super().open(name) as reader:
            yield reader


@pytest.mark.parametrize("file", STEP_FILES)
def test_a_read_that_is_refused_for_a_while_is_tried_again(tmp_path: Path, file: str) -> None:
    saved(DirectoryStore(tmp_path), 1, 2)
    store = Unreadable(tmp_path, f"step-00000002/{file}", times=2)
    back = snapshot.newest(store, backoff=(0.0, 0.0))
    assert (back.step, back.passed_over) == (2, ())


@pytest.mark.parametrize("file", STEP_FILES)
def test_a_snapshot_that_cannot_be_read_is_passed_over_like_a_corrupt_one(tmp_path: Path, file: str) -> None:
    saved(DirectoryStore(tmp_path), 1, 2, 3)
    store = Unreadable(tmp_path, f"step-00000003/{file}")
    back = snapshot.newest(store, backoff=(0.0,))
    assert back.step == 2
    assert [passed.name for passed in back.passed_over] == ["step-00000003/"]
    assert "Input/output error" in back.passed_over[0].why
    assert manifest.steps(store) == [1, 2, 3]  # a reader changes nothing
    assert not snapshot.is_good(store, 3)
    assert [finding.name for finding in scrub.verify(store)] == ["step-00000003/manifest.json"]
    assert retention.keep_last(store, 1) == [1]  # the newest good one stays


def test_where_nothing_good_is_left_and_something_is_only_unreadable_nothing_is_begun_anew(tmp_path: Path) -> None:
    saved(DirectoryStore(tmp_path), 1, 2)
    damage(DirectoryStore(tmp_path), "step-00000001/extra.json", b"")
    store = Unreadable(tmp_path, "step-00000002/shard-00000-of-00001.safetensors")
    names = store.names()
    for look in (lambda store: snapshot.newest(store, backoff=()), resume):
        with pytest.raises(StorageFailed, match="Input/output error") as error:
            look(store)
        assert "\n" not in str(error.value)
    assert retention.keep_last(store, 1) == []  # nothing goes while none is known to be good
    assert store.names() == names
    assert snapshot.newest(DirectoryStore(tmp_path)).step == 2  # and here it is again


def test_a_storage_that_does_not_answer_is_not_an_empty_store(tmp_path: Path) -> None:
    class Away(DirectoryStore):
        def names(self, prefix: str = "") -> list[str]:
            raise refusal("list", self.path, OSError(errno.EACCES, "Permission denied"))

    for look in (snapshot.newest, resume):
        with pytest.raises(StorageFailed, match="Permission denied"):
            look(Away(tmp_path))


def test_what_a_run_passes_over_is_set_aside_and_never_comes_back(tmp_path: Path) -> None:
    saved(DirectoryStore(tmp_path), 1, 2, 3)
    damage(DirectoryStore(tmp_path), "step-00000003/extra.json", b"")
    store = Unreadable(tmp_path, "step-00000002/manifest.json")
    found, passed_over = resume(store)
    assert found is not None
    assert found.step == 1
    assert [passed.name for passed in passed_over] == ["step-00000003/", "step-00000002/"]

    readable = DirectoryStore(tmp_path)
    assert manifest.steps(readable) == [1]
    assert retention.aside(readable) == ["set-aside-00000002-0", "set-aside-00000003-0"]
    assert scrub.verify(readable) == []
    assert scrub.inspect(readable).set_aside == ("set-aside-00000002-0", "set-aside-00000003-0")
    saved(readable, 2)
    assert snapshot.newest(readable).step == 2


def test_what_is_set_aside_is_kept_on_every_store_and_a_step_can_be_set_aside_twice(store: Store) -> None:
    for _ in range(2):
        saved(store, 1)
        damage(store, "step-00000001/extra.json", b"{}")
        found, passed_over = resume(store)
        assert found is None
        assert len(passed_over) == 1
    assert retention.aside(store) == ["set-aside-00000001-0", "set-aside-00000001-1"]
    assert len(store.names("set-aside-")) == 6
    assert manifest.steps(store) == []
    retention.tidy(store, 1)
    assert retention.aside(store) == ["set-aside-00000001-1"]


def test_an_empty_store_gives_a_run_nothing_to_resume(store: Store) -> None:
    assert resume(store) == (None, ())


FORBIDDEN = """
import os, sys
from pathlib import Path
import numpy as np
from holdfast.checkpoint import manifest, retention, scrub, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import StorageFailed
def resume():
    return retention.resume(store, lambda step: snapshot.load(store, step))
if os.geteuid() == 0:
    os.setegid(65534); os.seteuid(65534)  # root may read anything
place = Path(sys.argv[1]) / "store"
store = DirectoryStore(place)
for step in (1, 2, 3, 4):
    snapshot.save(store, step, {"w": np.zeros(3)}, {})
(place / "step-00000004").chmod(0)
(place / "step-00000003" / "shard-00000-of-00001.safetensors").chmod(0)
assert not snapshot.is_good(store, 3)
print([finding.name for finding in scrub.verify(store)])
found, passed_over = resume()
print(found.step, [each.name for each in passed_over], manifest.steps(store), retention.aside(store))
(place / "step-00000001").chmod(0)
(place / "step-00000002").chmod(0)
try:
    resume()
except StorageFailed as error:
    print("Permission denied" in str(error))
place.chmod(0)
try:
    resume()
except StorageFailed as error:
    print("Permission denied" in str(error))
for path in (place, *place.parent.glob("store/*")):
    path.chmod(0o755)
"""


def test_files_and_folders_that_may_not_be_read_are_passed_over_and_set_aside() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not in tmp_path, whose parents other users may not enter
        Path(folder).chmod(0o777)
        child = subprocess.run(
            [sys.executable, "-c", FORBIDDEN, folder], capture_output=True, text=True, timeout=60, check=False
        )
        assert child.stdout.splitlines() == [
            "['step-00000003/manifest.json', 'step-00000004']",
            "2 ['step-00000004/', 'step-00000003/'] [1, 2] ['set-aside-00000003-0', 'set-aside-00000004-0']",
            "True",
            "True",
        ], child.stderr


# What killed runs left.


def test_a_run_clears_away_at_its_start_what_killed_ones_left(store: Store) -> None:
    saved(store, 1, 2, 3, 4)
    store.put("step-00000007/shard-00000-of-00001.safetensors", [b"half a save"])
    retention.tidy(store, 2, trusted=4)
    assert manifest.steps(store) == [3, 4]
    assert {name.split("/")[0] for name in store.names()} == {"step-00000003", "step-00000004", "latest.json"}
    retention.tidy(store, 2)
    assert manifest.steps(store) == [3, 4]


def test_empty_folders_and_unfinished_files_are_swept(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1)
    for name in ("step-00000002", "step-00000003/inner/most", "set-aside-00000004-0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step-00000002" / "extra.json.12.tmp").write_bytes(b"half")
    (tmp_path / "mine").mkdir()
    retention.tidy(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "mine", "step-00000001"]


def test_a_snapshot_of_many_ranks_is_removed_with_its_manifest_first(tmp_path: Path) -> None:
    store = saved(DirectoryStore(tmp_path), 1, 2)
    for rank in range(3 * manifest.AT_ONCE):
        store.put(f"step-00000001/extra-{rank:05d}.bin", [b"x"])
    manifest.remove(store, 1)
    assert store.names("step-00000001") == []
    assert snapshot.newest(store).step == 2


def test_what_cannot_be_cleared_away_does_not_stop_a_run(tmp_path: Path) -> None:
    class Sticky(DirectoryStore):
        def remove(self, name: str) -> None:
            raise refusal("remove", name, OSError(errno.EIO, "Input/output error"))

    store = Sticky(tmp_path)
    saved(store, 1, 2, 3)
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "extra.json").write_bytes(b"half")
    retention.tidy(store, 1)
    assert snapshot.newest(store).step == 3


@pytest.mark.parametrize("name", ["position", "layout"])
def test_an_extra_has_none_of_the_keys_of_the_snapshot_itself(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name}.*reserved"):
        draft_of(1, {}, {name: {}})
