"""Simplification of drawings: merge bars, points and marks that are too close to be distinguished."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

STEPS_APART = 4.0  # two neighbours of the same kind stay separate if each is this many times the least width


class TimelineBar(NamedTuple):
    """A bar in a timeline: one activity of a rank, from `begin` to `end` in seconds."""

    begin: float
    end: float
    kind: str

    @property
    def length(self) -> float:
        return self.end - self.begin


Point: TypeAlias = tuple[float, float]


def thinned(pieces: Iterable[TimelineBar], least: float) -> list[TimelineBar]:
    """Merge bars that are shorter than `least` seconds with their neighbours; `pieces` are sorted by time.

    A merged bar has the kind that takes most of its time. Neighbours of the same kind are also merged, unless both are
    long."""
    joined: list[TimelineBar] = []
    for piece in _gathered(pieces, least):
        last = joined[-1] if joined else None
        if (
            last
            and last.kind == piece.kind
            and piece.begin - last.end < least
            and min(last.length, piece.length) < STEPS_APART * least
        ):
            joined[-1] = TimelineBar(last.begin, max(last.end, piece.end), piece.kind)
        else:
            joined.append(piece)
    return joined


def _gathered(pieces: Iterable[TimelineBar], least: float) -> Iterator[TimelineBar]:
    """Yield bars of `least` seconds or more unchanged, and merge shorter neighbours into bars of about that length."""
    short: list[TimelineBar] = []
    for piece in pieces:
        if short and (piece.length >= least or piece.begin - short[-1].end >= least):
            yield _merged(short)
            short = []
        if piece.length >= least:
            yield piece
            continue
        short.append(piece)
        if piece.end - short[0].begin >= least:
            yield _merged(short)
            short = []
    if short:
        yield _merged(short)


def _merged(pieces: Sequence[TimelineBar]) -> TimelineBar:
    lengths: dict[str, float] = {}
    for piece in pieces:
        lengths[piece.kind] = lengths.get(piece.kind, 0.0) + piece.length
    return TimelineBar(pieces[0].begin, max(piece.end for piece in pieces), max(lengths, key=lengths.__getitem__))


def thinned_line(points: Sequence[Point], columns: int) -> list[Point]:
    """Keep only the first, last, lowest and highest point of a line in each of `columns` equally wide columns."""
    if len(points) <= columns:
        return list(points)
    left, right = points[0][0], points[-1][0]
    width = (right - left) / columns or 1.0
    kept: list[Point] = []
    column: list[Point] = []
    number = 0
    for point in points:
        place = min(int((point[0] - left) / width), columns - 1)
        if place != number:
            kept += _outline(column)
            column, number = [], place
        column.append(point)
    return kept + _outline(column)


def _outline(points: Sequence[Point]) -> list[Point]:
    if len(points) <= 4:
        return list(points)
    inner = {min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])}
    return sorted({points[0], points[-1], *inner})
