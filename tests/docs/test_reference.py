"""The reference has every public name, command, option, event, exit status, environment variable and word."""

import re
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import typer
from docs_reference import commands_page, events_page

import holdfast
from holdfast import cli
from holdfast.events.fields import KINDS
from holdfast.process import PREEMPTED
from holdfast.supervise.verdict import _EXIT_CODES
from repository import ROOT

REFERENCE = ROOT / "docs/reference"
API = "".join(path.read_text() for path in REFERENCE.glob("api-*.md"))
DESCRIBED = re.findall(r"^::: (holdfast[\w.]*)", API, flags=re.M)
PACKAGES = ("blocks", "lab", "supervise", "theory")


def test_every_public_name_is_in_the_api_reference() -> None:
    names = {f"holdfast.{name}" for name in holdfast.__all__ if name not in PACKAGES}
    names |= {f"holdfast.{package}.{name}" for package in PACKAGES for name in getattr(holdfast, package).__all__}
    assert len(names) > 50
    assert names - {*DESCRIBED} == set()


@pytest.mark.parametrize("name", [name for name in DESCRIBED if "trainers" not in name])  # trainers are slow to import
def test_every_name_of_the_api_reference_exists(name: str) -> None:
    module, _, member = name.rpartition(".")
    value = getattr(import_module(module), member)
    assert value.__doc__ or not isinstance(value, type | FunctionType)


def test_every_command_is_in_the_reference_with_all_of_its_options_and_arguments() -> None:
    sections = dict(re.findall(r"^## (holdfast [\w ]+)\n(.*?)(?=^## |\Z)", commands_page(), flags=re.S | re.M))
    missing = []

    def look(name: str, command: object) -> None:
        for word, member in getattr(command, "commands", {}).items():
            look(f"{name} {word}", member)
        if not hasattr(command, "commands"):
            assert name in sections
            for param in getattr(command, "params"):  # noqa: B009
                placeholder = (param.metavar or param.name.upper()).strip("[].")
                words = param.opts if param.opts[0].startswith("-") else placeholder.split("|")
                missing.extend(f"{name}: {word}" for word in words if not re.search(rf"`{word}\b", sections[name]))
                assert param.help

    look("holdfast", typer.main.get_command(cli.app))
    assert len(sections) > 20
    assert missing == []


def test_the_values_and_defaults_of_options_are_shown() -> None:
    page = commands_page()
    for row in (
        "| `--workers N` | Worker processes on this node. Default: `1`. |",
        "| `--node-rank N` | Number of this node, counted from 0. Default: `0`. |",
        "| `--module`, `-m` | SCRIPT is the name",
        "| `--out PATH` | Folder of the run. Default: runs/SCRIPT. |",
        "| `--workers N` | Number of workers that train; the others are suspended. Required. |",
        "| `--steps N` | Steps to train. Default: two epochs and a half, at most 100 steps. |",
    ):
        assert row in page


def test_every_event_is_in_the_reference_with_all_of_its_fields() -> None:
    page = events_page()
    for name, kind in KINDS.items():
        section = page.partition(f"\n### {name}\n")[2].partition("\n#")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, flags=re.M) == [*kind._fields]
    assert "| `seconds` | {data, compute, stall, device} |" in page


def test_the_exit_statuses_of_a_run_are_those_of_the_source() -> None:
    table = (REFERENCE / "exit-statuses.md").read_text().partition("## holdfast run\n")[2].partition("\n## ")[0]
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", table, flags=re.M)}
    assert documented == {*_EXIT_CODES.values(), 3}
    assert PREEMPTED in documented


def test_every_environment_variable_of_the_source_is_in_the_reference() -> None:
    source = Path(holdfast.__file__).parent
    used = {name for path in source.rglob("*.py") for name in re.findall(r"\"(HOLDFAST_[A-Z]+)\"", path.read_text())}
    documented = {*re.findall(r"`(HOLDFAST_[A-Z]+)`", (REFERENCE / "environment.md").read_text())}
    assert used == documented


def test_the_glossary_is_in_order_and_has_the_words_of_the_architecture() -> None:
    words = re.findall(r"^\| ([a-z][\w ()]*?) \|", (REFERENCE / "glossary.md").read_text(), flags=re.M)[1:]
    assert words == sorted(words)
    table = (ROOT / "docs/architecture.md").read_text().partition("## Words\n")[2].partition("\n## ")[0]
    other = {word for row in re.findall(r"^\| ([a-z].*?) \|", table, flags=re.M)[1:] for word in row.split(", ")}
    assert other - {word.partition(" (")[0] for word in words} == set()
