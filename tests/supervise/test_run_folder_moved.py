"""A folder that is moved or removed under a run is missed, and not made anew."""

from pathlib import Path

import pytest

from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import StorageFailed
from holdfast.supervise.run_folder import Home


def test_a_folder_is_missed_when_it_is_moved_and_when_another_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    home = Home(folder)
    assert not home.is_gone(now=True)
    folder.rename(tmp_path / "moved")
    assert home.is_gone(now=True)
    folder.mkdir()
    assert home.is_gone(now=True)
    assert "was moved or removed while the run trained" in home.line


def test_between_two_looks_it_is_not_looked_at(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    assert not home.is_gone(now=True)
    (tmp_path / "run").mkdir()
    assert not home.is_gone()


def test_a_store_does_not_make_the_folder_of_its_run_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store = DirectoryStore(tmp_path / "run" / "checkpoints")
    store.put("a/b", [b"1"])
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(StorageFailed, match=r"run is gone\. Was it moved or removed"):
        store.put("a/c", [b"2"])
    assert not (tmp_path / "run").exists()
    DirectoryStore(tmp_path / "new" / "checkpoints").put("a", [b"1"])
