"""A history file is followed while it grows."""

import json
from pathlib import Path

import pytest

from holdfast.events import Detect, Preempt, line
from holdfast.history import follow
from holdfast.history.follow import GrowingFile
from holdfast.history.log import LONGEST


def test_an_event_longer_than_one_read_and_the_events_after_it_are_returned(tmp_path: Path) -> None:
    path, message = tmp_path / "supervisor.jsonl", "x" * (follow.MOST + 1)
    path.write_bytes(line(1.0, "supervisor", Detect(1, 0, 0, "signal", message)) + line(2.0, "supervisor", Preempt(1)))
    file = GrowingFile(path, from_start=True)
    assert [event.what for _ in range(2) for event in file.new()] == [Detect(1, 0, 0, "signal", message), Preempt(1)]


def test_a_line_that_no_writer_writes_is_skipped_without_hiding_the_next(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.jsonl"
    path.write_bytes(b"x" * (2 * LONGEST) + b"\n" + line(2.0, "supervisor", Preempt(1)))
    file = GrowingFile(path, from_start=True)
    assert [event.what for _ in range(3) for event in file.new()] == [Preempt(1)]


@pytest.mark.parametrize("cut", [1, 20])
def test_an_unfinished_line_is_left_for_the_next_call(tmp_path: Path, cut: int) -> None:
    path, whole = tmp_path / "rank-0.jsonl", line(1.0, "rank-0", Preempt(1))
    path.write_bytes(whole + whole[:-cut])
    file = GrowingFile(path, from_start=True)
    assert len(file.lines()) == 1
    assert file.lines() == []
    path.write_bytes(whole + whole)
    assert [json.loads(text)["event"] for text in file.lines()] == ["preempt"]
