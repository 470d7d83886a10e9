"""The `holdfast` command. An error is one line on stderr; the exit status is 1 if a check fails, 2 for bad input."""

import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer

from holdfast import __version__
from holdfast.cli.advise import advise
from holdfast.cli.audit import audit
from holdfast.cli.compare import compare
from holdfast.cli.console import complain, missing_separator_hint
from holdfast.cli.cost import cost
from holdfast.cli.demo import demo
from holdfast.cli.export import export
from holdfast.cli.lab import lab
from holdfast.cli.logs import logs
from holdfast.cli.rehearse import rehearse
from holdfast.cli.report import report
from holdfast.cli.run import run
from holdfast.cli.runs import runs
from holdfast.cli.scale import scale
from holdfast.cli.serve import serve
from holdfast.cli.store import inspect, verify
from holdfast.cli.watch import watch
from holdfast.errors import HoldfastError, Interrupted

app = typer.Typer(
    name="holdfast",
    help="Training that survives failures, proves that it did, and measures what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PANELS: dict[str, list[Callable[..., None]]] = {
    "Train": [run, scale],
    "Look": [cost, advise, watch, report, logs],
    "Prove": [audit, rehearse, compare],
    "Store": [export, inspect, verify],
    "Lab": [demo],
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(runs, name="runs", rich_help_panel="Look")
app.add_typer(lab, name="lab", rich_help_panel="Lab")
app.add_typer(serve, name="serve", rich_help_panel="Train")

INTERRUPTED = 130


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the versions of holdfast and torch."
        ),
    ] = False,
) -> None:
    pass


_UsageError: Any = typer.BadParameter.__mro__[1]  # the usage error of the parser library that typer uses


def main() -> None:
    """Run the `holdfast` command line and exit with its status; print expected errors as one line on stderr."""
    try:
        if (code := app(standalone_mode=False)) == INTERRUPTED:  # typer returns this after Ctrl-C
            raise KeyboardInterrupt
    except Interrupted as error:
        sys.exit(complain(str(error), code=INTERRUPTED))
    except HoldfastError as error:
        sys.exit(complain(str(error)))
    except _UsageError as error:
        hint = missing_separator_hint(sys.argv[1:], getattr(error, "option_name", None))
        sys.exit(complain(f"{error.format_message().rstrip('.')}. {hint or f'See `{_command(error)} --help`.'}"))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(complain("interrupted", code=INTERRUPTED))
    except BrokenPipeError:
        _close_stdout()
        sys.exit(1)
    except OSError as error:  # such as a full disk under the output
        _close_stdout()
        sys.exit(complain(f"the operating system reported: {error.strerror or error}."))
    sys.exit(code or 0)


def _command(error: Any) -> str:
    names, context = [], getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.append(context.info_name)
        context = context.parent
    return " ".join(["holdfast", *reversed(names)])


def _close_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python does not report a closed pipe again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
