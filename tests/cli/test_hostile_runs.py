"""Run folders that were changed after they were written: no command ends in a traceback, and no forged run passes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fake_two_ranks import TwoRankRun
from holdfast.cli import app
from holdfast.errors import HoldfastError
from holdfast.events import Detect, Done, Judged, Launch, Open, Restart, line

COMMAND = get_command(app)

Line = dict[str, Any]
History = dict[str, list[Line]]  # the lines of every file, by writer


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not build the parser of the command line again for each of hundreds of commands."""
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMAND)


@pytest.fixture(scope="module")
def correct() -> History:
    """Return the history of two ranks, of which one was killed after step 11 and both continued from step 10."""
    run = TwoRankRun().trains(1, None, 12).saves(1, 10).trains(2, 10, 20).saves(2, 20)
    for rank in range(2):
        run.says(rank, Done(2, 20))
    run.supervisor(Open(2), Launch(1, 2), Detect(1, 1, 1, "signal", "killed", exit=-9, step=11), Restart(2, 2, 10))
    run.supervisor(Judged("completed", 2, "all workers have finished"))
    history: History = {"rank-0": [], "rank-1": [], "supervisor": []}
    for event in run.events:
        history[event.who].append(json.loads(line(*event)))
    return history


def changed(kind: str, **fields: Any) -> Callable[[History], None]:
    """Return a change of these fields in all events of `kind`; a function is called with the event."""

    def change(history: History) -> None:
        for event in (event for lines in history.values() for event in lines if event["event"] == kind):
            event |= {name: value(event) if callable(value) else value for name, value in fields.items()}

    return change


def renamed(who: str) -> Callable[[History], None]:
    """Return a change that copies the events of rank 1 to a writer called `who`."""

    def change(history: History) -> None:
        history["rank-7"] = [{**line, "who": who} for line in history["rank-1"]]

    return change


def drop(history: History) -> None:
    del history["rank-1"][8]


def drop_on_all_ranks(history: History) -> None:
    for who in ("rank-0", "rank-1"):
        history[who] = [line for line in history[who] if line.get("step") != 5 or line["event"] != "step"]


def repeat(history: History) -> None:
    history["rank-1"].insert(8, history["rank-1"][8])


def repeat_the_file(history: History) -> None:
    history["rank-1"] *= 2


def reverse(history: History) -> None:
    history["rank-0"].reverse()


def swap_files(history: History) -> None:
    history["rank-0"], history["rank-1"] = history["rank-1"], history["rank-0"]


def swap_ranks(history: History) -> None:
    swap_files(history)
    for rank in range(2):
        for event in history[f"rank-{rank}"]:
            event |= {"who": f"rank-{rank}"} | ({"rank": rank} if "rank" in event else {})


def exchange_samples(history: History) -> None:
    for who in ("rank-0", "rank-1"):
        one, other = history[who][6], history[who][7]
        one["samples"], other["samples"] = other["samples"], one["samples"]


def end_too_early(history: History) -> None:
    history["rank-1"] = [*history["rank-1"][:12], history["rank-1"][-1]]


def commit_what_was_not_trained(history: History) -> None:
    commits = [line for line in history["rank-0"] if line["event"] == "commit"]
    history["rank-0"].insert(10, {**commits[0], "step": 15, "state": "f" * 32})


def without(kind: str) -> Callable[[History], None]:
    """Return a change that removes all events of `kind`."""

    def change(history: History) -> None:
        for who, lines in history.items():
            history[who] = [line for line in lines if line["event"] != kind]

    return change


def restored_again(line: Line) -> str | None:
    return None if line.get("restored") is None else "0" * 32


def one_digest(history: History) -> None:
    """Give all snapshots and restores one digest: the parameters changed between them."""
    changed("commit", state="0" * 32)(history)
    changed("recover", state=restored_again)(history)


def differ_when_repeated(history: History) -> None:
    changed("step", state=lambda line: "2" * 32 if (line["attempt"], line["step"]) == (2, 11) else line["state"])(
        history
    )


FORGED = [
    drop,
    drop_on_all_ranks,
    repeat,
    repeat_the_file,
    reverse,
    swap_files,
    swap_ranks,
    exchange_samples,
    end_too_early,
    commit_what_was_not_trained,
    one_digest,
    differ_when_repeated,
    without("commit"),
    without("recover"),
    without("plan"),
    without("open"),
    changed("step", attempt=1),
    changed("step", step=lambda line: line["step"] + 1),
    changed("step", step=(1 << 63) - 1),
    changed("step", world=1 << 62, rank=1 << 61),
    changed("step", samples={"count": 0, "digest": "0" * 32}),
    changed("step", samples="\x1b[31m\u202e"),
    changed("attempt", world=1 << 62),
    changed("attempt", attempt=(1 << 63) - 1),
    changed("commit", step=1 << 62),
    changed("commit", state="0" * 32),
    changed("recover", restored=4),
    changed("recover", restored=None, epoch=0, cursor=0),
    changed("recover", fingerprint="0" * 32),
    changed("recover", rng="none"),
    changed("plan", seed=12),
    changed("plan", epochs=1),
    changed("plan", batch=0),
    changed("plan", samples=1 << 62, batch=1, epochs=1 << 62),
    changed("plan", sampler="0" * 32),
    changed("plan", later_phases=[{"samples": 0, "batch": 4, "epochs": 1, "seed": 0}]),
    changed("done", step=1 << 62),
    renamed("rank-7"),
    renamed("rank-²"),
    renamed("rank-" + "9" * 5000),
    renamed("\x1b[31m"),
]
HARMLESS = [
    changed("step", time=lambda line: 1e11 - line["step"]),
    changed("step", seconds={"data": -1e10, "compute": 1e11, "stall": 0.0}),
    changed("step", loss=1.7e308),
    changed("detect", message="\x1b[2J\n\n", rank=-(1 << 62), step=1 << 62),
    changed("launch", nodes=1 << 62, workers=1 << 62),
    changed("verdict", verdict="\x1b[2J", because="audit: pass\n\n"),
]


def run_folder(folder: Path, history: History) -> Path:
    (folder / "history").mkdir()
    for who, lines in history.items():
        (folder / "history" / f"{who}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text("{}")
    return folder


def run(*arguments: object) -> tuple[int, str]:
    """Return the exit status and the output of a command, which must not end in a traceback or print control codes."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit | HoldfastError):
        raise result.exception
    assert all(char.isprintable() or char in "\n\t" for char in result.output), arguments
    return result.exit_code, result.output


def copied(history: History) -> History:
    return {who: [dict(line) for line in lines] for who, lines in history.items()}


def test_the_run_is_correct_before_it_is_forged(correct: History, tmp_path: Path) -> None:
    assert run("audit", run_folder(tmp_path, correct) / "history")[0] == 0


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_a_forged_run_never_passes_and_every_command_can_read_or_refuse_it(
    correct: History, tmp_path: Path, forge: Callable[[History], None]
) -> None:
    history = copied(correct)
    forge(history)
    folder = run_folder(tmp_path, history) / "history"
    assert run("audit", folder)[0] != 0
    for command in (["cost"], ["cost", "--json"], ["advise"]):
        run(*command, folder)
    run("watch", "--prometheus", folder.parent)


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
def test_absurd_times_and_words_are_shown_without_a_traceback(
    correct: History, tmp_path: Path, change: Callable[[History], None]
) -> None:
    history = copied(correct)
    change(history)
    folder = run_folder(tmp_path, history) / "history"
    for command in ("audit", "cost", "advise"):
        run(command, folder)
    run("watch", "--prometheus", folder.parent)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
        lambda path: path.write_bytes(path.read_bytes() + b"\0" * 4096 + b"\n"),
        lambda path: path.write_bytes(path.read_bytes() + b'{"event": "\xff"}\n'),
        lambda path: path.write_bytes(path.read_bytes() + b"[" * 200_000 + b"\n"),
        lambda path: path.write_bytes(path.read_bytes() + b'{"event": "x", "time": 1' + b"0" * 5000 + b"}\n"),
        make_pipe,
    ],
    ids=["empty", "cut", "marked", "zeros", "not UTF-8", "nested", "many digits", "a pipe"],
)
def test_a_damaged_file_is_refused_or_fails_in_one_line(
    correct: History, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = run_folder(tmp_path, correct) / "history"
    damage(folder / "rank-1.jsonl")
    assert run("audit", folder)[0] != 0
    for command in ("cost", "advise"):
        run(command, folder)
    run("watch", "--prometheus", folder.parent)
