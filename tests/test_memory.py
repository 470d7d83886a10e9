"""The memory that is available, on a machine and in a container with a limit."""

from pathlib import Path

import pytest

from holdfast import memory
from holdfast.errors import BadInput

GIB = 1 << 30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container with a limit of 3 GiB, whose processes use 1 GiB, beside 1 GiB of page cache."""
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nfile {GIB}\n")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {64 * GIB // 1024} kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    return tmp_path


def test_what_other_processes_of_the_container_use_is_not_available(container: Path) -> None:
    assert memory.available() == 2 * GIB


def test_without_a_limit_the_memory_of_the_machine_is_available(container: Path) -> None:
    (container / "memory.max").write_text("max\n")
    assert memory.available() == 64 * GIB


def test_more_processes_than_fit_into_the_container_are_refused(container: Path) -> None:
    memory.require_room(3, GIB, "workers", "start fewer.")
    with pytest.raises(BadInput, match="4 workers need 4 GiB of memory or more, and this machine has 3"):
        memory.require_room(4, GIB, "workers", "start fewer.")
