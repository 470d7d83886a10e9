"""How a run stands, on a terminal: how far it is, its numbers, its ranks, and what happened last."""

import time
from collections.abc import Iterator

from rich import filesize
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.watch.run_state import Now, RunState

MOST_RANKS = 16
STATES = {"trains": "bold cyan", "completed": "bold green", "preempted": "bold yellow"}


def line(seen: RunState, now: Now) -> str:
    """All of it in one line, where there is no terminal."""
    parts = [f"{now.folder}: {now.state}", f"step {_of_planned(seen)}", f"committed {seen.committed:,}"]
    parts += [f"goodput {now.goodput:.2f} steps/s"] if now.goodput is not None else []
    parts += [_count(seen.run.restarts, "restart"), _count(sum(seen.failures.values()), "failure")]
    return " · ".join(parts)


def screen(seen: RunState, now: Now, clock: float) -> RenderableType:
    """The run at this moment."""
    parts: list[RenderableType] = [_head(seen, now)]
    if seen.planned:
        parts.append(ProgressBar(total=seen.planned, completed=seen.reached, width=64))
    parts += [Text(), _numbers(seen, now)]
    if seen.ranks and not seen.served:
        parts += [Text(), _ranks(seen, now, clock)]
    if seen.happened:
        parts += [Text(), *_happened(seen)]
    return Padding(Group(*parts), (1, 1))


def _head(seen: RunState, now: Now) -> Text:
    share = f"  {seen.reached / seen.planned:.1%}" if seen.planned else ""
    state = Text(now.state, style=STATES.get(now.state, "bold red"))
    return Text.assemble((str(now.folder), "bold"), "  ", state, f"  step {_of_planned(seen)}{share}")


def _of_planned(seen: RunState) -> str:
    return f"{seen.reached:,}" + (f" of {seen.planned:,}" if seen.planned else "")


def _numbers(seen: RunState, now: Now) -> Table:
    table = Table.grid(padding=(0, 4, 0, 0))
    told = list(_told(seen, now))
    for begin in range(0, len(told), 4):
        table.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in told[begin : begin + 4]))
    return table


def _told(seen: RunState, now: Now) -> Iterator[tuple[str, str]]:
    yield "goodput", "-" if now.goodput is None else f"{now.goodput:.2f} steps/s"
    yield "now", "-" if seen.speed is None or not now.trains else f"{seen.speed:.2f} steps/s"
    yield "left", _left(seen.seconds_left) if now.trains and seen.seconds_left is not None else "-"
    yield "loss", "-" if seen.loss is None else f"{seen.loss:.5g}"
    yield "committed", f"{seen.committed:,}"
    yield "saves", f"{seen.saves} ({filesize.decimal(seen.saved_bytes)})"
    yield "stall", f"{seen.stalled:.1f} s"
    yield "workers", str(seen.served.workers if seen.served else seen.run.workers or len(seen.ranks))
    yield "restarts", str(seen.run.restarts)
    yield "failures", str(sum(seen.failures.values()))
    if seen.samples_lost:
        yield "samples lost", str(seen.samples_lost)


def _left(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"about {seconds / unit:.1f} {name}"
    return f"about {seconds:.0f} s"


def _ranks(seen: RunState, now: Now, clock: float) -> Table:
    table = Table("rank", "step", "behind", "heard", box=None, padding=(0, 3, 0, 0), header_style="dim")
    furthest = max(rank.step for rank in seen.ranks.values())
    shown = sorted(seen.ranks.items(), key=lambda item: (item[1].step, item[0]))[:MOST_RANKS]
    for number, rank in sorted(shown):
        behind = furthest - rank.step
        heard = f"{max(0.0, clock - rank.heard):.0f} s ago" if now.trains else ""
        style = "yellow" if behind > 1 else ""
        table.add_row(str(number), f"{rank.step:,}", str(behind) if behind else "", heard, style=style)
    if len(seen.ranks) > MOST_RANKS:
        table.caption = f"the {MOST_RANKS} of {len(seen.ranks)} ranks that are furthest behind"
    return table


def _happened(seen: RunState) -> Iterator[Text]:
    for moment, text in seen.happened:
        plain = "".join(
            each if each.isprintable() else " " for each in text
        )  # a stranger's text may hold control codes
        at = time.strftime("%H:%M:%S", time.localtime(moment))
        yield Text.assemble((f"{at}  ", "dim"), plain, no_wrap=True, overflow="ellipsis")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
