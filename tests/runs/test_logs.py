"""What workers printed, read as plain text."""

from pathlib import Path

from holdfast.runs import logs
from holdfast.runs.logs import RANKS, WorkerLog, read_rank_changes


def log_with(folder: Path, content: bytes) -> WorkerLog:
    path = folder / "rank-0.out"
    path.write_bytes(content)
    return WorkerLog(path, "rank 0", "out", 1)


def test_a_log_is_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    log = log_with(tmp_path, b"one\ntwo\nthr")
    assert list(log.lines()) == [("one", 4), ("two", 8), ("thr", 11)]
    assert list(log.lines(8)) == []
    assert list(log_with(tmp_path, b"one\ntwo\nthree\n").lines(8)) == [("three", 14)]


def test_only_the_final_text_of_a_progress_bar_is_returned_without_control_codes(tmp_path: Path) -> None:
    log = log_with(tmp_path, b" 10%\r 50%\r\x1b[32m100%\x1b[0m\r\nnext\n")
    assert [text for text, _ in log.lines()] == ["100%", "next"]


def test_a_line_without_an_end_is_read_in_pieces(tmp_path: Path) -> None:
    log = log_with(tmp_path, b"x" * (2 * logs.LONGEST + 1))
    assert [len(text) for text, _ in log.lines()] == [logs.LONGEST, logs.LONGEST, 1]


def test_hostile_lines_in_the_list_of_changed_ranks_are_left_out(tmp_path: Path) -> None:
    lines = ["[1e400, 2]", "[null]", "[[1], 2]", "{}", "[" * 100_000, '[3, "worker-5"]']
    (tmp_path / RANKS).write_text("\n".join(lines))
    assert read_rank_changes(tmp_path) == [(3, "worker-5")]
