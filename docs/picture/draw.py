"""Draw a run from its history: the step over time, the activity of each rank, and the failures.

holdfast run --workers 4 --save-every 40 --inject kill@90+210,rank=2 --out runs/a train.py
python docs/picture/draw.py runs/a run.svg
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path

from holdfast import read_history
from holdfast.events import Attempt, Commit, Detect, Event, Launch, Recover, Restart, Step

WIDTH, LEFT, RIGHT = 900, 70, 20
TOP, CURVE, LANE, GAP = 64, 170, 22, 34
TRAINED, AGAIN, STARTING, SAVED, FAILED = "#2b6cb0", "#b794f4", "#cbd5e0", "#2f855a", "#c53030"
TEXT = 'font-family="system-ui, sans-serif" font-size="12" fill="#2d3748"'


@dataclass(frozen=True)
class Stretch:
    """A time span of one rank: starting, training, or repeating steps that a failure had undone."""

    rank: int
    colour: str
    places: tuple[tuple[float, int], ...]  # times, and the number of steps trained by then

    @property
    def begin(self) -> float:
        return self.places[0][0]

    @property
    def end(self) -> float:
        return self.places[-1][0]


@dataclass(frozen=True)
class DrawnRun:
    """The contents of the picture, in seconds since the run was launched."""

    ranks: int
    wall: float
    steps: int
    stretches: list[Stretch]
    failures: list[tuple[float, int, str]]  # time, rank and kind
    saves: list[tuple[float, int]]  # time and step


def drawn_run(events: Sequence[Event]) -> DrawnRun:
    """Read the contents of the picture from a history."""
    start = min(event.time for event in events if isinstance(event.what, Launch))
    ranks = 1 + max(event.what.rank for event in events if isinstance(event.what, Attempt))
    stretches = [stretch for rank in range(ranks) for stretch in attempts(events, rank, start)]
    failures = [
        (event.time - start, event.what.rank, event.what.signal or event.what.kind)
        for event in events
        if isinstance(event.what, Detect) and event.what.rank >= 0
    ]
    saves = [
        (event.time - start, event.what.step)
        for event in events
        if isinstance(event.what, Commit) and not event.what.found
    ]
    wall = max(event.time for event in events) - start
    steps = max(stretch.places[-1][1] for stretch in stretches)
    return DrawnRun(ranks, wall, steps, stretches, failures, saves)


def attempts(events: Sequence[Event], rank: int, start: float) -> Iterator[Stretch]:
    """Yield the time spans of the attempts of one rank: starting, repeated steps, new steps."""
    furthest = 0
    begun = 0.0
    for event in events:
        what = event.what
        if isinstance(what, Launch | Restart):
            begun = event.time - start
        if event.who != f"rank-{rank}":
            continue
        if isinstance(what, Recover):
            steps = list(steps_of(events, rank, what.attempt, start))
            if steps:
                first, step, _ = steps[0]
                yield Stretch(rank, STARTING, ((begun, step), (first, step)))
                again = [one for one in steps if one[1] < furthest]
                for colour, trained in ((AGAIN, again), (TRAINED, steps[len(again) :])):
                    if trained:
                        places = (trained[0][:2], *((end, step + 1) for _, step, end in trained))
                        yield Stretch(rank, colour, places)
                furthest = max(furthest, steps[-1][1] + 1)


def steps_of(events: Sequence[Event], rank: int, attempt: int, start: float) -> Iterator[tuple[float, int, float]]:
    """Yield the begin, number and end of each step of an attempt."""
    for event in events:
        what = event.what
        if isinstance(what, Step) and what.rank == rank and what.attempt == attempt:
            took = what.seconds.data + what.seconds.compute
            yield event.time - start - took, what.step, event.time - start


def svg(run: DrawnRun) -> str:
    """Return the picture as SVG."""
    height = TOP + CURVE + GAP + run.ranks * LANE + 40
    parts = [*legend(), *axes(run), *curve(run), *lanes(run), *marks(run)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def x(run: DrawnRun, at: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * at / run.wall, 1)


def y(run: DrawnRun, step: int) -> float:
    return round(TOP + CURVE * (1 - step / run.steps), 1)


def lane(run: DrawnRun, rank: int) -> float:
    return TOP + CURVE + GAP + rank * LANE


def words(at_x: float, at_y: float, text: str, anchor: str = "start", colour: str = "#2d3748") -> str:
    style = TEXT.replace("#2d3748", colour)
    return f'<text x="{at_x}" y="{at_y}" text-anchor="{anchor}" {style}>{escape(text)}</text>'


def legend() -> Iterator[str]:
    kinds = (TRAINED, "training"), (AGAIN, "training again"), (STARTING, "starting, restoring")
    place = float(LEFT)
    for colour, text in kinds:
        yield f'<rect x="{place}" y="14" width="14" height="12" fill="{colour}"/>'
        yield words(place + 20, 24, text)
        place += 40 + 7 * len(text)
    yield f'<circle cx="{place + 7}" cy="20" r="4" fill="{SAVED}"/>' + words(place + 20, 24, "snapshot committed")
    yield cross(place + 177, 20) + words(place + 190, 24, "failure seen")


def axes(run: DrawnRun) -> Iterator[str]:
    bottom = lane(run, run.ranks)
    for step in ticks(run.steps):
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(run, step)}" y2="{y(run, step)}" stroke="#edf2f7"/>'
        yield words(LEFT - 8, y(run, step) + 4, f"step {step}", "end")
    for second in ticks(run.wall):
        yield words(x(run, second), bottom + 18, f"{second} s", "middle")


def ticks(end: float) -> range:
    """Return between four and ten round numbers up to `end`."""
    size = 10 ** int(log10(max(end, 10)) - 0.3)
    every = next(size * factor for factor in (1, 2, 5, 10, 20, 50) if end / (size * factor) < 10)
    return range(0, int(end) + 1, every)


def curve(run: DrawnRun) -> Iterator[str]:
    """Draw the step over time, which falls where a failure has undone steps."""
    before: Stretch | None = None
    for stretch in (stretch for stretch in run.stretches if stretch.rank == 0):
        if before is not None and stretch.colour == STARTING:
            yield line(run, [before.places[-1], (stretch.begin, before.places[-1][1]), stretch.places[0]], STARTING)
        yield line(run, stretch.places, stretch.colour)
        before = stretch


def line(run: DrawnRun, places: Sequence[tuple[float, int]], colour: str) -> str:
    points = " ".join(f"{x(run, at)},{y(run, step)}" for at, step in places)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="3" stroke-linejoin="round"/>'


def lanes(run: DrawnRun) -> Iterator[str]:
    for rank in range(run.ranks):
        yield words(LEFT - 8, lane(run, rank) + 14, f"rank {rank}", "end")
    for stretch in run.stretches:
        width = max(1.0, round(x(run, stretch.end) - x(run, stretch.begin), 1))
        yield (
            f'<rect x="{x(run, stretch.begin)}" y="{lane(run, stretch.rank) + 3}" width="{width}" height="{LANE - 6}" '
            f'fill="{stretch.colour}"/>'
        )


def marks(run: DrawnRun) -> Iterator[str]:
    for at, step in run.saves:
        yield f'<circle cx="{x(run, at)}" cy="{y(run, step)}" r="4" fill="{SAVED}"/>'
    bottom = lane(run, run.ranks)
    for at, rank, what in run.failures:
        yield (
            f'<line x1="{x(run, at)}" x2="{x(run, at)}" y1="{TOP - 8}" y2="{bottom}" stroke="{FAILED}" '
            'stroke-dasharray="3 3"/>'
        )
        yield cross(x(run, at), lane(run, rank) + LANE / 2)
        yield words(x(run, at), TOP - 14, f"rank {rank}: {what}", "middle", FAILED)


def cross(at_x: float, at_y: float) -> str:
    size = 5
    one = f"M{at_x - size} {at_y - size}L{at_x + size} {at_y + size}"
    other = f"M{at_x - size} {at_y + size}L{at_x + size} {at_y - size}"
    return f'<path d="{one}{other}" stroke="{FAILED}" stroke-width="2.5"/>'


if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    out.write_text(svg(drawn_run(read_history(folder).events)))
