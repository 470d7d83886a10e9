"""Whoever watches sees steps, goodput, restarts and saves in flight, read from histories while they grow."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.errors import BadInput
from holdfast.history import HistoryWriter
from holdfast.supervise import errorfile, heartbeat
from holdfast.supervise.heartbeat import Pulse
from holdfast.supervise.live import Growing, Tally, View
from holdfast.supervise.output import Tail


@given(st.lists(st.integers(0, 99), min_size=1), st.lists(st.integers(1, 40)))
def test_a_growing_history_yields_every_event_once_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("growing") / "rank-0.jsonl"
    growing = Growing(path)
    text = "".join(json.dumps({"event": "step", "step": value}) + "\n" for value in values).encode()
    seen = list(growing.new())
    with path.open("wb", buffering=0) as file:
        at = 0
        for cut in [*cuts, len(text)]:
            file.write(text[at : at + cut])
            at += cut
            seen += growing.new()
    assert [event["step"] for event in seen] == values


@given(st.text(), st.lists(st.integers(0, 9)))
def test_what_a_worker_prints_is_shown_whole_and_in_order(
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


def test_the_tally_counts_from_when_we_began_to_watch() -> None:
    tally = Tally(began=100.0)
    for event in [
        {"event": "plan", "time": 1, "samples": 1000, "batch": 10, "epochs": 2, "save_every": 20},
        {"event": "commit", "time": 2, "step": 40},
        {"event": "restart", "time": 3, "workers": 4},
        {"event": "launch", "time": 101, "workers": 2},
        {"event": "recover", "time": 102, "restored": 40},
        *({"event": "step", "time": 103, "step": step} for step in range(40, 85)),
        {"event": "commit", "time": 110, "step": 60},
    ]:
        tally.add(event)
    assert tally.line(110.0) == (
        "step 85 of 200 · goodput 2.0 steps/s · 0 restarts · 1 save in flight · committed 60 · 2 workers"
    )


def test_where_stderr_is_no_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append("step", step=4)
    text = io.StringIO()
    with View(Console(file=text, width=200), tmp_path, "supervisor") as view:
        view.say("attempt 1: 4 workers started")
        view.refresh()
        view.refresh(now=True)
    lines = text.getvalue().splitlines()
    assert lines[0] == "holdfast: attempt 1: 4 workers started"
    assert lines[1].startswith("holdfast: step 5 · goodput")
    assert len(lines) == 2
    assert "\x1b" not in text.getvalue()


def test_on_a_terminal_one_line_changes_and_output_scrolls_above_it(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append("step", step=4)
    text = io.StringIO()
    with View(Console(file=text, width=200, force_terminal=True), tmp_path, "supervisor") as view:
        view.refresh(now=True)
        view.show("rank 1 raised:", "Traceback\n  line\n")
        view.refresh(now=True)
    assert text.getvalue().count("step 5") >= 2
    assert "\x1b[2K" in text.getvalue()  # the line is erased and drawn again
    assert "Traceback\n  line\n" in text.getvalue()


def test_silence_is_counted_only_while_we_look(tmp_path: Path) -> None:
    path = tmp_path / "heartbeats" / "rank-0"
    heartbeat.start(path)
    stopped = tmp_path / "stopped"
    stopped.touch()
    pulse = Pulse(stopped, 0.0)
    assert pulse.silence(0.5) == 0.5
    assert pulse.silence(600.0) == 1.5  # we were away, too
    assert pulse.silence(600.5) == 2.0
    stopped.write_text("a beat")
    assert pulse.silence(601.0) == 0.0
    assert Pulse(tmp_path / "never", 0.0).silence(1.0) == 1.0
    assert path.exists()


def test_an_error_file_says_what_was_raised_in_the_form_that_torch_reads(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    try:
        raise KeyError("w")
    except KeyError as error:
        errorfile.write(path, error, __file__)
    raised = errorfile.read(path)
    assert raised is not None
    assert raised.message == "KeyError: 'w'"
    assert 'raise KeyError("w")' in raised.traceback
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "KeyError: 'w'"  # type: ignore[index]
    errorfile.write(path, BadInput("give a batch of 1 or more"), __file__)
    assert errorfile.read(path) is not None
    assert errorfile.read(path).traceback == ""  # type: ignore[union-attr]
    path.write_text('{"message": {"mess')
    assert errorfile.read(path) is None
    assert errorfile.read(tmp_path / "none") is None
