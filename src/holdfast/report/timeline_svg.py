"""The timeline of a run as SVG: a curve of training progress, and below it one bar for the activity of each rank.

Horizontal positions are percentages, so that the picture fits any page width while its text keeps its size. Colours are
CSS variables of the page.
"""

from collections.abc import Iterator, Sequence
from html import escape
from math import log10

from holdfast.finding import counted
from holdfast.report.activity import KINDS, Activity
from holdfast.report.thinning import TimelineBar, thinned, thinned_line, thinned_marks

COLUMNS = 1000  # horizontal resolution: more than a reader can tell apart
TOP, CURVE, GAP, LANE, BAR, FOOT = 26, 150, 22, 24, 14, 30
LEFT, RIGHT = 64, 12
MOST_LANES = 32
MOST_NAMED = 6  # failures with a label of their own
MOST_DOTS = 24  # snapshots with a large dot
ROOM = 0.1  # width of a label on a wide page, as a part of the width
ROUND = (
    *(unit * size for size in (0.001, 0.01, 0.1, 1.0) for unit in (1, 2, 5)),
    *(10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0),
    *(3600.0 * hours for hours in (1, 2, 4, 6, 12, 24)),
)
WORDS = {
    "train": "training",
    "undone": "training undone by a failure",
    "wait": "waiting for a save",
    "recover": "starting or recovering",
}
# The light colours of the page, for a file outside it.
LIGHT = {
    **{"--train": "#3b6fd4", "--undone": "#a78bda", "--wait": "#e0a32e", "--recover": "#a9b1bd"},
    **{"--good": "#18794e", "--bad": "#c0362c", "--line": "#e3e6ea", "--muted": "#5b6470", "--card": "#ffffff"},
}


def timeline(run: Activity) -> str:
    """Return the timeline of a run as an SVG element for an HTML page."""
    label = escape(described(run), quote=True)
    return (
        f'<svg class="timeline" role="img" aria-label="{label}" width="100%" height="{_height(run)}" '
        f'style="overflow:visible">{"".join(_parts(run))}</svg>'
    )


def standalone(run: Activity, width: int = 960) -> str:
    """Return the timeline of a run as the text of an SVG file that is `width` pixels wide."""
    style = "text{font:12px system-ui,sans-serif}" + "svg{" + "".join(f"{k}:{v};" for k, v in LIGHT.items()) + "}"
    inner = width - LEFT - RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_height(run)}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/><title>{escape(described(run))}</title>'
        f'<svg x="{LEFT}" width="{inner}" height="{_height(run)}" overflow="visible">{"".join(_parts(run))}</svg></svg>\n'
    )


def described(run: Activity) -> str:
    """Return a sentence that describes the timeline: its ranks, duration, steps, snapshots and failures."""
    failures = [f"{mark.text} of rank {mark.rank} after {duration(mark.at)}" for mark in run.failures[:MOST_NAMED]]
    more = f" and {len(run.failures) - MOST_NAMED} more" if len(run.failures) > MOST_NAMED else ""
    parts = [
        f"{counted(len(run.lanes), 'rank')} over {duration(run.wall)}",
        f"{run.reached:,} steps",
        counted(len(run.saves), "snapshot"),
        f"{counted(len(run.failures), 'failure')} ({', '.join(failures)}{more})" if failures else "nothing failed",
    ]
    return ", ".join(parts) + "."


def left_out(run: Activity) -> str:
    """Return sentences on what the timeline merges or omits; an empty string if it shows everything."""
    sentences = []
    pieces = sum(len(lane) for lane in run.lanes.values())
    least = run.wall / COLUMNS
    if sum(len(thinned(lane, least)) for lane in run.lanes.values()) < pieces:
        sentences.append(f"Pieces shorter than {duration(least)} are merged with their neighbours.")
    if len(run.lanes) > MOST_LANES:
        sentences.append(f"Only {MOST_LANES} of {len(run.lanes)} ranks are shown, the failed ones first.")
    return " ".join(sentences)


def duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _height(run: Activity) -> int:
    return TOP + CURVE + GAP + LANE * len(_shown(run)) + FOOT


def _shown(run: Activity) -> list[int]:
    failed = {mark.rank for mark in run.failures}
    ranks = sorted(run.lanes, key=lambda rank: (rank not in failed, rank))[:MOST_LANES]
    return sorted(ranks)


def _parts(run: Activity) -> Iterator[str]:
    yield from _grid(run)
    yield from _curve(run)
    yield from _lanes(run)
    yield from _marks(run)


def _x(run: Activity, at: float) -> str:
    return f"{100 * at / (run.wall or 1.0):.2f}%"


def _y(run: Activity, step: float) -> float:
    return round(TOP + CURVE * (1 - step / (run.reached or 1)), 1)


def _text(x: str, y: float, text: str, anchor: str = "start", more: str = 'fill="var(--muted)"') -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _grid(run: Activity) -> Iterator[str]:
    bottom = TOP + CURVE + GAP + LANE * len(_shown(run))
    for step in _ticks(run.reached, 4):
        yield f'<line x1="0" x2="100%" y1="{_y(run, step)}" y2="{_y(run, step)}" stroke="var(--line)"/>'
        yield _text("-10", _y(run, step) + 4, f"{step / 1000:g}k" if step >= 10000 else f"{step:g}", "end")
    yield _text("-10", TOP - 16, "steps", "end")
    for second in _seconds(run.wall, 5):
        if second <= 0.97 * run.wall:
            yield _text(_x(run, second), bottom + 20, _moment(second), "middle" if second else "start")


def _moment(seconds: float) -> str:
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def _ticks(end: float, most: int) -> list[float]:
    sizes = [unit * 10**power for power in range(int(log10(max(end, 1))) + 1) for unit in (1, 2, 5)]
    every = next((size for size in sizes if end / size <= most), sizes[-1])
    return [every * number for number in range(int(end / every) + 1)]


def _seconds(end: float, most: int) -> list[float]:
    every = next((size for size in ROUND if end / size <= most), None)
    every = every or 86400.0 * _ticks(end / 86400.0, most)[1]
    return [round(every * number, 3) for number in range(int(end / every) + 1)]


def _curve(run: Activity) -> Iterator[str]:
    yield (
        f'<svg x="0" y="{TOP}" width="100%" height="{CURVE}" viewBox="0 0 {COLUMNS} {CURVE}" '
        'preserveAspectRatio="none" overflow="visible">'
    )
    for before, line in zip([None, *run.lines], run.lines, strict=False):
        if before is not None:
            ends = (before.points[-1], line.points[0])
            yield _path(run, ends, "var(--recover)", ' stroke-dasharray="2 3"')
        yield _path(run, thinned_line(line.points, COLUMNS // 2), "var(--train)" if line.kept else "var(--undone)", "")
    yield "</svg>"


def _path(run: Activity, points: Sequence[tuple[float, float]], colour: str, more: str) -> str:
    wall, reached = run.wall or 1.0, run.reached or 1
    places = (f"{COLUMNS * at / wall:.1f} {CURVE * (1 - step / reached):.1f}" for at, step in points)
    return (
        f'<path d="M{"L".join(places)}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round" '
        f'stroke-linecap="round" vector-effect="non-scaling-stroke"{more}/>'
    )


def _lanes(run: Activity) -> Iterator[str]:
    for place, rank in enumerate(_shown(run)):
        top = TOP + CURVE + GAP + LANE * place
        yield _text("-10", top + BAR - 2, f"rank {rank}", "end")
        yield f'<rect x="0" y="{top}" width="100%" height="{BAR}" rx="3" fill="var(--line)" opacity="0.55"/>'
        yield (
            f'<svg x="0" y="{top}" width="100%" height="{BAR}" viewBox="0 0 {COLUMNS} {BAR}" preserveAspectRatio="none">'
        )
        pieces = thinned(run.lanes[rank], run.wall / COLUMNS)
        for kind in KINDS:
            if shapes := "".join(_shape(run, piece) for piece in pieces if piece.kind == kind):
                yield f'<path d="{shapes}" fill="var(--{kind})"/>'
        yield "</svg>"


def _shape(run: Activity, piece: TimelineBar) -> str:
    scale = COLUMNS / (run.wall or 1.0)
    width = piece.length * scale
    width -= 0.8 if width >= 4 else 0
    return f"M{piece.begin * scale:.1f} 0h{max(width, 0.5):.1f}v{BAR}h-{max(width, 0.5):.1f}z"


def _marks(run: Activity) -> Iterator[str]:
    yield from _saves(run)
    bottom = TOP + CURVE + GAP + LANE * len(_shown(run)) - (LANE - BAR)
    places = {rank: TOP + CURVE + GAP + LANE * place + BAR / 2 for place, rank in enumerate(_shown(run))}
    for mark in run.failures:
        x = _x(run, mark.at)
        title = f"rank {mark.rank}: {mark.text} in step {mark.step}, after {duration(mark.at)}"
        yield f"<g><title>{escape(title)}</title>"
        yield f'<line x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom}" stroke="var(--bad)" stroke-dasharray="2 3"/>'
        if mark.rank in places:
            y = places[mark.rank]
            yield f'<circle cx="{x}" cy="{y}" r="8" fill="var(--card)" stroke="var(--bad)" stroke-width="2"/>'
            # A letter, because two crossing lines cannot be placed by a single percentage.
            yield f'<text x="{x}" y="{y + 4.5}" text-anchor="middle" fill="var(--bad)" font-weight="700">×</text>'
        yield "</g>"
    yield from _names(run)


def _names(run: Activity) -> Iterator[str]:
    """Yield SVG labels for the failures, but leave out labels that would overlap others."""
    if len(run.failures) > MOST_NAMED:
        return
    free = -1.0
    for mark in run.failures:
        place = mark.at / (run.wall or 1.0)
        if place >= free:
            free = place + ROOM
            anchor = "end" if place > 1 - ROOM else "start" if place < ROOM else "middle"
            more = 'class="named" fill="var(--bad)"'
            yield _text(_x(run, mark.at), TOP - 12, f"rank {mark.rank}: {mark.text}", anchor, more)


def _saves(run: Activity) -> Iterator[str]:
    """Yield an SVG dot for each snapshot; snapshots that are close together share one dot."""
    steps = {mark.at: mark.step for mark in run.saves}
    marks = thinned_marks([mark.at for mark in run.saves], 10 * run.wall / COLUMNS)
    radius = 4 if len(marks) <= MOST_DOTS else 2.5
    for at, count in marks:
        text = f"snapshot of step {steps[at]}" + (f", and {count - 1} more soon after it" if count > 1 else "")
        yield (
            f'<circle cx="{_x(run, at)}" cy="{_y(run, steps[at])}" r="{radius}" fill="var(--good)" stroke="var(--card)" '
            f'stroke-width="1"><title>{text}, after {duration(at)}</title></circle>'
        )
