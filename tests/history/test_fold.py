"""Folding: a history reads the same before, after and while its lines are folded, whenever the fold is killed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast.errors import Corrupt
from holdfast.events import Attempt, Commit, Event, Open, Plan, Recover, Seconds, Step, What, line
from holdfast.history import fold as folding
from holdfast.history.fold import fold
from holdfast.history.folded import StepRun, folded, segments_in
from holdfast.history.follow import GrowingFile
from holdfast.history.log import HistoryWriter, TornLine, backwards, read_history, recall, stream_blocks, stream_history
from holdfast.runs.status import foreign_files
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan

PLAN = SamplePlan(samples=640, batch=8, epochs=20, seed=7)
STEPS = 1200
SAVED = 300  # steps between commits


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "KEPT", 1000)
    monkeypatch.setattr(folding, "MOST", 120_000)


def whats(rank: int) -> Iterator[What]:
    """The events of a rank that was restarted at step 600, after it had trained 650."""
    for attempt, start, end in ((1, 0, 650), (2, 600, STEPS)):
        yield from (Open(2), Attempt(attempt, 2, rank, 7))
        yield Plan(attempt, PLAN.samples, PLAN.batch, PLAN.epochs, PLAN.seed, SAVED, "overlapped", "c")
        yield Recover(attempt, start or None, *PLAN.position(start), "keyed", 0.5)
        for step in range(start, end):
            if rank == 0 and step % SAVED == 0:
                yield Commit(attempt, step, 4096)
            samples = Samples.of(PLAN.share(PLAN.position(step), rank, 2))
            seconds = Seconds(0.000125, 0.002, 0.0)
            yield Step(attempt, 2, rank, *PLAN.position(step), step, samples, seconds, f"{step:032x}", 1, 0, 1, 0.5)


@cache
def lines_of(rank: int) -> list[bytes]:
    """Return the lines of a rank's file."""
    return [line(1.7e9 + i / 500, f"rank-{rank}", what) for i, what in enumerate(whats(rank))]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    folder = tmp_path / "history"
    folder.mkdir()
    for rank in (0, 1):
        (folder / f"rank-{rank}.jsonl").write_bytes(b"".join(lines_of(rank)))
    return folder


def everything(history: Path) -> list[object]:
    """All that the readers of a history return."""
    torn: list[TornLine] = []
    files = [history / f"rank-{rank}.jsonl" for rank in (0, 1)]
    return [
        list(stream_history(history, torn)),
        torn,
        read_history(history),
        [list(backwards(file)) for file in files],
        [list(recall(file, "plan", "commit")) for file in files],
        list(recall(files[0], "step")),
    ]


def lines_left(file: Path) -> int:
    """The bytes of a file that are not in segments."""
    return file.stat().st_size - folded(file).end


def test_a_folded_history_reads_the_same(history: Path) -> None:
    before = everything(history)
    assert fold(history, least=1) > 2
    assert everything(history) == before
    assert fold(history, least=1) == 0
    runs = [item for _, item in stream_blocks(history, []) if isinstance(item, StepRun)]
    assert sum(run.steps for run in runs) > 1500


def test_steps_after_the_newest_commit_stay_lines(history: Path) -> None:
    fold(history, least=1)
    (segment, part), *_ = reversed(folded(history / "rank-1.jsonl").parts)
    panel, row = part.rows[-1]
    assert segment.panels[panel].first + segment.panels[panel].rows[row].steps == 768  # the last 256 before step 900


def test_when_the_run_is_over_only_lines_after_the_last_saved_step_are_left(history: Path) -> None:
    with (history / "rank-0.jsonl").open("ab") as file:
        file.write(line(1.8e9, "rank-0", Commit(2, STEPS, 1)))
    before = list(stream_history(history, []))
    fold(history, least=1, is_over=True)
    assert list(stream_history(history, [])) == before
    assert [lines_left(history / f"rank-{rank}.jsonl") for rank in (0, 1)] == [
        len(line(1.8e9, "rank-0", Commit(2, STEPS, 1))),
        0,
    ]
    with HistoryWriter(history, "rank-1", clock=lambda: 1.8e9):
        pass
    after = [event.what for name, event in stream_history(history, []) if name == "rank-1"]
    assert after == [*(event.what for name, event in before if name == "rank-1"), Open(2)]


def test_without_a_commit_nothing_is_folded(history: Path) -> None:
    lines = [text for text in lines_of(0) if b'"commit"' not in text]
    (history / "rank-0.jsonl").write_bytes(b"".join(lines))
    assert fold(history, least=1) == 0


def test_after_the_loss_of_rank_0_the_newest_snapshot_says_what_is_saved(history: Path) -> None:
    (history / "rank-0.jsonl").write_bytes(b"".join(lines_of(0)[:400]))  # with a commit of step 300
    before = everything(history)
    assert fold(history, least=1, newest=lambda: 1200) == 1
    assert fold(history, least=1, newest=lambda: 300) == 0
    assert fold(history, least=1000, newest=lambda: 1200) > 1
    assert lines_left(history / "rank-1.jsonl") < 120_000
    assert everything(history) == before


def test_few_lines_are_left_as_they_are(history: Path) -> None:
    assert fold(history) == 0
    assert not (history / "segments").exists()


def test_only_the_files_of_the_given_ranks_are_folded(history: Path) -> None:
    assert fold(history, [1], least=1) > 0
    assert folded(history / "rank-0.jsonl").end == 0
    assert folded(history / "rank-1.jsonl").end > 0


def test_the_lines_take_no_space_any_more(history: Path, on_disk: Path) -> None:
    shutil.copytree(history, on_disk / "history")
    file = on_disk / "history" / "rank-0.jsonl"
    before = file.stat()
    fold(on_disk / "history", least=1)
    after = file.stat()
    assert after.st_size == before.st_size
    assert after.st_blocks * 512 < lines_left(file) + 16384


def test_a_writer_continues_a_folded_file(history: Path) -> None:
    torn = b'{"event": "st'
    with (history / "rank-0.jsonl").open("ab") as file:
        file.write(torn)
    before = [event for _, event in stream_history(history / "rank-0.jsonl", [])]
    with HistoryWriter(history, "rank-0", clock=lambda: 1.8e9) as writer:
        fold(history, least=1)
        writer.append(Commit(3, 1200, 4096))
        writer.flush()
        fold(history, least=1)
        writer.append(Commit(3, 1201, 4096))
    events = [event for _, event in stream_history(history / "rank-0.jsonl", [])]
    added = [Open(2, torn=len(torn)), Commit(3, 1200, 4096), Commit(3, 1201, 4096)]
    assert events == [*before, *(Event(1.8e9, "rank-0", what) for what in added)]


def test_lines_keep_their_numbers(history: Path) -> None:
    fold(history, least=1)
    with (history / "rank-1.jsonl").open("ab") as file:
        file.write(b"no event\n")
    with pytest.raises(Corrupt, match=rf"rank-1.jsonl, line {len(lines_of(1)) + 1}, is not an event"):
        read_history(history)


class Killed(BaseException):
    """What stops a fold where a kill would."""


def kill_at(number: int) -> Callable[..., None]:
    calls = iter(range(1000))

    def look(*_: object) -> None:
        if next(calls) == number:
            raise Killed

    return look


@pytest.mark.parametrize("number", range(8))
def test_a_fold_that_is_killed_anywhere_loses_and_repeats_nothing(
    history: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = list(stream_history(history, []))
    look = kill_at(number)
    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (Path, "replace"), (folding, "_free")):
            real = getattr(module, name)
            patch.setattr(module, name, lambda *given, real=real: (look(), real(*given))[1])
        with pytest.raises(Killed):
            fold(history, least=1)
    assert list(stream_history(history, [])) == before
    assert fold(history, least=1) > 0
    assert list(stream_history(history, [])) == before
    assert not list((history / "segments").glob(".*"))


def test_a_power_failure_never_finds_a_hole_without_its_segment(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines and the segment are on the disk, and the segment has its name there, before the lines are freed."""
    done: list[str] = []
    sync, rename, free = os.fsync, Path.replace, folding._free

    def synced(number: int) -> None:
        sync(number)
        done.append(f"sync {Path(f'/proc/self/fd/{number}').readlink().name}")

    def renamed(path: Path, to: Path) -> Path:
        done.append(f"rename {path.name}")
        return rename(path, to)

    def freed(path: Path, end: int) -> None:
        done.append("free")
        free(path, end)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(folding, "_free", freed)
    fold(history, least=1)
    assert done[: done.index("free")] == [
        "sync rank-0.jsonl",
        "sync rank-1.jsonl",
        "sync .0.tmp",
        "rename .0.tmp",
        "sync segments",
        "sync history",
    ]


@pytest.mark.slow
def test_a_folding_process_that_is_killed_at_random_times_loses_nothing(history: Path) -> None:
    before = list(stream_history(history, []))
    rng = random.Random(11)
    for _ in range(4):
        child = os.fork()
        if child == 0:
            fold(history, least=1)
            os._exit(0)
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert list(stream_history(history, [])) == before
    fold(history, least=1)
    assert list(stream_history(history, [])) == before


@pytest.mark.parametrize("read", [1, 300, 700])
def test_lines_that_are_folded_while_they_are_read_are_read_once(history: Path, read: int) -> None:
    before = everything(history)
    file = history / "rank-0.jsonl"
    forwards, back = stream_history(file, []), backwards(file)
    begun = [[next(forwards) for _ in range(read)], [next(back) for _ in range(read)]]
    fold(history, least=1)
    assert [*begun[0], *forwards] == [item for item in before[0] if item[0] == "rank-0"]  # type: ignore[attr-defined]
    assert [*begun[1], *back] == before[3][0]  # type: ignore[index]


def test_a_follower_sees_every_line_that_is_not_a_step_once(history: Path) -> None:
    file = history / "rank-0.jsonl"
    following, from_start = GrowingFile(file, from_start=True), GrowingFile(file, from_start=True)
    assert len(following.lines()) == len(lines_of(0))
    fold(history, least=1)
    assert following.lines() == []
    with file.open("ab") as more:
        more.write(line(1.8e9, "rank-0", Commit(3, 1200, 1)))
    assert len(following.lines()) == 1
    seen = [text for _ in range(9) for text in from_start.lines()]
    others = [text for text in lines_of(0) if b'"step", "time"' not in text]
    assert [text for text in seen if b'"step", "time"' not in text][:-1] == others
    assert len(seen) == len({*seen}) < len(lines_of(0))


def test_a_follower_that_was_asleep_continues_where_it_was(history: Path) -> None:
    file = history / "rank-1.jsonl"
    lines = lines_of(1)
    file.write_bytes(b"".join(lines[:100]))
    following = GrowingFile(file, from_start=True)
    assert following.lines() == lines[:100]
    file.write_bytes(b"".join(lines))
    fold(history, least=1)
    seen = [text for _ in range(9) for text in following.lines()]
    assert seen[0] == lines[100]
    assert seen[-1] == lines[-1]
    assert [text for text in seen if b'"event": "step"' not in text] == [
        text for text in lines[100:] if b'"event": "step"' not in text
    ]


def test_damage_of_a_segment_is_one_line(history: Path) -> None:
    fold(history, least=1)
    path = sorted((history / "segments").iterdir())[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"000002-rank-0-to-1\.npz is not a segment of a history as it was written"):
        read_history(history)


def test_a_file_that_lost_lines_of_its_segments_is_refused(history: Path) -> None:
    fold(history, least=1)
    with (history / "rank-1.jsonl").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(Corrupt, match="shorter than what its segments have of it"):
        read_history(history)


def test_segments_of_another_file_are_not_read(history: Path) -> None:
    fold(history, least=1)
    other = [line(1.9e9, "rank-1", Open(2)), line(1.9e9, "rank-1", Attempt(3, 2, 1, 7))]
    (history / "rank-1.jsonl").write_bytes(b"".join(other))
    assert len(list(stream_history(history / "rank-1.jsonl", []))) == 2


def test_segments_are_files_of_a_run(history: Path) -> None:
    fold(history, least=1)
    (history / "segments" / ".0.tmp").touch()
    (history / "segments" / "mine.npz").touch()
    assert foreign_files(history.parent) == ["history/segments/mine.npz"]


def test_a_pipe_in_place_of_a_segment_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "000001-rank-0-to-3.npz")
    with pytest.raises(Corrupt, match=r"000001-rank-0-to-3\.npz is not a file"):
        segments_in(tmp_path)
