"""The state of a run on a terminal: its progress, main numbers, ranks and latest events."""

import time
from collections.abc import Iterator

from rich import filesize
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.finding import counted
from holdfast.printable import printable
from holdfast.watch.run_state import CurrentState, RunState

MOST_RANKS = 16
STATES = {"trains": "bold cyan", "completed": "bold green", "preempted": "bold yellow"}


def line(run: RunState, now: CurrentState) -> str:
    parts = [f"{now.folder}: {now.state}", _progress(run), f"committed {run.committed:,}"]
    parts += [f"goodput {now.goodput:.2f} steps/s"] if now.goodput is not None else []
    parts += [counted(run.lineage.restarts, "restart"), counted(sum(run.failures.values()), "failure")]
    return " · ".join(parts)


def screen(run: RunState, now: CurrentState, clock: float) -> RenderableType:
    """Return the state of the run for display in a terminal; `clock` is the present time in seconds since 1970."""
    share = f"  {run.reached / run.planned:.1%}" if run.planned else ""
    state = Text(now.state, style=STATES.get(now.state, "bold red"))
    head = Text.assemble((printable(str(now.folder)), "bold"), "  ", state, f"  {_progress(run)}{share}")
    numbers = Table.grid(padding=(0, 4, 0, 0))
    pairs = [Text.assemble((f"{name} ", "dim"), value) for name, value in _pairs(run, now)]
    for begin in range(0, len(pairs), 4):
        numbers.add_row(*pairs[begin : begin + 4])
    parts: list[RenderableType] = [head]
    if run.planned:
        parts.append(ProgressBar(total=run.planned, completed=run.reached, width=64))
    parts += [Text(), numbers]
    if run.ranks and not run.served:
        parts += [Text(), _ranks(run, now, clock)]
    if run.latest:
        parts += [Text(), *_latest(run)]
    return Padding(Group(*parts), (1, 1))


def _progress(run: RunState) -> str:
    word = "iteration" if run.served else "step"
    return f"{word} {run.reached:,}" + (f" of {run.planned:,}" if run.planned else "")


def _pairs(run: RunState, now: CurrentState) -> Iterator[tuple[str, str]]:
    yield "goodput", "-" if now.goodput is None else f"{now.goodput:.2f} steps/s"
    yield "now", "-" if run.speed is None or not now.trains else f"{run.speed:.2f} steps/s"
    yield "left", _left(run.seconds_left) if now.trains and run.seconds_left is not None else "-"
    yield "loss", "-" if run.loss is None else f"{run.loss:.5g}"
    yield "committed", f"{run.committed:,}"
    yield "saves", f"{run.saves} ({filesize.decimal(run.saved_bytes)})"
    yield "stall", f"{run.stalled:.1f} s"
    yield "workers", str(run.served.workers if run.served else run.lineage.workers or len(run.ranks))
    yield "restarts", str(run.lineage.restarts)
    yield "failures", str(sum(run.failures.values()))
    if run.samples_lost:
        yield "samples lost", str(run.samples_lost)


def _left(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"about {seconds / unit:.1f} {name}"
    return f"about {seconds:.0f} s"


def _ranks(run: RunState, now: CurrentState, clock: float) -> Table:
    table = Table("rank", "step", "behind", "heard", box=None, padding=(0, 3, 0, 0), header_style="dim")
    furthest = max(rank.step for rank in run.ranks.values())
    shown = sorted(run.ranks.items(), key=lambda item: (item[1].step, item[0]))[:MOST_RANKS]
    for number, rank in sorted(shown):
        behind = furthest - rank.step
        heard = f"{max(0.0, clock - rank.heard):.0f} s ago" if now.trains else ""
        style = "yellow" if behind > 1 else ""
        table.add_row(str(number), f"{rank.step:,}", str(behind) if behind else "", heard, style=style)
    if len(run.ranks) > MOST_RANKS:
        table.caption = f"the {MOST_RANKS} of {len(run.ranks)} ranks that are furthest behind"
    return table


def _latest(run: RunState) -> Iterator[Text]:
    for moment, text in run.latest:
        at = time.strftime("%H:%M:%S", time.localtime(moment))
        yield Text.assemble((f"{at}  ", "dim"), printable(text), no_wrap=True, overflow="ellipsis")
