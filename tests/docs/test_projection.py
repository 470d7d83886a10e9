"""The answers for large models in docs/sharded.md and docs/advice.md are those that their commands print."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_histories import replayed, sharded, write_history
from holdfast.cli import app
from repository import ROOT

TEXT = (ROOT / "docs" / "sharded.md").read_text().partition("## What it would cost")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^holdfast (advise runs/fsdp2 .*)$", TEXT, re.MULTILINE)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of a sharded model in which a replacement took 0.6 s."""
    events = sharded(replayed(0.6, save=0.01).events)
    files = {who: [event for event in events if event.who == who] for who in {event.who for event in events}}
    return write_history(tmp_path / "run" / "history", files).parent


@pytest.mark.parametrize("column", [1, 2])
def test_every_figure_is_printed_by_its_command(run: Path, column: int) -> None:
    arguments = [str(run) if word == "runs/fsdp2" else word for word in COMMANDS[column - 1].split()]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    named = [row for row in ROWS if row[0] and not row[0].startswith("---")]
    assert len(named) == 9
    for what, *figures in named:
        for figure in figures[column - 1].split(", "):
            name = re.findall(r"`(\w+)`", what)[-1] if what.startswith("share") else ""
            assert f"{name} {figure}".strip() in shown, what


def test_the_example_with_nodes_and_storage_is_what_its_command_prints(run: Path) -> None:
    text = (ROOT / "docs" / "advice.md").read_text().partition("### Example: 32 nodes")[2]
    command, _, answer = text.partition("```text\n")
    (arguments,) = re.findall(r"^holdfast (advise runs/small .*)$", command, re.MULTILINE)
    words = [str(run) if word == "runs/small" else word for word in arguments.split()]
    assert CliRunner().invoke(app, words, catch_exceptions=False).output == answer.partition("```")[0]
