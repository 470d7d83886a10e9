"""Arrays that take long to read are cached, and never confused with those of another file or reader."""

from pathlib import Path

import numpy as np
import pytest

from holdfast.workloads.fetch import WORTH, Named, kept


class Reader:
    """Counts how often it had to read."""

    def __init__(self, number: int = 1) -> None:
        self.number, self.times = number, 0

    def __call__(self) -> Named:
        self.times += 1
        return {"words": np.full(3, self.number, np.int32)}


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "archive").write_bytes(b"a" * WORTH)
    (tmp_path / "reader.py").write_text("read = 1")
    return tmp_path / "archive"


def read(archive: Path, reader: Reader) -> list[int]:
    return [int(word) for word in kept(archive, archive.with_name("reader.py"), reader)["words"]]


def test_a_file_is_read_once(archive: Path) -> None:
    reader = Reader()
    assert read(archive, reader) == read(archive, reader) == [1, 1, 1]
    assert reader.times == 1


@pytest.mark.parametrize("changed", ["archive", "reader.py"])
def test_changed_content_or_code_is_read_again(archive: Path, changed: str) -> None:
    read(archive, Reader(1))
    archive.with_name(changed).write_bytes(b"b" * WORTH)
    assert read(archive, Reader(2)) == [2, 2, 2]


def test_a_damaged_cache_entry_is_read_again(archive: Path, tmp_path: Path) -> None:
    read(archive, Reader())
    (found,) = (tmp_path / "cache" / "holdfast" / "prepared").iterdir()
    found.write_bytes(found.read_bytes()[:40])
    assert read(archive, Reader(2)) == [2, 2, 2]


def test_a_cache_that_cannot_be_written_is_done_without(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    reader = Reader()
    assert read(archive, reader) == read(archive, reader) == [1, 1, 1]
    assert reader.times == 2


def test_a_small_file_is_not_worth_keeping(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(b"small")
    read(archive, Reader())
    assert not (tmp_path / "cache").exists()
