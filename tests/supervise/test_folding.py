"""The supervisor folds histories that have grown, and never waits for it while the workers train."""

import time
from functools import cache
from pathlib import Path

import pytest

from holdfast.events import Attempt, Commit, Open, Plan, Seconds, Step, line
from holdfast.history.folded import folded
from holdfast.history.log import read_history
from holdfast.sampler.digest import Samples
from holdfast.supervise.folding import PAUSE, HistoryFolding

DEADLINE = 60.0


@cache
def lines() -> bytes:
    """Return the lines of a rank that has trained 4,000 steps and saved: 1.2 MB."""
    whats = [
        Open(2),
        Attempt(1, 1, 0, 7),
        Plan(1, 8000, 1, 1, 0, 4000, "blocking", "c"),
        *(Step(1, 1, 0, 0, n, n, Samples.of([n]), Seconds(0.0, 0.001, 0.0), "ab" * 16) for n in range(4000)),
        Commit(1, 4000, 1),
    ]
    return b"".join(line(1.7e9 + i / 1000, "rank-0", what) for i, what in enumerate(whats))


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """The history of a rank that has trained 4,000 steps and saved."""
    (tmp_path / "rank-0.jsonl").write_bytes(lines())
    return tmp_path


def never() -> int | None:
    raise AssertionError("the history of rank 0 says what was saved")


def look_until_folded(folding: HistoryFolding, history: Path, rank: int = 0) -> None:
    deadline, now = time.monotonic() + DEADLINE, 0.0
    while not folded(history / f"rank-{rank}.jsonl").end:
        assert time.monotonic() < deadline
        folding.look(now, [rank])
        now += PAUSE
        time.sleep(0.01)


def test_a_history_that_has_grown_is_folded_in_the_background(history: Path) -> None:
    before = read_history(history)
    folding = HistoryFolding(history, never)
    look_until_folded(folding, history)
    folding.close()
    assert read_history(history) == before


def test_the_rest_is_folded_at_the_end(history: Path) -> None:
    before, file = read_history(history), history / "rank-0.jsonl"
    folding = HistoryFolding(history, never)
    look_until_folded(folding, history)
    folding.finish(None)
    assert folded(file).lines == 4003  # all but the commit
    assert read_history(history) == before


def test_a_short_history_stays_lines(history: Path) -> None:
    file = history / "rank-0.jsonl"
    data = file.read_bytes()
    file.write_bytes(data[: data.index(b"\n", 500_000) + 1] + data.splitlines(keepends=True)[-1])
    folding = HistoryFolding(history, never)
    folding.look(0.0, None)
    folding.finish(None)
    assert not (history / "segments").exists()


def test_ranks_of_other_nodes_are_left_to_them(history: Path) -> None:
    folding = HistoryFolding(history, never)
    folding.finish([1])
    assert folded(history / "rank-0.jsonl").end == 0


def test_a_history_that_cannot_be_folded_stays_as_it_is(history: Path) -> None:
    (history / "segments").write_text("no folder")
    before = (history / "rank-0.jsonl").read_bytes()
    folding = HistoryFolding(history, never)
    folding.finish(None)
    assert (history / "rank-0.jsonl").read_bytes() == before


def test_a_node_without_rank_0_folds_up_to_the_newest_snapshot_of_the_store(history: Path) -> None:
    (history / "rank-0.jsonl").unlink()
    of_rank_5 = lines().replace(b'"rank-0"', b'"rank-5"').replace(b'"rank": 0', b'"rank": 5')
    (history / "rank-5.jsonl").write_bytes(of_rank_5)
    before = read_history(history)
    unsaved = HistoryFolding(history, lambda: None)
    unsaved.finish([5])
    assert folded(history / "rank-5.jsonl").end == 0
    folding = HistoryFolding(history, lambda: 3000)
    look_until_folded(folding, history, 5)
    folding.finish([5])
    assert folded(history / "rank-5.jsonl").lines == 3 + 3000
    assert read_history(history) == before
