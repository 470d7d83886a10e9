"""The display shows steps, goodput, restarts and saves in flight, read from histories while they grow."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.errors import StorageFailed
from holdfast.events import Attempt, Commit, Launch, Plan, Preempt, Recover, Restart, Seconds, Step, line
from holdfast.history.follow import GrowingFile
from holdfast.history.log import HistoryWriter, recall
from holdfast.runs.config import RunConfig
from holdfast.sampler.digest import Samples
from holdfast.supervise.display import Display, Journal, StatusTotals, Tail, last_attempt
from holdfast.supervise.failure_cause import FirstFailure
from holdfast.supervise.restart_policy import RestartPolicy


def step(number: int) -> Step:
    return Step(1, 1, 0, 0, number, number, Samples.of([]), Seconds(0.0, 0.0, 0.0))


@given(st.lists(st.integers(0, 99), min_size=1), st.lists(st.integers(1, 40)))
def test_a_growing_history_yields_every_event_once_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("growing") / "rank-0.jsonl"
    growing = GrowingFile(path)
    text = b"".join(line(0.0, "rank-0", step(value)) for value in values)
    seen = list(growing.new())
    with path.open("wb", buffering=0) as file:
        at = 0
        for cut in [*cuts, len(text)]:
            file.write(text[at : at + cut])
            at += cut
            seen += growing.new()
    assert [event.what.step for event in seen if isinstance(event.what, Step)] == values


def test_earlier_events_are_not_read_and_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(line(0.0, "rank-0", step(1)) * 1000)
    growing = GrowingFile(path)
    with path.open("ab") as file:
        file.write(b'garbage\n[]\n{"event": "step"}\n\xff\n' + line(0.0, "rank-0", step(7)))
    assert [event.what for event in growing.new() if isinstance(event.what, Step)] == [step(7)]
    path.write_bytes(b"")  # it shrank
    assert not list(growing.new())
    path.write_bytes(line(0.0, "rank-0", step(8)))
    assert [event.what for event in growing.new()] == [step(8)]
    path.unlink()
    assert not list(growing.new())
    path.mkdir()
    assert not list(growing.new())
    path.rmdir()
    os.mkfifo(path)
    assert not list(growing.new())


@given(st.text(), st.lists(st.integers(0, 9)))
def test_the_output_of_a_worker_is_shown_completely_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "out"
    shown: list[str] = []
    tail = Tail(path, lambda lines: shown.append(lines + "\n"))
    tail.copy()
    data = text.encode(errors="replace")
    with path.open("wb", buffering=0) as file:
        at = 0
        for cut in [*cuts, len(data)]:
            file.write(data[at : at + cut])
            at += cut
            tail.copy()
    tail.copy(last=True)
    expected = data.decode()
    assert "".join(shown) == (expected if expected.endswith("\n") or not expected else expected + "\n")


def test_the_tally_counts_from_the_start_of_the_command() -> None:
    policy = RestartPolicy(3, 40)
    tally = StatusTotals(100.0, policy)
    for what in [
        Launch(2, workers=2),
        Plan(2, samples=1000, batch=10, epochs=2, seed=0, save_every=20, writer="blocking", config=""),
        Recover(2, 40, 0, 40, "", 0.0),
        *(step(number) for number in range(40, 85)),
        Commit(2, 60, 1),
    ]:
        tally.add(what)
    assert tally.line(110.0) == (
        "step 85 of 200 · goodput 2.0 steps/s · 0 restarts, 3 left · 1 save in flight · committed 60 · 2 workers"
    )
    lost = FirstFailure(kind="signal", rank=0, local_rank=0, exit=-9, signal="SIGKILL", message="was killed")
    assert policy.after(lost, 60) is None
    for what in [Restart(3, workers=2, newest=60), Recover(3, 60, 0, 60, "", 0.0)]:
        tally.add(what)
    assert "step 60 of 200" in tally.line(110.0)
    assert "1 restart, 2 left · 0 saves in flight · committed 60" in tally.line(110.0)
    tally.add(Commit(3, 80, 1))
    assert "1 restart, 3 left" in tally.line(110.0)


def test_the_status_line_has_no_goodput_before_the_first_commit() -> None:
    tally = StatusTotals(100.0, RestartPolicy(3, 40))
    for what in [Recover(2, 40, 0, 40, "", 0.0), step(40)]:
        tally.add(what)
    assert tally.line(110.0).startswith("step 41 · 0 restarts")
    tally.add(Commit(2, 41, 1))
    assert tally.line(110.0).startswith("step 41 · goodput 0.1 steps/s")


def trained(folder: Path) -> None:
    with HistoryWriter(folder, "rank-0") as history:
        history.append(step(4))


def test_without_a_terminal_the_display_prints_plain_lines(tmp_path: Path) -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=200), tmp_path, "supervisor", RestartPolicy(3, None)) as display:
        display.say("attempt 1: 4 workers started")
        trained(tmp_path)
        display.refresh()
        display.refresh(now=True)
    lines = text.getvalue().splitlines()
    assert lines[0] == "holdfast: attempt 1: 4 workers started"
    assert lines[1].startswith("holdfast: step 5 · 0 restarts, 3 left")
    assert len(lines) == 2
    assert "\x1b" not in text.getvalue()


def test_the_last_status_line_is_printed_once_unless_there_was_progress(tmp_path: Path) -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=200), tmp_path, "supervisor", RestartPolicy(3, None)) as display:
        trained(tmp_path)
        display.refresh(now=True)
        display.refresh(now=True)
        assert text.getvalue().count("step 5") == 1
        with HistoryWriter(tmp_path, "rank-0") as history:
            history.append(Commit(1, 5, 1))
        display.refresh(now=True)
        assert text.getvalue().count("step 5") == 2


def test_a_node_without_the_history_of_rank_0_shows_the_progress_of_its_own_rank(tmp_path: Path) -> None:
    """It had rank 0 in attempt 1, when it was alone; in attempt 2, rank 0 is on the node that returned."""
    text = io.StringIO()
    with (
        Display(Console(file=text, width=200), tmp_path, "supervisor-1", RestartPolicy(3, None)) as display,
        HistoryWriter(tmp_path, "supervisor-1") as supervisor,
        HistoryWriter(tmp_path, "rank-0") as rank_0,
        HistoryWriter(tmp_path, "rank-1") as rank_1,
    ):
        display.follow(0)
        for history, events in (
            (supervisor, [Launch(1, 1)]),
            (rank_0, [Attempt(1, 1, 0, 7), Recover(1, None, 0, 0, "", 0.0), step(4), Commit(1, 5, 1)]),
        ):
            for event in events:
                history.append(event)
            history.flush()
        display.refresh(now=True)
        display.follow(1)
        for history, events in (
            (supervisor, [Restart(2, 1)]),
            (rank_1, [Attempt(2, 2, 1, 8), Recover(2, 5, 0, 5, "", 0.0), *(step(number) for number in range(5, 9))]),
        ):
            for event in events:
                history.append(event)
            history.flush()
        display.refresh(now=True)
    before, after = text.getvalue().splitlines()
    assert before.startswith("holdfast: step 5 ·")
    assert after == "holdfast: step 9 · 1 restart · 1 worker"


def test_on_a_terminal_one_line_changes_and_output_scrolls_above_it(tmp_path: Path) -> None:
    text = io.StringIO()
    with Display(
        Console(file=text, width=200, force_terminal=True), tmp_path, "supervisor", RestartPolicy(3, None)
    ) as display:
        trained(tmp_path)
        display.refresh(now=True)
        display.show("rank 1 raised:", "Traceback\n  line\n")
        display.refresh(now=True)
    assert text.getvalue().count("step 5") >= 2
    assert "\x1b[2K" in text.getvalue()  # the line is erased and drawn again
    assert "Traceback\n  line\n" in text.getvalue()


def test_a_full_disk_is_reported_once_and_the_journal_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()

    def refuses(self: HistoryWriter) -> None:
        raise StorageFailed("no space")

    with Display(Console(file=text, width=200), tmp_path, "supervisor", RestartPolicy(3, None)) as display:
        with Journal(tmp_path, "supervisor", display) as journal, monkeypatch.context() as full:
            full.setattr(HistoryWriter, "flush", refuses)
            journal.append(Restart(2, 4))
            journal.append(Preempt(2))
        events = [event.what for event in recall(tmp_path / "supervisor.jsonl", "restart", "preempt")]
    assert text.getvalue().splitlines() == ["holdfast: no space"]
    assert events == [Restart(2, 4), Preempt(2)]


def test_a_launch_records_the_arguments_that_differ_from_the_last_launch(tmp_path: Path) -> None:
    with Display(Console(file=io.StringIO()), tmp_path, "supervisor", RestartPolicy(3, None)) as display:
        for attempt, rate in enumerate(("0.1", "0.2"), 1):
            with Journal(tmp_path, "supervisor", display) as journal:
                journal.launch(RunConfig(script="train.py", args=("--lr", rate)), attempt, workers=2, nodes=1)
    launches = [event.what for event in recall(tmp_path / "supervisor.jsonl", "launch")]
    assert [what.changed for what in launches if isinstance(what, Launch)] == [(), ("--lr",)]
    assert last_attempt(tmp_path) == 2


def test_the_next_attempt_follows_the_attempts_of_all_supervisors(tmp_path: Path) -> None:
    """The run had two nodes, and continues on one, whose supervisor has a history of another name."""
    for who, attempts in (("supervisor-0", [1]), ("supervisor-1", [1, 2]), ("supervisor", [])):
        with HistoryWriter(tmp_path, who) as history:
            for attempt in attempts:
                history.append(Launch(attempt, 1) if attempt == 1 else Restart(attempt, 1))
    assert last_attempt(tmp_path) == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_a_closed_pipe_or_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w", buffering=1) as full, os.fdopen(writer, "w", buffering=1) as pipe:
        for out, err in ((full, pipe), (pipe, full)):
            monkeypatch.setattr(sys, "stdout", out)
            with Display(
                Console(file=err, force_terminal=terminal), tmp_path, "supervisor", RestartPolicy(3, None)
            ) as display:
                (tmp_path / "printed").write_text("a line\n")
                display.output.add([(tmp_path / "printed", tmp_path / "printed")])
                display.say("attempt 1")
                display.show("rank 0 raised", "Traceback")
                display.refresh(now=True)
        monkeypatch.undo()
        for file in (full, pipe):
            with suppress(OSError):
                file.close()
