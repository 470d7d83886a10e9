"""Every command in the documents is accepted by the real command-line parser."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from docs_links import documents

from holdfast import cli
from repository import ROOT

PAGES = [ROOT / path for path in documents()] + sorted(ROOT.glob("docs/**/*.md"))
SHELL = ("", "bash", "console", "sh", "text")


@cache
def whole_command() -> Any:
    return typer.main.get_command(cli.app)


def fenced(page: Path) -> str:
    """Return the text of all fenced blocks of a page that are commands of a shell."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.S | re.M)
    return "".join(text for language, text in blocks if language in SHELL)


def commands(text: str) -> list[list[str]]:
    """Return the words of every `holdfast ...` command in a text, with shell variables replaced by 1."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"(?:^|exec |-- )holdfast ((?!:)[a-z][^'#\n]*)", joined, flags=re.M)
    return [shlex.split(re.sub(r"\$\(\w+\)|\$\w+", "1", command)) for command in found]


def parse(words: list[str]) -> None:
    """Parse a command without running it."""
    command = whole_command()
    while hasattr(command, "commands"):
        name, *words = ["list", *words] if command.name == "runs" and words[:1] not in (["rm"], ["prune"]) else words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(name, words)


def inline(text: str) -> list[list[str]]:
    """Return the words of every command in the sentences of a page, such as `holdfast audit RUN`."""
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return [words.split() for words in re.findall(r"`holdfast ([a-z][^`\n]*)`", sentences)]


def unknown(words: list[str]) -> list[str]:
    """Return the words of a command in a sentence, which may leave out arguments, that no command or option has."""
    command = whole_command()
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and words and words[0].islower():
        return words[:1]
    options = {name for param in getattr(command, "params", ()) for name in param.opts}
    used = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    return [word for word in used if word.startswith("-") and word not in {*options, "--help", "..."}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_accepted(page: Path) -> None:
    for words in commands(fenced(page)):
        parse(words)
    sentences = "" if page.name == "CHANGELOG.md" else page.read_text()  # which names options that are gone
    assert [(words, wrong) for words in inline(sentences) if (wrong := unknown(words))] == []


def test_a_wrong_command_in_a_sentence_is_found() -> None:
    assert inline("use `holdfast run --workers 2` or\n```\n`holdfast no`\n```\n") == [["run", "--workers", "2"]]
    assert unknown(["run", "--wrokers", "2"]) == ["--wrokers"]
    assert unknown(["audti", "RUN"]) == ["audti"]
    assert unknown(["runs", "rm", "--yes"]) == unknown(["lab"]) == unknown(["run", "--", "--mine"]) == []


def test_commands_are_found_in_a_page() -> None:
    assert commands("ssh a 'exec holdfast run --workers 4 train.py' &\n  holdfast no\nholdfast cost a  # what\n") == [
        ["run", "--workers", "4", "train.py"],
        ["cost", "a"],
    ]
    assert len(commands(fenced(ROOT / "docs/clusters.md"))) == 7
    assert len(commands(fenced(ROOT / "README.md"))) == 3


def test_the_slurm_file_is_valid_and_its_command_is_accepted() -> None:
    file = ROOT / "docs/clusters/slurm.sh"
    subprocess.run(["bash", "-n", file], check=True, timeout=60)
    (words,) = commands(file.read_text())
    assert words[:3] == ["run", "--nnodes", "1"]
    parse(words)


def test_the_kubernetes_file_is_valid_and_its_command_is_accepted() -> None:
    service, job = yaml.safe_load_all((ROOT / "docs/clusters/kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, *words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    assert name == "holdfast"
    parse(words)
    assert f"--nnodes={job['spec']['completions']}" in words
    assert service["metadata"]["name"] == pod["subdomain"] == service["spec"]["selector"]["job-name"]
