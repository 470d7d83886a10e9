"""The tutorial is true: its files and commands, used in order, do what it says."""

import sys
from pathlib import Path

import pytest

from followed_page import FollowedPage
from repository import ROOT
from supervisor_process import StartCommand

TUTORIAL = FollowedPage(ROOT / "docs/tutorial.md")
SAYS = {  # the expected output of each command, by its first words
    "python": r"\d% right",
    "holdfast rehearse": r"resumes exactly",
    "holdfast run": r"completed after 3 attempts",
    "holdfast audit": r"(?s)20 of 20 repeated steps.*audit: pass",
    "holdfast cost": r"restarts: 2",
    "holdfast runs": r"runs/a|\ba\b",
    "holdfast logs": r"right after epoch 4",
    "holdfast export": r"model\.safetensors",
}


def main_of(name: str) -> list[str]:
    """Return the lines of a script's main function."""
    return [line.strip() for line in TUTORIAL.files[name].partition("def main():")[2].splitlines() if line.strip()]


def test_the_protected_script_has_six_new_lines() -> None:
    new = [line for line in main_of("train.py") if line not in main_of("plain.py")]
    assert len(["import holdfast as hf", *new]) == 6, new


def test_it_leads_from_a_plain_script_to_an_exported_model() -> None:
    assert list(TUTORIAL.files) == ["plain.py", "train.py", "use.py"]
    assert TUTORIAL.steps == ["python", "python", *list(SAYS)[1:], "python"]


def test_every_command_does_what_the_tutorial_says(
    start_command: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "plain", raising=False)
    TUTORIAL.follow(SAYS, start_command, tmp_path, monkeypatch, capfd)
    monkeypatch.delitem(sys.modules, "plain", raising=False)
