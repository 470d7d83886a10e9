"""The tutorial is true: its files and commands, used in order, do what it says."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from holdfast import cli
from repository import ROOT
from supervisor_process import StartCommand

TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
FILES = dict(re.findall(r"Save this as `(\w+\.py)`.*?```python\n(.*?)```", TUTORIAL, flags=re.S))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL, flags=re.S | re.M)
SHELL = "".join(text for language, text in BLOCKS if not language)
COMMANDS = re.findall(r"^(?:python|holdfast) .*", SHELL, flags=re.M)
WITHIN = 180.0
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
    return [line.strip() for line in FILES[name].partition("def main():")[2].splitlines() if line.strip()]


def test_the_protected_script_has_six_new_lines() -> None:
    new = [line for line in main_of("train.py") if line not in main_of("plain.py")]
    assert len(["import holdfast as hf", *new]) == 6, new


def test_it_leads_from_a_plain_script_to_an_exported_model() -> None:
    assert list(FILES) == ["plain.py", "train.py", "use.py"]
    steps = [" ".join(command.split()[: 1 if command.startswith("python") else 2]) for command in COMMANDS]
    assert steps == ["python", "python", *list(SAYS)[1:], "python"]


def test_every_command_does_what_the_tutorial_says(
    start_command: StartCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plain", raising=False)
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "holdfast" and words[1] in ("run", "rehearse"):
            started = start_command(*words[1:], cwd=tmp_path)
            assert started.wait(WITHIN) == 0, started.stdout + started.stderr
            output = started.stdout
        else:
            output = output_here(words, monkeypatch, capfd)
        expected = SAYS["python" if words[0] == "python" else " ".join(words[:2])]
        assert re.search(expected, output), f"{command} printed\n{output}"
    monkeypatch.delitem(sys.modules, "plain", raising=False)


def output_here(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
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
