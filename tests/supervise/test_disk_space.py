"""A full disk is waited for, until there is space for another snapshot or the deadline has passed."""

import shutil
from pathlib import Path

import pytest

from holdfast.supervise import disk_space
from holdfast.supervise.disk_space import LEAST_ROOM, LOOKS, WAITS, DiskSpace, has_room, needed

FULL = ["rank 0: cannot write step-00000005/shard-00000-of-00001.safetensors: No space left on device"]


def test_only_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    assert not DiskSpace([tmp_path], said.append).is_awaited(["Permission denied"], 0.0)
    assert not said


def test_the_wait_ends_when_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    space = DiskSpace([tmp_path], said.append)
    monkeypatch.setattr(disk_space, "has_room", lambda *_: False)
    assert space.is_awaited(FULL, 1.0)
    assert space.is_awaited(FULL, 1.0 + LOOKS)
    monkeypatch.setattr(disk_space, "has_room", lambda *_: True)
    assert not space.is_awaited(FULL, 1.0 + 2 * LOOKS)
    assert said == ["the disk is full: waiting up to 10 minutes for 16 MB to become free"]


def test_the_wait_ends_at_its_deadline_and_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = DiskSpace([tmp_path], lambda _: None)
    monkeypatch.setattr(disk_space, "has_room", lambda *_: False)
    assert space.is_awaited(FULL, 1.0)
    assert not space.is_awaited(FULL, 1.0 + WAITS)
    assert not space.is_awaited(FULL, 2.0 + WAITS)


def test_the_space_of_the_largest_snapshot_is_needed(tmp_path: Path) -> None:
    for step, size in (("step-00000005", 10), ("step-00000010", 30)):
        (tmp_path / step).mkdir()
        (tmp_path / step / "shard-00000-of-00001.safetensors").write_bytes(b"0" * size)
    assert needed(tmp_path) == LEAST_ROOM + 30
    assert has_room(tmp_path, 1)
    assert not has_room(tmp_path, 2 * shutil.disk_usage(tmp_path).total)
