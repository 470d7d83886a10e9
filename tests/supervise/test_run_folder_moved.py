"""A folder that is moved or removed while its run trains is noticed, and not created again."""

from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import StorageFailed
from holdfast.runs.lock import FolderWatch


def test_a_folder_is_gone_when_it_is_moved_and_when_another_takes_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    watch = FolderWatch(folder)
    assert not watch.is_gone(now=True)
    folder.rename(tmp_path / "moved")
    assert watch.is_gone(now=True)
    folder.mkdir()
    assert watch.is_gone(now=True)


def test_the_folder_is_only_looked_at_now_and_then(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path / "run")
    assert not watch.is_gone(now=True)
    (tmp_path / "run").mkdir()
    assert not watch.is_gone()


def test_a_store_does_not_create_the_folder_of_its_run_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store = DirectoryStore(tmp_path / "run" / "checkpoints")
    store.put("a/b", [b"1"])
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(StorageFailed, match=r"run is gone\. Was it moved or removed"):
        store.put("a/c", [b"2"])
    assert not (tmp_path / "run").exists()
    DirectoryStore(tmp_path / "new" / "checkpoints").put("a", [b"1"])
