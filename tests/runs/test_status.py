"""Runs are listed with their status, removed if they are not being trained, and their logs are shown."""

import io
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast import cli
from holdfast.checkpoint import retention, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.events import Commit, Done, Iterate, Judged, Launch, Recover, Seconds, Serve, Step
from holdfast.history.log import HistoryWriter
from holdfast.runs import lock
from holdfast.runs.config import RunConfig
from holdfast.runs.logs import RANKS, find_logs
from holdfast.runs.status import run_status, runs_in
from holdfast.sampler.digest import Samples
from holdfast.supervise.display import LONGEST, Display, Tail, WorkersOutput
from holdfast.supervise.restart_policy import RestartPolicy


def holdfast(monkeypatch: pytest.MonkeyPatch, capfd: Any, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err


def step(number: int) -> Step:
    return Step(1, 1, 0, 0, number, number, Samples.of([]), Seconds(0.0, 0.0, 0.0))


def write(folder: Path, who: str, *events: Any, start: float = 1000.0) -> None:
    """A history in which a second passes between two events."""
    clock = iter(range(10**6))
    with HistoryWriter(folder / "history", who, lambda: start + next(clock)) as history:
        for event in events:
            history.append(event)


def trained(folder: Path, *, verdict: str | None = "completed", steps: int = 10) -> Path:
    write(folder, "supervisor", Launch(1, 1), *([Judged(verdict, 1, "")] if verdict else []))
    write(folder, "rank-0", Recover(1, None, 0, 0, "keyed", 0.0), *map(step, range(steps)), Commit(1, steps, 1))
    return folder


def test_the_goodput_of_an_active_run_counts_the_time_up_to_its_last_event(
    tmp_path: Path,
) -> None:
    with lock.hold(trained(tmp_path / "a", verdict=None, steps=10)):
        found = run_status(tmp_path / "a")
    assert found.is_training
    assert found.goodput == pytest.approx(10 / 12)  # its supervisor is silent after the first second of twelve


def test_runs_are_listed_with_state_step_goodput_and_size(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    trained(tmp_path / "a")
    trained(tmp_path / "deep" / "b", verdict=None)
    write(tmp_path / "c", "supervisor", Launch(1, 1), Judged("script-error", 1, ""))
    with lock.hold(trained(tmp_path / "d", verdict=None)):
        code, out, _ = holdfast(monkeypatch, capfd, "runs", tmp_path)
    rows = {Path(line.split()[0]).name: line for line in out.splitlines()[1:]}
    assert code == 0
    assert list(rows) == ["a", "c", "d", "b"]
    assert "completed" in rows["a"]
    assert "5.00 steps/s" in rows["a"]  # 10 committed in the 2 seconds of its supervisor
    assert "was killed" in rows["b"]
    assert "script-error" in rows["c"]
    assert "trains" in rows["d"]


def test_the_time_between_a_stop_and_the_next_start_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, "supervisor", Launch(1, 1), Judged("preempted", 1, ""))
    write(tmp_path, "supervisor", Launch(2, 1), Judged("completed", 2, ""), start=9000.0)
    write(tmp_path, "rank-0", Recover(1, None, 0, 0, "keyed", 0.0), step(0), Commit(1, 8, 1), Done(1, 8))
    found = run_status(tmp_path)
    assert (found.state, found.goodput) == ("completed", 2.0)


def test_a_run_that_was_continued_on_one_node_has_the_state_of_its_newest_supervisor(tmp_path: Path) -> None:
    write(tmp_path, "supervisor-0", Launch(1, 1), Judged("gave-up", 1, ""))
    write(tmp_path, "supervisor", Launch(2, 1), Judged("completed", 2, ""), start=9000.0)
    write(tmp_path, "rank-0", Recover(1, None, 0, 0, "keyed", 0.0), step(0), Commit(1, 8, 1), Done(1, 8))
    found = run_status(tmp_path)
    assert (found.state, found.goodput) == ("completed", 2.0)  # both supervisors took 2 seconds each
    write(tmp_path, "supervisor-0", Launch(3, 1), Judged("preempted", 3, ""), start=9500.0)
    assert run_status(tmp_path).state == "preempted"


def test_a_node_without_rank_0_shows_no_goodput_because_only_rank_0_records_saves(tmp_path: Path) -> None:
    write(tmp_path, "supervisor-1", Launch(1, 1), Judged("completed", 1, ""))
    write(tmp_path, "rank-1", Recover(1, 250, 0, 0, "restored", 0.0), *map(step, range(250, 260)), Done(1, 260))
    found = run_status(tmp_path)
    assert (found.state, found.step, found.goodput) == ("completed", 260, None)


def test_a_run_without_a_supervisor_a_served_one_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "alone", "rank-0", Recover(1, None, 0, 0, "keyed", 0.0), step(0), Commit(1, 1, 1), Done(1, 1))
    serve = Serve(1, "mlr", 1, 1, 1, 1, "full", 1.0, 1, "full", 0, 0, 0.1, 9)
    write(tmp_path / "served", "controller", serve, Iterate(3, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0), Done(0, 4))
    (tmp_path / "bad" / "history").mkdir(parents=True)
    (tmp_path / "bad" / "history" / "supervisor.jsonl").write_text("what is this\n")
    states = {path.name: run_status(path) for path in runs_in(tmp_path)}
    assert {name: (status.state, status.step) for name, status in states.items()} == {
        "alone": ("completed", 1),
        "bad": ("unreadable", 0),
        "served": ("completed", 4),
    }


def test_a_run_is_removed_after_confirmation(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    doomed = trained(tmp_path / "doomed")
    code, _, err = holdfast(monkeypatch, capfd, "runs", "rm", doomed)
    assert (code, "give --yes" in err) == (2, True)
    code, out, _ = holdfast(monkeypatch, capfd, "runs", "rm", doomed, "--yes")
    assert code == 0
    assert "doomed: completed, step 10" in out
    assert list(tmp_path.iterdir()) == []


def test_an_active_run_a_foreign_folder_and_foreign_files_are_never_removed(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    busy, mine = trained(tmp_path / "busy"), trained(tmp_path / "mine")
    (mine / "model.pt").write_text("precious")
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(trained(tmp_path / "real"))
    with lock.hold(busy):
        for name, why in [
            ("busy", "is being trained"),
            ("mine", "also holds model.pt"),
            ("photos", "is not the folder of a run"),
            ("link", "is not the folder of a run"),
        ]:
            code, _, err = holdfast(monkeypatch, capfd, "runs", "rm", tmp_path / "real", tmp_path / name, "--yes")
            assert (code, why in err) == (2, True)
    assert len(list(tmp_path.iterdir())) == 5


def test_prune_removes_runs_that_trained_nothing_and_old_ones(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    trained(tmp_path / "good")
    old = trained(tmp_path / "old")
    for file in (old / "history").iterdir():
        os.utime(file, (time.time() - 40 * 86400,) * 2)
    write(tmp_path / "empty", "supervisor", Launch(1, 1), Judged("script-error", 1, ""))
    with lock.hold(tmp_path / "starting"):
        write(tmp_path / "starting", "supervisor", Launch(1, 1))
        assert holdfast(monkeypatch, capfd, "runs", "prune", tmp_path, "--yes")[0] == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "old", "starting"]
        assert holdfast(monkeypatch, capfd, "runs", "prune", tmp_path, "--older-than", 30, "--yes")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "starting"]
    assert "nothing to prune" in holdfast(monkeypatch, capfd, "runs", "prune", tmp_path / "good")[1]
    assert holdfast(monkeypatch, capfd, "runs", tmp_path / "nowhere")[0] == 2


def completed(folder: Path) -> Path:
    """As a real run leaves its folder, of every kind of file one."""
    trained(folder)
    (folder / "run.json").write_text(json.dumps(RunConfig(script="train.py").to_json()))
    snapshot.save(DirectoryStore(folder / "checkpoints"), 10, {}, {"note": 1})
    logs = folder / "logs" / "attempt-0001"
    logs.mkdir(parents=True)
    for name in ("rank-0.out", "rank-0.err", "rank-0.error.json", "worker-3.out"):
        (logs / name).write_text("")
    (folder / ".supervisor-0.lock").write_text("")
    return folder


def test_a_folder_with_a_foreign_run_json_is_not_a_run(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    tool = tmp_path / "runs" / "tool"
    for name in ("logs", "checkpoints", "history"):
        (tool / name).mkdir(parents=True)
        (tool / name / "mine.txt").write_text("precious")
    (tool / "history" / "mine.jsonl").write_text("{}\n")
    (tool / "run.json").write_text('{"program": "my own tool"}')
    assert runs_in(tmp_path / "runs") == []
    code, _, err = holdfast(monkeypatch, capfd, "runs", "prune", tmp_path / "runs", "--yes")
    assert (code, "there are no runs" in err) == (2, True)
    code, _, err = holdfast(monkeypatch, capfd, "runs", "rm", tool, "--yes")
    assert (code, "is not the folder of a run: nothing is removed" in err) == (2, True)
    # Nor is one removed that has a history of ours beside it.
    trained(tool)
    code, _, err = holdfast(monkeypatch, capfd, "runs", "rm", tool, "--yes")
    assert (code, "run.json is not the config of a run" in err) == (2, True)
    assert (tool / "logs" / "mine.txt").exists()


def test_a_folder_with_a_foreign_history_is_not_removed(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    (tmp_path / "notes" / "history").mkdir(parents=True)
    (tmp_path / "notes" / "history" / "supervisor.jsonl").write_text('{"my": "supervisor"}\n')
    code, _, err = holdfast(monkeypatch, capfd, "runs", "rm", tmp_path / "notes", "--yes")
    assert (code, "nothing is removed" in err) == (2, True)
    assert holdfast(monkeypatch, capfd, "runs", "prune", tmp_path, "--yes", "--older-than", 0)[0] == 1
    assert (tmp_path / "notes").exists()


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-00000010", "logs/attempt-0001", "history"])
def test_a_file_that_no_run_has_written_is_foreign_at_any_depth(
    tmp_path: Path, place: str, monkeypatch: Any, capfd: Any
) -> None:
    run = completed(tmp_path / "run")
    (run / place / "best.pt").write_text("precious")
    code, _, err = holdfast(monkeypatch, capfd, "runs", "rm", run, "--yes")
    assert code == 2
    assert f"also holds {(Path(place) / 'best.pt').as_posix()}, which no run has written" in err
    (run / place / "best.pt").unlink()
    assert holdfast(monkeypatch, capfd, "runs", "rm", run, "--yes")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_trained_is_not_pruned_if_its_history_is_lost(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    shutil.rmtree(completed(tmp_path / "without") / "history")
    for file in (completed(tmp_path / "emptied") / "history").iterdir():
        file.write_text("")
    (completed(tmp_path / "of-the-supervisor-alone") / "history" / "rank-0.jsonl").unlink()
    aside = completed(tmp_path / "aside") / "checkpoints"
    retention.set_aside(DirectoryStore(aside), 10)
    shutil.rmtree(tmp_path / "aside" / "history")
    write(tmp_path / "supervised-only", "supervisor", Launch(1, 1), Judged("completed", 1, "supervised only"))
    write(tmp_path / "failed", "supervisor", Launch(1, 1), Judged("script-error", 1, ""))
    code, out, _ = holdfast(monkeypatch, capfd, "runs", "prune", tmp_path, "--yes")
    assert (code, "failed: script-error, step 0" in out) == (0, True)
    kept = ["aside", "emptied", "of-the-supervisor-alone", "supervised-only", "without"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    found = {name: run_status(tmp_path / name) for name in kept}
    assert {name: (status.state, status.step) for name, status in found.items()} == {
        "aside": ("history lost", 10),
        "emptied": ("history lost", 10),
        "of-the-supervisor-alone": ("completed", 10),
        "supervised-only": ("completed", 0),
        "without": ("history lost", 10),
    }


def test_one_foreign_file_does_not_stop_the_whole_prune(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / name, "supervisor", Launch(1, 1), Judged("script-error", 1, ""))
    (tmp_path / "b" / "notes.txt").write_text("precious")
    code, out, err = holdfast(monkeypatch, capfd, "runs", "prune", tmp_path, "--yes")
    assert code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert "removed 2 of 3" in out
    assert "b also holds notes.txt, which no run has written" in err


@pytest.fixture
def printed(tmp_path: Path) -> Path:
    for attempt in (1, 2):
        folder = tmp_path / "logs" / f"attempt-{attempt:04d}"
        folder.mkdir(parents=True)
        for rank in (0, 1, 10):
            (folder / f"rank-{rank}.out").write_text(f"hello of {rank} in {attempt}\n" * (rank != 10))
            (folder / f"rank-{rank}.err").write_text("")
        (folder / "rank-0.error.json").write_text("{}")
    (folder / "worker-11.err").write_bytes(
        b"  0%|  |\r 50%|# |\r100%|##|\r\n\x1b[31mred\x1b[0m \x1b]0;title\x07\x07 bell\n"
    )
    return tmp_path


def test_logs_are_those_of_all_attempts_of_one_attempt_or_of_one_rank(
    printed: Path, monkeypatch: Any, capfd: Any
) -> None:
    code, out, _ = holdfast(monkeypatch, capfd, "logs", printed, "--rank", 1)
    assert [line for line in out.splitlines() if line.startswith("hello")] == ["hello of 1 in 1", "hello of 1 in 2"]
    code, out, _ = holdfast(monkeypatch, capfd, "logs", printed, "--attempt", 2)
    assert code == 0
    lines = [line for line in out.splitlines() if not line.startswith("==")]
    assert lines == ["hello of 0 in 2", "hello of 1 in 2", "100%|##|", "red \\x07 bell"]
    code, out, _ = holdfast(monkeypatch, capfd, "logs", printed, "--rank", 1, "--attempt", 1)
    assert "hello of 1 in 1" in out
    assert "hello of 0" not in out
    assert "printed nothing" in holdfast(monkeypatch, capfd, "logs", printed, "--rank", 10)[1]
    for arguments, says in [
        (["--attempt", 7], "no logs of attempt 7: it has those of 1, 2"),
        (["--rank", 3], "no logs of rank 3: it has those of 0, 1, 10"),
    ]:
        code, _, err = holdfast(monkeypatch, capfd, "logs", printed, *arguments)
        assert (code, says in err) == (2, True)
    assert holdfast(monkeypatch, capfd, "logs", printed / "logs")[0] == 2
    assert [log.who for log in find_logs(printed)][:2] == ["rank 0", "rank 0"]


def test_logs_of_a_rank_are_those_of_every_worker_that_had_it(printed: Path, monkeypatch: Any, capfd: Any) -> None:
    folder = printed / "logs" / "attempt-0002"
    (folder / "worker-12.out").write_text("hello of its successor\n")
    became = [(0, "rank-1"), (1, "rank-10"), (0, "worker-12"), (1, "rank-1"), (10, "worker-99")]
    (folder / RANKS).write_text("".join(f"{json.dumps(change)}\n" for change in became) + '[0, "work')
    code, out, _ = holdfast(monkeypatch, capfd, "logs", printed, "--rank", 0, "--attempt", 2)
    assert code == 0
    titles = [line.partition(": ")[0] for line in out.splitlines() if line.startswith("==")]
    assert titles == [
        "== rank 0, attempt 2, stdout",
        "== rank 1, later rank 0, attempt 2, stdout",
        "== worker 12, later rank 0, attempt 2, stdout",
    ]
    assert [line for line in out.splitlines() if line.startswith("hello")][-1] == "hello of its successor"
    found = [log.path.stem for log in find_logs(printed, 2, rank=1) if log.stream == "out"]
    assert found == ["rank-1", "rank-10"]
    nothing = holdfast(monkeypatch, capfd, "logs", printed, "--rank", 10, "--attempt", 2)[1]
    assert "rank 10 of attempt 2 printed nothing" in nothing


def test_logs_show_the_last_lines_or_only_stderr(printed: Path, monkeypatch: Any, capfd: Any) -> None:
    folder = printed / "logs" / "attempt-0002"
    (folder / "rank-0.out").write_text("first\nsecond\nthird\n")
    (folder / "rank-0.err").write_text("a warning\n")
    how = ("logs", printed, "--rank", 0, "--attempt", 2)
    out = holdfast(monkeypatch, capfd, *how, "--tail", 2)[1]
    assert [line for line in out.splitlines() if not line.startswith("==")] == ["second", "third", "a warning"]
    out = holdfast(monkeypatch, capfd, *how, "--err")[1]
    assert [line for line in out.splitlines() if not line.startswith("==")] == ["a warning"]
    assert holdfast(monkeypatch, capfd, *how, "--tail", -1)[0] == 2


def test_logs_are_followed_until_the_run_ends(printed: Path, monkeypatch: Any, capfd: Any) -> None:
    file = printed / "logs" / "attempt-0002" / "rank-0.out"

    def pause(seconds: float) -> None:
        if threading.get_ident() != follower:
            sleep(seconds)  # a thread that an earlier test has left behind
            return
        with file.open("a") as log:
            log.write("new line\nnot")
        trains.pop()

    trains, follower, sleep = [True, True], threading.get_ident(), time.sleep
    monkeypatch.setattr("holdfast.runs.status.is_training", lambda _: bool(trains))
    monkeypatch.setattr(time, "sleep", pause)
    code, out, _ = holdfast(monkeypatch, capfd, "logs", printed, "--rank", 0, "--tail", 1, "--follow")
    assert code == 0
    assert out.splitlines()[-3:] == ["hello of 0 in 2", "new line", "notnew line"]


def test_the_output_of_a_replacement_is_shown_once_beside_the_others(tmp_path: Path) -> None:
    shown: list[str] = []
    output = WorkersOutput(shown.append, shown.append)
    files = [(tmp_path / f"{name}.out", tmp_path / f"{name}.err") for name in ("rank-0", "rank-1", "worker-2")]
    for out, _ in files:
        out.write_text(f"{out.stem}\n")
    output.add(files[:2])
    output.remove(files[:1])
    output.add(files[1:])
    output.copy()
    output.add(files[1:])
    output.copy(last=True)
    assert shown == ["rank-0", "rank-1", "worker-2"]


def test_a_progress_bar_is_shown_before_its_line_ends(tmp_path: Path) -> None:
    shown: list[str] = []
    tail = Tail(tmp_path / "err", shown.append)
    with (tmp_path / "err").open("wb", buffering=0) as file:
        file.write(b"before\n\r  0%|  |\r 50%|# |")
        tail.copy()
        assert (shown, tail.bar) == (["before"], " 50%|# |")
        file.write(b"\r 75%|#.|\r")
        tail.copy()
        assert tail.bar == " 75%|#.|"
        for _ in range(3):
            file.write(b"\r 80%|#.|" * LONGEST)
            tail.copy()
        assert len(tail._rest) <= 2 * LONGEST
        assert tail.bar == " 80%|#.|"
        file.write(b"\r100%|##|\nafter\n")
        tail.copy()
    tail.copy(last=True)
    assert tail.bar == ""
    assert shown[1].endswith("\r100%|##|\nafter")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_display_shows_progress_bars(tmp_path: Path, terminal: bool) -> None:
    text = io.StringIO()
    for rank in (0, 1):
        (tmp_path / f"err-{rank}").write_bytes(b"\r  0%%|  |\r 5%d%%|# | rank" % rank)
    console = Console(file=text, width=100, force_terminal=terminal)
    with Display(console, tmp_path, "supervisor", RestartPolicy(3, None)) as display:
        display.output.add([(tmp_path / "none", tmp_path / f"err-{rank}") for rank in (0, 1)])
        display.refresh(now=True)
        seen = text.getvalue()
    assert "50%|# | rank" in seen
    assert ("51%|# | rank" in seen) == terminal
    assert "0%|  |\n" not in seen


def test_help_groups_the_commands(monkeypatch: Any, capfd: Any) -> None:
    _, out, _ = holdfast(monkeypatch, capfd, "--help")
    positions = [out.index(f" {word} ─") for word in ("Train", "Look", "Prove", "Store", "Lab")]
    assert positions == sorted(positions)
    assert "holdfast runs rm" in holdfast(monkeypatch, capfd, "runs", "rm", "--help")[1]
    assert "prune" in holdfast(monkeypatch, capfd, "runs", "--help")[1]
