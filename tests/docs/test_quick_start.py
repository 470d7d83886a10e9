"""The quick start is true: its script survives the kill, and its commands print what it shows."""

from pathlib import Path

import pytest

from followed_page import FollowedPage
from repository import ROOT
from supervisor_process import StartCommand

PAGE = FollowedPage(ROOT / "docs/start/quick-start.md")
SAYS = {
    "holdfast run": r"(?s)rank 1 .*was killed by SIGKILL.*completed after 2 attempts.*audit: pass",
    "holdfast audit": r"(?s)([27]0) of \1 repeated steps.*audit: pass",
    "holdfast cost": r"restarts: 1; rework: [27]0 steps",
}


def test_every_command_of_the_quick_start_does_what_it_says(
    start_command: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert list(PAGE.files) == ["train.py"]
    assert PAGE.steps == list(SAYS)
    PAGE.follow(SAYS, start_command, tmp_path, monkeypatch, capfd)
