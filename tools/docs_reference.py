"""Pages of the reference that are written from the source: all commands with their options, and all events."""

import ast
import inspect
import io
import re
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import typer

from holdfast import cli
from holdfast.events import any_run, server_run, training_run
from holdfast.events.fields import KINDS
from holdfast.events.training_run import Seconds
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

COMMANDS_PAGE, EVENTS_PAGE = "reference/commands.md", "reference/events.md"

COMMANDS_START = """# Commands

This page lists all commands with their options. `holdfast COMMAND --help` prints the same text. Most commands take the \
folder of a run as their argument. [Running](../running.md) explains when to use which command. [Exit statuses]\
(exit-statuses.md) lists what a command returns to the shell. The [glossary](glossary.md) explains words such as \
snapshot, rank, shard, replay and spare.
"""

EVENTS_START = """# Events

Supervisors and workers record what they do in history files. Every line of such a file is one event, a JSON object: \
`{"event": "step", "time": ..., "who": "rank-0", ...}`. This page lists all kinds of events with their fields. \
[Formats](../formats.md) describes the files. `hf.read_history("runs/a").events` reads the events. The [glossary]\
(glossary.md) explains words such as attempt, phase, shard and fingerprint.

An attempt is the time from one start of all workers to the next. The following fields are in many events:

| field | meaning |
|---|---|
| `event` | the kind of the event |
| `time` | when the event was written, in seconds since 1970 |
| `who` | the writer of the event: a rank or a supervisor; on the parameter server the controller, a node or a worker |
| `attempt` | the number of the attempt, from 1 |
| `rank` | the rank that the event is about |
| `world` | the number of workers that train |
| `step` | the number of the step in the whole run, from 0 |
| `epoch` | the number of the epoch, from 0 |
| `cursor` | the number of the step within the epoch, from 0 |
| `seconds` | how long the recorded action took |
"""

COMMON = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", EVENTS_START, flags=re.M)) | {
    "iteration": "the number of the iteration",
    "round": "the number of the round within the iteration",
    "version": "the version of the map that says which node holds which block",
}

EVERY_RUN = """Every run

These events are in the histories of training runs and of runs on the parameter server.
"""

TRAINING_RUNS = """Training runs

Ranks and supervisors of `holdfast run` write these events.
"""

SERVER_RUNS = """The parameter server

`holdfast serve train` writes these events. Nodes hold the blocks (numbered parts) of the model, and workers hold the \
parts of the input. An iteration has one or more rounds. In each round, the workers push updates to the nodes. The \
controller starts the rounds.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its whole name, such as `holdfast runs rm`."""

    def inside(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for word, member in command.commands.items():
                yield from inside(f"{name} {word}", member)
        else:
            yield name, command

    yield from inside("holdfast", typer.main.get_command(cli.app))


def commands_page() -> str:
    """Return a page with a section for every command."""
    return "\n".join([COMMANDS_START, *(_command(name, command) for name, command in commands())])


def events_page() -> str:
    """Return a page with a section for every kind of event."""
    titles = {any_run: EVERY_RUN, training_run: TRAINING_RUNS, server_run: SERVER_RUNS}
    parts = [EVENTS_START]
    for module, title in titles.items():
        fields = _fields(inspect.getsource(module))
        parts.append(f"## {title}\n")
        for name, kind in KINDS.items():
            if kind.__module__ == module.__name__:
                parts.append(_event(name, inspect.getdoc(kind) or "", fields[kind.__name__]))
    return "\n".join(parts)


def _command(name: str, command: Any) -> str:
    text, _, example = command.help.partition("Example: ")
    arguments = [param for param in command.params if not param.opts[0].startswith("-")]
    options = [param for param in command.params if param.opts[0].startswith("-") and not param.hidden]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_placeholder, arguments)])
    lines = [f"## {name}", "", " ".join(text.split()), "", "```text", usage, "```", ""]
    if example:
        lines += ["For example:", "", "```", example.strip(), "```", ""]
    types = typing.get_type_hints(inspect.unwrap(command.callback))
    if arguments:
        rows = [
            (f"`{_placeholder(param).strip('[]').replace('|', '` or `')}`", _described(param)) for param in arguments
        ]
        lines += _table("argument", rows)
    for panel in dict.fromkeys(param.rich_help_panel for param in options):
        members = [param for param in options if param.rich_help_panel == panel]
        rows = [(_option(param, types[param.name]), _described(param)) for param in members]
        lines += [*([f"**{panel}**", ""] if panel else []), *_table("option", rows)]
    return "\n".join(lines)


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[].")
    name += "..." if argument.nargs != 1 or argument.name.endswith("s") else ""
    return name if argument.required else f"[{name}]"


def _option(option: Any, annotation: Any) -> str:
    """Return the names of an option, with the kind of its value."""
    kinds = [kind for kind in _kinds(annotation) if kind is not type(None)]
    words = {int: " N", float: " NUMBER", str: " TEXT", Path: " PATH", bool: ""}
    value = next((words[kind] for kind in kinds if kind in words), " VALUE")
    return ", ".join(f"`{name}{value if name.startswith('--') else ''}`" for name in reversed(option.opts))


def _kinds(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (UnionType, typing.Union, list):
        for part in typing.get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _described(param: Any) -> str:
    """Return the help of a parameter, with its default if that says something."""
    text, _, default = " ".join(param.help.split()).removesuffix("]").partition(" [default: ")
    if isinstance(shown := getattr(param, "show_default", None), str):
        default = shown
    elif not default and param.default is not None and param.default is not False and param.default != "":
        default = f"`{param.default}`"
    required = " Required." if param.required and param.opts[0].startswith("-") else ""
    return _cell(text) + required + (f" Default: {_cell(default)}." if default else "")


def _event(name: str, doc: str, fields: list[tuple[str, str, str]]) -> str:
    rows = [(f"`{field}`", _cell(kind), _cell(comment or COMMON.get(field, ""))) for field, kind, comment in fields]
    text = " ".join(doc.removeprefix("Event: ").split())
    lines = [f"### {name}", "", text[0].upper() + text[1:], ""]
    return "\n".join(
        [*lines, "| field | type | meaning |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    )


def _fields(source: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return for every class of a module its fields, each with its type and the comment at the end of its line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return {
        node.name: [
            (statement.target.id, _type(statement), comments.get(statement.lineno, ""))
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        ]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _type(statement: ast.AnnAssign) -> str:
    words = {"int": "integer", "float": "number", "str": "text", "bool": "true or false", "None": "null"}
    text = ast.unparse(statement.annotation).strip("'\"")
    for item, plural in (("int", "integers"), ("str", "texts"), (r"Mapping\[str, JSON\]", "objects")):
        text = re.sub(rf"Sequence\[{item}\]", f"list of {plural}", text)
    text = re.sub(r"\b(int|float|str|bool|None)\b", lambda match: words[match[1]], text).replace(" | ", " or ")
    default = "" if statement.value is None else ", optional"
    for name, parts in _parts().items():
        text = re.sub(rf"\b{name}\b", parts, text)
    return text + default


def _parts() -> dict[str, str]:
    """Return how a history shows a value of each class with fields."""
    return {kind.__name__: f"{{{', '.join(typing.get_type_hints(kind))}}}" for kind in (Samples, Seconds, Stall)}


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {title} | meaning |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
