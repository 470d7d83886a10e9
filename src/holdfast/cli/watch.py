"""`holdfast watch`: follow a run in the terminal, in a browser, or as Prometheus metrics."""

import sys
import time
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from holdfast.cli.console import say
from holdfast.errors import BadInput
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.watch.run_state import RunWatcher

REFRESH = 0.5
PLAIN_REFRESH = 10.0


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    web: Annotated[bool, typer.Option("--web", help="Serve a live report page and /metrics on 127.0.0.1.")] = False,
    port: Annotated[int | None, typer.Option(help="Port for --web.  [default: any free port]")] = None,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print the current metrics once, in the Prometheus text format.")
    ] = False,
) -> None:
    """Show the progress of a RUN while it trains. Ctrl-C ends only this command. Example: holdfast watch runs/a --web"""
    if port is not None and not web:
        raise BadInput("--port needs --web: give both.")
    if web and prometheus:
        raise BadInput("--web and --prometheus cannot be combined: --web already serves /metrics.")
    if web:
        require("lab", "`holdfast watch --web`")
    from holdfast.watch import metrics
    from holdfast.watch.run_state import RunWatcher

    try:
        if web:
            _serve(run, port or 0)
        elif prometheus:
            sys.stdout.write(metrics.text(*RunWatcher(run).look()))
        elif (console := Console()).is_terminal:
            _follow_on_terminal(RunWatcher(run), console)
        else:
            _follow_in_lines(RunWatcher(run), console)
    except KeyboardInterrupt:
        return


def _serve(run: Path, port: int) -> None:
    from holdfast.cli.report import page_of
    from holdfast.lab.result import command_line
    from holdfast.watch import web

    site = web.Site(run, partial(page_of, [run], command_line(sys.argv[1:]), live=True))
    with web.served(site, port) as address:
        say(f"{address} shows {run}, {address}metrics its metrics; press Ctrl-C to end")
        sys.stdout.flush()
        web.follow(site, Event())


def _follow_on_terminal(watcher: "RunWatcher", console: Console) -> None:
    from holdfast.watch.screen import screen

    with Live(console=console, auto_refresh=False) as live:
        while True:
            run, now = watcher.look()
            live.update(screen(run, now, time.time()), refresh=True)
            if not now.trains:
                return
            time.sleep(REFRESH)


def _follow_in_lines(watcher: "RunWatcher", console: Console) -> None:
    """Print a status line every ten seconds, and the full status at the end; used if stdout is not a terminal."""
    from holdfast.watch.screen import line, screen

    run, now = watcher.look()
    printed = -PLAIN_REFRESH
    while now.trains:
        if time.monotonic() - printed >= PLAIN_REFRESH:
            printed = time.monotonic()
            say(line(run, now))
            sys.stdout.flush()
        time.sleep(REFRESH)
        run, now = watcher.look()
    console.print(screen(run, now, time.time()))
