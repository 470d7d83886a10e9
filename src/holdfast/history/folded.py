"""Reads the beginnings of history files, whose lines were moved into segments (folded).

The lines of a file up to some byte may be in segments, in the folder `segments` beside the file. Then these bytes of the
file are not read: they may be a hole. A file that is continued on another machine has another first line, by which a
segment knows its file.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import Corrupt, StorageFailed
from holdfast.events import Event
from holdfast.events import line as written
from holdfast.history.panel import StepPanel, digests_of, prove_block
from holdfast.history.segment import Columns, FoldedPart, HistorySegment
from holdfast.history.step_table import steps_of
from holdfast.sampler.run_plan import RunPlan

SEGMENTS = "segments"
FIRST_LINE = 1 << 16  # bytes; longer than any first line
_NAME = re.compile(r"(\d{6,})-rank-(\d+)-to-(\d+)\.npz", re.ASCII)
_RANK = re.compile(r"rank-(\d{1,18})\.jsonl", re.ASCII)
_OPEN = 4096  # segments that stay open; an open one takes some ten kilobytes


def segment_name(number: int, first_rank: int, last_rank: int) -> str:
    return f"{number:06d}-rank-{first_rank}-to-{last_rank}.npz"


def segments_in(folder: Path) -> list[tuple[int, int, int, Path]]:
    """Return (number, first rank, last rank, path) of each segment in the folder `folder`, the oldest first."""
    found = []
    for path in folder.glob("*.npz"):
        if match := _NAME.fullmatch(path.name):
            if not path.is_file():  # opening a pipe would block
                raise Corrupt(f"{path} is not a file: restore this segment of a history from a copy.")
            found.append((int(match[1]), int(match[2]), int(match[3]), path))
    return sorted(found)


def first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(FIRST_LINE)


def first_line_digest(path: Path) -> str | None:
    """Return a digest of the first line of a history file, which no other file has; None without a whole line."""
    line = first_line(path)
    return xxhash.xxh3_64_hexdigest(line) if line.endswith(b"\n") else None


class StepRun(NamedTuple):
    """Consecutive steps of one rank in a segment, which no other line interrupts."""

    segment: HistorySegment
    panel_number: int
    row: int
    start: int  # the index of its first step in the panel
    stop: int

    @property
    def panel(self) -> StepPanel:
        return self.segment.panels[self.panel_number]

    @property
    def who(self) -> str:
        return self.panel.rows[self.row].who

    @property
    def rank(self) -> int:
        return self.panel.rows[self.row].rank

    @property
    def tensor_parallel(self) -> int:
        """The number of ranks that trained the same samples, by the plan that the samples were compared with."""
        return self.panel.phase.tensor_parallel if self.panel.phase else 1

    @property
    def first(self) -> int:
        """The number of the first step."""
        return self.panel.first + self.start

    @property
    def steps(self) -> int:
        return self.stop - self.start

    def events(self) -> Iterator[Event]:
        """Yield the step events."""
        part = next(part for part in self.segment.parts if (self.panel_number, self.row) in part.rows)
        stretch = self.segment.stretch(part, part.rows.index((self.panel_number, self.row)))
        columns = {name: column[self.start : self.stop] for name, column in stretch.columns.items()}
        for time, step in steps_of(stretch._replace(first=self.first, columns=columns)):
            yield Event(time, self.who, step)

    def column(self, name: str) -> NDArray[Any]:
        """Return the values of the column `name` of the panel for these steps."""
        return self.derived(name, lambda stored: stored(name))

    def derived(self, name: str, compute: Callable[[Callable[[str], NDArray[Any]]], NDArray[Any]]) -> NDArray[Any]:
        """Return the values for these steps of what `compute` makes of columns of the panel, once for all of its rows."""
        columns = self.panel.columns
        assert isinstance(columns, Columns)
        made = self.segment.cached(f"{self.panel_number}/derived/{name}", lambda _: compute(columns.stored))
        return made[self.row if len(made) > 1 else 0, self.start : self.stop]

    def is_before(self, other: "StepRun") -> bool:
        """Return True if `other` continues these steps in the same row of the same panel."""
        return self[:3] == other[:3] and self.stop == other.start

    def joined(self, other: "StepRun") -> "StepRun":
        """Return these steps and those of `other`, which continue them."""
        return self._replace(stop=other.stop)

    def is_planned(self, plan: RunPlan) -> bool:
        """Return True if the samples of the steps were those of `plan` when they were folded."""
        panel, phase = self.panel, self.panel.phase
        if phase is None or not panel.planned[self.row]:
            return False
        number = plan.index(self.first)
        known = plan.phases[number]
        return (
            (phase.first, phase.samples, phase.batch, phase.seed)
            == (plan.first_steps[number], known.samples, known.batch, known.seed)
            and known.orders is None
            and self.first + self.steps <= plan.first_steps[number] + known.steps
        )

    def prove(self, block: int) -> None:
        """Compute the planned samples of a block of the row again; raise Corrupt if they are not those recorded."""
        self.segment.checked(lambda: prove_block(self.panel, self.row, block))

    def digests(self) -> NDArray[np.uint64]:
        """Return the recorded sample digests of the steps, two words for each."""
        return self.segment.checked(lambda: digests_of(self.panel, self.row))[self.start : self.stop]


class FoldedFile(NamedTuple):
    """The folded beginning of a history file: its parts in order. Beginning with byte `end`, its lines are in the file."""

    path: Path
    parts: tuple[tuple[HistorySegment, FoldedPart], ...] = ()

    @property
    def end(self) -> int:
        return self.parts[-1][1].end if self.parts else 0

    @property
    def lines(self) -> int:
        """The number of folded lines."""
        return sum(part.lines for _, part in self.parts)

    def items(self) -> Iterator[tuple[int, bytes | StepRun]]:
        """Yield (line number, line) for each line that is not a step, and (number of the first line, `StepRun`)."""
        for segment, part in self.parts:
            yield from items(segment, part)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of the file from `start` to `stop`, as they were written."""
        for segment, part in self.parts:
            if part.start < stop and part.end > start:
                data = b"".join(segment.lines(part))
                yield data[max(0, start - part.start) : stop - part.start]
        with self.path.open("rb") as file:
            at = max(start, self.end)
            file.seek(at)
            while at < stop and (data := file.read(min(1 << 22, stop - at))):
                at += len(data)
                yield data


def items(segment: HistorySegment, part: FoldedPart) -> Iterator[tuple[int, bytes | StepRun]]:
    """Yield the lines of one part, as `FoldedFile.items` does."""
    rows = [(panel, row, segment.panels[panel].rows[row].steps) for panel, row in part.rows]
    at, index, start = 0, 0, 0  # of the line; of the row, and of the step in it
    for place, text in [*segment.texts(part), (part.lines, b"")]:
        while at < place:
            if index >= len(rows):
                raise Corrupt(f"{segment.path} lacks lines of {part.who}: restore the file from a copy.")
            panel, row, steps = rows[index]
            count = min(place - at, steps - start)
            yield part.line + at, StepRun(segment, panel, row, start, start + count)
            at, start = at + count, start + count
            if start == steps:
                index, start = index + 1, 0
        if text:
            yield part.line + at, text
            at += 1


def numbered_lines(path: Path, longest: int) -> Iterator[tuple[int, bytes | StepRun]]:
    """Yield (line number, line) for each line of a history file; `StepRun` for the steps that were folded.

    Lines may be folded while they are read. A line of more than `longest` bytes is returned in pieces."""
    at, number = 0, 1
    while True:
        beginning = folded(path)
        for first, item in beginning.items():
            count = item.steps if isinstance(item, StepRun) else 1
            if first + count > number:
                skipped = number - first if isinstance(item, StepRun) else 0
                yield number, item._replace(start=item.start + skipped) if isinstance(item, StepRun) else item
                number = first + count
        at = max(at, beginning.end)
        with path.open("rb") as file:
            file.seek(at)
            for line in iter(lambda: file.readline(longest), b""):
                if b"\0" in line and folded(path).end > at:
                    break  # they were folded a moment ago
                yield number, line
                at, number = at + len(line), number + 1
            else:
                return


def newest_lines(segment: HistorySegment, part: FoldedPart, count: int) -> list[bytes]:
    """Return the lines of one part, but only the last `count` of its steps."""
    lines: list[bytes] = []
    left = sum(segment.panels[panel].rows[row].steps for panel, row in part.rows)
    for _, item in items(segment, part):
        if isinstance(item, bytes):
            lines.append(item)
            continue
        start = item.stop - min(item.steps, max(0, count - (left - item.steps)))
        left -= item.steps
        lines += [written(*event) for event in item._replace(start=start).events()] if start < item.stop else []
    return lines


def folded(path: Path) -> FoldedFile:
    """Return the folded beginning of the history file `path`, which may be empty."""
    known = {part.start: (segment, part) for segment, part in _parts(path)}
    parts: list[tuple[HistorySegment, FoldedPart]] = []
    end = 0
    while found := known.pop(end, None):
        parts.append(found)
        end = found[1].end
    if parts and path.stat().st_size < end:
        raise Corrupt(f"{path} is shorter than what its segments have of it: restore the file from a copy.")
    return FoldedFile(path, tuple(parts))


def folded_backwards(path: Path) -> Iterator[tuple[HistorySegment, FoldedPart]]:
    """Yield the parts of the folded beginning of `path`, the last one first; a segment is opened when it is needed."""
    end: int | None = None
    for segment, part in _parts(path):
        if end in (None, part.end):
            yield segment, part
            end = part.start


def _parts(path: Path) -> Iterator[tuple[HistorySegment, FoldedPart]]:
    """Yield the parts that segments have of the file `path`, the newest first."""
    folder = path.parent / SEGMENTS
    if (match := _RANK.fullmatch(path.name)) is None or not folder.is_dir():
        return
    try:
        rank, digest = int(match[1]), first_line_digest(path)
    except OSError as error:
        raise StorageFailed(f"cannot read the history {path}: {error.strerror or error}.") from error
    for _, first, last, name in reversed(segments_in(folder)):
        if first <= rank <= last:
            segment = _opened(name, name.stat().st_mtime_ns)
            yield from ((segment, part) for part in segment.parts if (part.who, part.file) == (path.stem, digest))


@lru_cache(_OPEN)
def _opened(path: Path, modified: int) -> HistorySegment:
    return HistorySegment(path)
