"""Sharing out: whatever goes wrong ends it at once, and no process is left waiting to be heard."""

import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest

from holdfast.errors import BadInput, StorageFailed
from holdfast.lab.simulate.pools import Report, map_in_processes


def count(item: int, tell: Report) -> int:
    """Tells more than a pipe holds."""
    if item < 0:
        raise BadInput("a negative item")
    for number in range(5_000):
        tell(item, number)
    return item


def test_every_item_is_processed_and_every_report_arrives() -> None:
    heard: list[tuple[int, int]] = []
    assert map_in_processes(count, [3, 1, 2], jobs=2, on_report=lambda *what: heard.append(what)) == [3, 1, 2]
    assert sorted(heard) == [(item, number) for item in (1, 2, 3) for number in range(5_000)]


def test_an_error_in_on_report_ends_the_work_and_all_processes() -> None:
    def full(item: int, number: int) -> None:
        raise StorageFailed("no space left")

    with pytest.raises(StorageFailed, match="no space left"):
        map_in_processes(count, list(range(8)), jobs=2, on_report=full)
    assert not active_children()


def test_the_first_item_that_fails_ends_the_work() -> None:
    with pytest.raises(BadInput, match="a negative item"):
        map_in_processes(count, [-1, *range(8)], jobs=2, on_report=lambda *what: None)
    assert not active_children()


UNGUARDED = """
from holdfast.lab.simulate.pools import map_in_processes

def work(item, tell):
    return item

print(map_in_processes(work, [1, 2, 3], jobs=2, on_report=print))
"""


def test_a_script_without_a_main_guard_gets_an_error_that_names_the_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert (
        ended.stderr.strip().splitlines()[-1].endswith('so the script must do that below `if __name__ == "__main__":`.')
    )
    assert "bootstrapping" not in ended.stderr  # what the processes themselves would say of it


def test_work_that_cannot_be_sent_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"cannot be sent to other processes .* or use one process"):
        map_in_processes(lambda item, tell: item, [1, 2], jobs=2, on_report=lambda *what: None)
    assert not active_children()
