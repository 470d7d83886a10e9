"""The `holdfast` command: parse, call, print. Errors are one line; exit 1 is a failed verdict or claim, 2 bad input."""

import os
import sys
from typing import Any

import typer

from holdfast.cli.advise import advise
from holdfast.cli.audit import audit
from holdfast.cli.console import LAB, LOOK, TRAIN, ByWhatIsWanted, complain, forgotten_dashes
from holdfast.cli.cost import cost
from holdfast.cli.demo import demo
from holdfast.cli.export import export
from holdfast.cli.lab import lab
from holdfast.cli.rehearse import rehearse
from holdfast.cli.report import report
from holdfast.cli.run import run
from holdfast.cli.runs import logs, runs
from holdfast.cli.scale import scale
from holdfast.cli.serve import serve
from holdfast.cli.store import store
from holdfast.cli.watch import watch
from holdfast.errors import HoldfastError, Interrupted

app = typer.Typer(
    name="holdfast",
    cls=ByWhatIsWanted,
    help="Training that survives failures, proves that it did, and measures what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for commands in (run, audit, cost, advise, rehearse, scale, watch, report, logs, export, store, demo):
    app.add_typer(commands)
app.add_typer(runs, name="runs", rich_help_panel=LOOK)
app.add_typer(lab, name="lab", rich_help_panel=LAB)
app.add_typer(serve, name="serve", rich_help_panel=TRAIN)

INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__mro__[
    1
]  # whichever library parses for typer, this is the base of its usage errors


def main() -> None:
    """Run the command; everything that goes wrong on purpose is one line on stderr."""
    try:
        if (code := app(standalone_mode=False)) == INTERRUPTED:  # what typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
    except Interrupted as error:
        sys.exit(complain(str(error), code=INTERRUPTED))
    except HoldfastError as error:
        sys.exit(complain(str(error)))
    except _UsageError as error:
        hint = forgotten_dashes(sys.argv[1:], getattr(error, "option_name", None))
        sys.exit(complain(f"{error.format_message().rstrip('.')}. {hint or f'See `{_command(error)} --help`.'}"))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(complain("interrupted", code=INTERRUPTED))
    except BrokenPipeError:
        _print_no_more()
        sys.exit(1)
    except OSError as error:  # such as a full disk under the output
        _print_no_more()
        sys.exit(complain(f"the system refused: {error.strerror or error}."))
    sys.exit(code or 0)


def _command(error: Any) -> str:
    """The command that was used wrongly."""
    names, at = [], getattr(error, "ctx", None)
    while at is not None and at.parent is not None:
        names.append(at.info_name)
        at = at.parent
    return " ".join(["holdfast", *reversed(names)])


def _print_no_more() -> None:
    """Give up the output, or Python complains of it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
