"""Step events as columns: the lines of steps are read into arrays, and written again byte for byte.

Only lines as holdfast writes them become rows, because only they can be written again exactly. All other lines are kept
as text.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.events import LONGEST, Seconds, Step, step_line
from holdfast.sampler.digest import Samples

_NUMBER, _FLOAT = rb"(\d{1,18})", rb"(-?\d[\d.e+-]*)"
_LINE = re.compile(
    rb'\{"event": "step", "time": %(f)b, "who": "(rank-\d{1,18})", "attempt": %(n)b, "world": %(n)b, "rank": %(n)b, '
    rb'"epoch": %(n)b, "cursor": %(n)b, "step": %(n)b, "samples": \{"count": %(n)b, "digest": "([0-9a-f]{32})"\}, '
    rb'"seconds": \{"data": %(f)b, "compute": %(f)b, "stall": %(f)b(, "device": true)?\}'
    rb'(?:, "state": "([0-9a-f]{32})")?(?:, "reduced": %(n)b)?(?:, "held": %(n)b)?(?:, "stepped": %(n)b)?'
    rb'(?:, "loss": %(f)b)?\}\n' % {b"n": _NUMBER, b"f": _FLOAT}
)
# The columns of a table, each with its dtype. Times are in seconds; a digest and a fingerprint take two words each.
COLUMNS: dict[str, type[Any]] = {
    "time": np.float64,
    "epoch": np.int64,
    "cursor": np.int64,
    "count": np.int64,
    "digest_high": np.uint64,
    "digest_low": np.uint64,
    "data": np.float64,
    "compute": np.float64,
    "stall": np.float64,
    "device": np.int64,
    "has_state": np.int64,
    "shared": np.uint64,  # the half of the fingerprint that covers what all ranks share
    "own": np.uint64,
    "reduced": np.int64,
    "held": np.int64,
    "stepped": np.int64,
    "has_loss": np.int64,
    "loss": np.float64,
}
Columns = dict[str, NDArray[Any]]


class Stretch(NamedTuple):
    """Consecutive steps of one rank in one attempt: the constant fields, and one array for each other field."""

    who: str
    attempt: int
    world: int
    rank: int
    first: int  # step
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["time"])


class _Row(NamedTuple):
    place: tuple[str, int, int, int]
    step: int
    values: tuple[Any, ...]  # in the order of COLUMNS


def read_row(line: bytes, who: str) -> _Row | None:
    """Return the step event in `line` as a row; None if it is another event, or was not written like this by `who`."""
    if (match := _LINE.fullmatch(line)) is None:
        return None
    (time, name, attempt, world, rank, epoch, cursor, step, count, digest, data, compute, stall, device) = (
        match.groups()[:14]
    )
    state, reduced, held, stepped, loss = match.groups()[14:]
    if name.decode() != who:
        return None
    values = (
        float(time),
        int(epoch),
        int(cursor),
        int(count),
        int(digest[:16], 16),
        int(digest[16:], 16),
        float(data),
        float(compute),
        float(stall),
        int(device is not None),
        int(state is not None),
        int(state[:16], 16) if state else 0,
        int(state[16:], 16) if state else 0,
        int(reduced or 0),
        int(held or 0),
        int(stepped or 0),
        int(loss is not None),
        float(loss or 0.0),
    )
    if not 0 <= values[0] <= LONGEST or max(map(abs, values[6:9])) > LONGEST:  # no valid event
        return None
    row = _Row((who, int(attempt), int(world), int(rank)), int(step), values)
    return row if _written(row) == line else None


def _written(row: _Row) -> bytes | None:
    return step_line(row.values[0], row.place[0], _step(row.place, row.step, row.values))


def _step(place: tuple[str, int, int, int], step: int, values: Sequence[Any]) -> Step:
    _, attempt, world, rank = place
    (_, epoch, cursor, count, high, low, data, compute, stall, device) = values[:10]
    has_state, shared, own, reduced, held, stepped, has_loss, loss = values[10:]
    return Step(
        attempt,
        world,
        rank,
        epoch,
        cursor,
        step,
        Samples(count, f"{high:016x}{low:016x}"),
        Seconds(data, compute, stall, bool(device)),
        f"{shared:016x}{own:016x}" if has_state else None,
        reduced,
        held,
        stepped,
        loss if has_loss else None,
    )


class StretchBuilder:
    """Collects the rows of one file, and divides them into stretches of consecutive steps."""

    def __init__(self) -> None:
        self._stretches: list[list[_Row]] = []

    def add(self, row: _Row) -> None:
        last = self._stretches[-1][-1] if self._stretches else None
        if last is None or last.place != row.place or last.step + 1 != row.step:
            self._stretches.append([])
        self._stretches[-1].append(row)

    def stretches(self) -> list[Stretch]:
        return [Stretch(*rows[0].place, rows[0].step, _columns(rows)) for rows in self._stretches]


def _columns(rows: Sequence[_Row]) -> Columns:
    values = zip(*(row.values for row in rows), strict=True)
    return {name: np.array(column, dtype) for (name, dtype), column in zip(COLUMNS.items(), values, strict=True)}


def steps_of(stretch: Stretch) -> Iterator[tuple[float, Step]]:
    """Yield (time, event) for each step of `stretch`."""
    columns = [stretch.columns[name].tolist() for name in COLUMNS]
    place = stretch[:4]
    for step, values in enumerate(zip(*columns, strict=True), stretch.first):
        yield values[0], _step(place, step, values)


def lines_of(stretch: Stretch) -> Iterator[bytes]:
    """Yield the lines from which the rows of `stretch` were read."""
    for time, step in steps_of(stretch):
        text = step_line(time, stretch.who, step)
        assert text is not None  # every row was read from such a line
        yield text
