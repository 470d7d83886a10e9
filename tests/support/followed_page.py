"""A page that a reader follows: the files that it says to save, and its commands, run in their order."""

import re
import runpy
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast import cli
from supervisor_process import StartCommand

WITHIN = 180.0


class FollowedPage:
    """The files and the commands of a page."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.files = dict(re.findall(r"Save this as `(\w+\.py)`.*?```python\n(.*?)```", text, flags=re.S))
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
        shell = "".join(code for language, code in blocks if not language)
        self.commands = re.findall(r"^(?:python|holdfast) .*", shell, flags=re.M)

    @property
    def steps(self) -> list[str]:
        """The first words of the commands: `python`, or `holdfast` and the name of the command."""
        return [self._step(command) for command in self.commands]

    @staticmethod
    def _step(command: str) -> str:
        words = command.split()
        return " ".join(words[: 1 if words[0] == "python" else 2])

    def follow(
        self,
        says: Mapping[str, str],
        start_command: StartCommand,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Save the files in `folder`, run the commands there, and check that each prints the pattern `says[step]`."""
        for name, code in self.files.items():
            (folder / name).write_text(code)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        for command in self.commands:
            words = shlex.split(command, comments=True)
            if words[0] == "holdfast" and words[1] in ("run", "rehearse"):
                started = start_command(*words[1:], cwd=folder)
                assert started.wait(WITHIN) == 0, started.stdout + started.stderr
                output = started.stderr + started.stdout
            else:
                output = _output_here(words, monkeypatch, capfd)
            assert re.search(says[self._step(command)], output), f"{command} printed\n{output}"


def _output_here(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command that starts no workers in this process, which has imported torch; return its output."""
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", words)
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
    else:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    return capfd.readouterr().out
