"""History: events are appended, flushed as whole lines, and read back merged, torn lines included."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.verdicts import audit_run
from holdfast.errors import BadInput, Corrupt, FutureVersion, StorageFailed
from holdfast.events import VERSION, Commit, Done, Event, Malformed, Other, Recover, Save, Seconds, Step
from holdfast.history.log import HistoryWriter, TornLine, backwards, read_history, stream_history
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall


def ticking(start: float = 0.0, step: float = 1.0) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: start + step * next(ticks)


def kinds(path: Path) -> list[str]:
    return [event.kind for event in read_history(path).events]


def step(number: int, loss: float | None = None) -> Step:
    return Step(1, 1, 0, 0, number, number, Samples.of([1, 2]), Seconds(0.25, 0.5, 0.0), loss=loss)


def step_of(event: Event) -> int | None:
    return event.what.step if isinstance(event.what, Step) else None


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-2", clock=ticking(5.0)) as history:
        history.append(step(17, loss=0.25))
    _, event = read_history(tmp_path).events
    assert event == Event(6.0, "rank-2", step(17, loss=0.25))


def test_a_line_is_a_plain_json_object(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0", clock=ticking()) as history:
        history.append(Commit(3, 50, 4096))
    first, second = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(first) == {"event": "open", "time": 0.0, "who": "rank-0", "version": VERSION}
    commit = {"event": "commit", "time": 1.0, "who": "rank-0", "attempt": 3, "step": 50, "bytes": 4096}
    assert json.loads(second) == commit


def test_nothing_is_written_before_a_flush(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(step(1))
        assert history.path.read_bytes() == b""
        history.flush()
        assert kinds(history.path) == ["open", "step"]
        history.flush()
        assert kinds(history.path) == ["open", "step"]


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path, "rank-0")
    history.close()
    history.close()
    assert kinds(tmp_path) == ["open"]


def test_an_event_is_as_it_was_when_it_was_appended(tmp_path: Path) -> None:
    passed_over: list[dict[str, str]] = [{"name": "step-00000009/"}]
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(Recover(1, None, 0, 0, "keyed", 0.5, passed_over))
        passed_over.append({"name": "step-00000006/"})
    read = read_history(tmp_path).events[1].what
    assert isinstance(read, Recover)
    assert list(read.passed_over) == passed_over[:1]


def test_unknown_kinds_are_kept(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(Other("eclipse", {"totality": True}))
    assert read_history(tmp_path).events[1].what == Other("eclipse", {"totality": True})


def test_a_loss_that_diverged_is_written_as_null(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(step(3, loss=math.nan))
    assert read_history(tmp_path).events[1].what == step(3, loss=None)


def test_a_value_that_json_lacks_is_refused_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        for what in (Done(1, np.int64(3)), Save(1, 1, {1}, 1, Stall())):  # type: ignore[arg-type]
            with pytest.raises(BadInput, match=r"event '(done|save)' has fields that are not JSON values"):
                history.append(what)
    assert kinds(tmp_path) == ["open"]


@pytest.mark.parametrize("who", ["", "a/b", "..", ".hidden", "rank 0", "rank\n"])
def test_a_writer_whose_name_cannot_be_a_file_name_is_refused(tmp_path: Path, who: str) -> None:
    with pytest.raises(BadInput, match="cannot be the name of a history"):
        HistoryWriter(tmp_path, who)


def test_files_are_merged_in_the_order_of_time(tmp_path: Path) -> None:
    for who, start in (("rank-0", 0.0), ("rank-1", 0.5)):
        with HistoryWriter(tmp_path / "history", who, clock=ticking(start)) as history:
            for number in range(3):
                history.append(step(number))
    for path in (tmp_path, tmp_path / "history"):
        assert [event.time for event in read_history(path).events] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


@given(st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=4))
def test_a_merge_keeps_the_order_of_each_file_whatever_its_clock_did(
    tmp_path_factory: pytest.TempPathFactory, clocks: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("history")
    for rank, times in enumerate(clocks):
        with HistoryWriter(folder, f"rank-{rank}", clock=iter([0, *times]).__next__) as history:
            for number in range(len(times)):
                history.append(step(number))
    events = read_history(folder).events
    for rank, times in enumerate(clocks):
        own = [event for event in events if event.who == f"rank-{rank}" and isinstance(event.what, Step)]
        assert [step_of(event) for event in own] == list(range(len(times)))
    if all(times == sorted(times) for times in clocks):
        assert [event.time for event in events] == sorted(event.time for event in events)


def test_a_torn_last_line_is_tolerated_and_reported(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(step(1))
    with history.path.open("ab") as file:
        file.write(b'{"event": "st')
    found = read_history(tmp_path)
    assert [event.kind for event in found.events] == ["open", "step"]
    assert [(torn.path, torn.line, torn.size) for torn in found.torn] == [(history.path, 3, 13)]


@given(st.integers(0, 10_000))
def test_a_file_cut_anywhere_reads_as_its_whole_lines_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, where: int
) -> None:
    folder = tmp_path_factory.mktemp("history")
    with HistoryWriter(folder, "rank-0", clock=ticking()) as history:
        for number in range(5):
            history.append(step(number))
    whole = history.path.read_bytes()
    cut = whole[: where % (len(whole) + 1)]
    history.path.write_bytes(cut)
    left = [event.time for event in read_history(folder).events]
    with HistoryWriter(folder, "rank-0", clock=ticking(100.0)) as history:
        history.append(step(5))
    found = read_history(folder)
    assert len(left) == cut.count(b"\n")
    assert [event.time for event in found.events] == [*left, 100.0, 101.0]
    torn = len(cut) - (cut.rfind(b"\n") + 1)
    assert [t.size for t in found.torn] == ([torn] if torn else [])


def test_a_torn_line_longer_than_a_block_is_cut_off_whole(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(step(1))
    with history.path.open("ab") as file:
        file.write(b"x" * 200_000)
    HistoryWriter(tmp_path, "rank-0").close()
    assert kinds(tmp_path) == ["open", "step", "open"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{]", "it is not JSON from character 2 on"),
        (b"", "it is not JSON from character 1 on"),
        (b"[1]", "it is not a JSON object"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b'{"event": "step", "time": 1.0}', "its who is not text"),
        (b'{"event": 7, "time": 1.0, "who": "a"}', "its event is not text"),
        (b'{"event": "step", "time": "noon", "who": "a"}', "its time is not a number"),
        (
            b'{"event": "step", "time": 1' + b"0" * 400 + b', "who": "a"}',
            "its time, 100000000000, is not in seconds since 1970",
        ),
        (b'{"event": "step", "time": NaN, "who": "a"}', "it contains NaN, which is not JSON"),
        (b'{"event": "step", "time": 1.0, "who": "a", "step": 1' + b"0" * 5000 + b"}", "a number .* too many digits"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_bad_line_in_the_middle_is_an_error_that_names_file_and_line_and_says_what_is_expected(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(step(1))
    first, second = history.path.read_bytes().splitlines()
    history.path.write_bytes(b"\n".join((first, line, second, b"")))
    said = (
        rf"rank-0.jsonl, line 2, is not an event: {reason}.* one JSON object with event, time and who.* from a copy\.$"
    )
    with pytest.raises(Corrupt, match=said) as caught:
        read_history(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(Corrupt, match=f"rank-0.jsonl, byte {len(first) + 1}, is not an event: {reason}"):
        list(backwards(history.path))


def test_an_event_that_lacks_something_knows_its_line(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(step(1))
    with history.path.open("ab") as file:
        file.write(b'{"event": "done", "time": 1.0, "who": "rank-0", "attempt": 1}\n')
    what = read_history(tmp_path).events[-1].what
    assert what == Malformed("done", {"attempt": 1}, "step is missing", 3)


def test_a_history_of_a_future_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    line = {"event": "open", "time": 0.0, "who": "rank-0", "version": VERSION + 1}
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(FutureVersion, match=rf"version {VERSION + 1}.*upgrade"):
        read_history(tmp_path)


def test_a_history_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    line = {"event": "open", "time": 0.0, "who": "rank-0", "version": 1}
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(BadInput, match=r"rank-0.jsonl has version 1, which this holdfast no longer reads"):
        audit_run(tmp_path)


def test_a_place_without_a_history_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput, match="no history"):
            read_history(path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageFailed, match=r"cannot write the history .*rank-0.jsonl: No space left") as caught:
        HistoryWriter(tmp_path, "rank-0").close()
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match="cannot open the history"):
        HistoryWriter(tmp_path / "file" / "history", "rank-0")


# The kernel takes what fits under the limit and refuses the rest: a real half-written line.
FILL_THEN_FREE = """
import resource, sys
from pathlib import Path
from holdfast.errors import StorageFailed
from holdfast.events import Done
from holdfast.history.log import HistoryWriter

history = HistoryWriter(Path(sys.argv[1]), "rank-0")
history.append(Done(1, 0))
history.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (history.path.stat().st_size + 20, resource.RLIM_INFINITY))
history.append(Done(1, 1))
try:
    history.flush()
except StorageFailed as error:
    print(error)
assert history.path.read_bytes().endswith(b"\\n"), "the half-written line was cut off"
history.append(Done(1, 2))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
history.close()
"""


def test_events_that_a_full_disk_refused_are_written_once_there_is_room(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", FILL_THEN_FREE, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    assert "cannot write the history" in child.stdout
    found = read_history(tmp_path)
    assert [event.what.step for event in found.events if isinstance(event.what, Done)] == [0, 1, 2]
    assert found.torn == ()


def test_a_history_can_be_streamed_file_by_file(tmp_path: Path) -> None:
    for who in ("rank-0", "rank-1"):
        with HistoryWriter(tmp_path, who) as history:
            history.append(step(0))
    with (tmp_path / "rank-1.jsonl").open("ab") as file:
        file.write(b"{")
    torn: list[TornLine] = []
    events = [event for _, event in stream_history(tmp_path, torn)]
    assert [name for name, _ in stream_history(tmp_path, [])] == [event.who for event in events]
    whole = read_history(tmp_path)
    assert sorted(events, key=lambda event: event.time) == list(whole.events)
    assert [event.who for event in events] == ["rank-0", "rank-0", "rank-1", "rank-1"]
    assert tuple(torn) == whole.torn != ()


def test_a_line_longer_than_any_event_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    """It would hide the lines behind it."""
    with HistoryWriter(tmp_path, "rank-0", clock=ticking()) as history:
        history.append(Done(1, 7))
    os.truncate(tmp_path / "rank-0.jsonl", 6 << 30)  # sparse: it holds zeros
    with pytest.raises(Corrupt, match="line 3, is not an event: it is longer than any event"):
        read_history(tmp_path)


def test_a_path_may_be_text_and_so_may_several(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0", clock=ticking()) as history:
        history.append(step(0))
    found = read_history(tmp_path)
    assert read_history(str(tmp_path)) == read_history([str(tmp_path)]) == found
    assert audit_run(str(tmp_path)) == audit_run([str(tmp_path)]) == audit_run(tmp_path)
