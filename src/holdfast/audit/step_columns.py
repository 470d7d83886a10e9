"""The steps of one worker process as arrays, one for each field, read from the lines and segments of its history.

A column is put together when it is used, and segments keep only the columns that were used last. So an audit needs
memory for the steps of a few ranks, however many ranks there are.
"""

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.events import Step
from holdfast.history.folded import StepRun
from holdfast.sampler.digest import Samples
from holdfast.sampler.run_plan import RunPlan

Numbers: TypeAlias = NDArray[np.int64]
_MIX = 0x9E3779B97F4A7C15  # odd, so that multiplication by it is one-to-one
_WRAP = 1 << 64
_HEX = frozenset("0123456789abcdef")
Stored: TypeAlias = Callable[[str], NDArray[Any]]  # returns a column of a panel, with one row if all are equal
_counting: Numbers = np.arange(1 << 16)


def shared_part(state: str) -> int:
    """Return a hash (never 0) of the first half of the fingerprint `state`, which covers the state of all ranks."""
    return _words(state)[0]


def whole_part(state: str) -> int:
    """Return a hash (never 0) of the whole fingerprint `state`."""
    return _words(state)[1]


def _words(state: str) -> tuple[int, int]:
    if len(state) == 32 and _HEX.issuperset(state):
        shared, own = int(state[:16], 16), int(state[16:], 16)
        return _signed(shared) or 1, _signed(shared * _MIX % _WRAP ^ own) or 1
    return hash(state[: len(state) // 2]) or 1, hash(state) or 1


def _signed(word: int) -> int:
    return word - _WRAP if word >= _WRAP // 2 else word


def counting(first: int, count: int) -> Numbers:
    """Return the numbers from `first` on, as a view of one array that all ranks share where they are small."""
    global _counting
    if first + count > 1 << 26 or first < 0:
        return np.arange(first, first + count)
    if first + count > len(_counting):
        _counting = np.arange(2 * (first + count))
        _counting.flags.writeable = False
    return _counting[first : first + count]


class _Lines:
    """Steps that were read from lines."""

    def __init__(self) -> None:
        self.step, self.epoch, self.cursor = array("q"), array("q"), array("q")
        self.count, self.digest = array("q"), bytearray()
        self.state, self.shared, self.loss = array("q"), array("q"), array("d")
        self.reduced, self.worked = array("q"), bytearray()

    def add(self, step: Step) -> None:
        self.step.append(step.step)
        self.epoch.append(step.epoch)
        self.cursor.append(step.cursor)
        self.count.append(step.samples.count)
        self.digest += bytes.fromhex(step.samples.digest)
        shared, state = (0, 0) if step.state is None else _words(step.state)
        self.state.append(state)
        self.shared.append(shared)
        self.loss.append(math.nan if step.loss is None else step.loss)
        self.reduced.append(step.reduced)
        self.worked.append((step.reduced + step.held > 0) + 2 * (step.stepped > 0))

    @property
    def steps(self) -> int:
        return len(self.step)

    @property
    def is_consecutive(self) -> bool:
        return bool((np.diff(np.frombuffer(self.step, np.int64)) == 1).all())

    def column(self, name: str) -> NDArray[Any]:
        if name == "worked":
            return np.frombuffer(self.worked, np.uint8)
        return np.frombuffer(getattr(self, name), np.float64 if name == "loss" else np.int64)

    def digests(self, rows: Numbers) -> NDArray[np.uint64]:
        return np.frombuffer(self.digest, ">u8").reshape(-1, 2)[rows].astype(np.uint64)


class _Folded:
    """Steps that are read from a segment."""

    is_consecutive = True

    def __init__(self, run: StepRun) -> None:
        self.run = run

    @property
    def steps(self) -> int:
        return self.run.steps

    def column(self, name: str) -> NDArray[Any]:
        if name == "step":
            return counting(self.run.first, self.run.steps)
        derived = _OF_PANEL.get(name)
        return self.run.derived(name, derived) if derived else self.run.column(name)

    def digests(self, rows: Numbers) -> NDArray[np.uint64]:
        return self.run.digests()[rows]


def _shared(stored: Stored) -> Numbers:
    words = stored("shared").view(np.int64)
    return np.where(stored("has_state") == 0, 0, np.where(words == 0, 1, words))


def _state(stored: Stored) -> Numbers:
    words = (stored("shared") * np.uint64(_MIX) ^ stored("own")).view(np.int64)
    return np.where(stored("has_state") == 0, 0, np.where(words == 0, 1, words))


def _loss(stored: Stored) -> NDArray[np.float64]:
    return np.where(stored("has_loss") == 0, math.nan, stored("loss"))


def _worked(stored: Stored) -> NDArray[np.uint8]:
    had_backward = stored("reduced") + stored("held") > 0
    worked: NDArray[np.uint8] = had_backward.astype(np.uint8) + 2 * (stored("stepped") > 0).astype(np.uint8)
    return worked


_OF_PANEL: dict[str, Callable[[Stored], NDArray[Any]]] = {
    "shared": _shared,
    "state": _state,
    "loss": _loss,
    "worked": _worked,
}


class _Column:
    """A descriptor that returns a column of `StepColumns` as a NumPy array."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, steps: "StepColumns", owner: type) -> Numbers:
        return steps.column(self._name)


class StepColumns:
    """The step events of one worker process, one array for each field, because there may be millions.

    A row is the index of a step in these arrays. State fingerprints are hashes; 0 means that none was recorded."""

    step, epoch, cursor = _Column(), _Column(), _Column()
    count = _Column()  # samples
    state = _Column()  # the whole fingerprint
    shared = _Column()  # the half of the fingerprint that covers the state that all ranks share
    reduced = _Column()  # backward passes that were all-reduced

    def __init__(self) -> None:
        self._pieces: list[_Lines | _Folded] = []
        self._starts: list[int] = []  # the first row of each piece
        self._last: int | None = None

    def add(self, step: Step) -> None:
        if not self._pieces or not isinstance(self._pieces[-1], _Lines):
            self._append(_Lines())
        piece = self._pieces[-1]
        assert isinstance(piece, _Lines)
        piece.add(step)
        self._last = step.step

    def add_run(self, run: StepRun, *, may_join: bool) -> None:
        """Add folded steps; `may_join` if they were placed like the steps before them."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, _Folded) and may_join and last.run.is_before(run):
            last.run = last.run.joined(run)
        else:
            self._append(_Folded(run))
        self._last = run.first + run.steps - 1

    def _append(self, piece: _Lines | _Folded) -> None:
        self._starts.append(len(self))
        self._pieces.append(piece)

    def __len__(self) -> int:
        return self._starts[-1] + self._pieces[-1].steps if self._pieces else 0

    @property
    def last(self) -> int | None:
        return self._last

    def column(self, name: str) -> NDArray[Any]:
        pieces = self._pieces
        if len(pieces) == 1:
            return pieces[0].column(name)
        if not pieces:
            return np.zeros(0, {"loss": np.float64, "worked": np.uint8}.get(name, np.int64))
        if name == "step" and self.is_consecutive:
            return counting(self._first, len(self))
        return np.concatenate([piece.column(name) for piece in pieces])

    @property
    def _first(self) -> int:
        piece = self._pieces[0]
        return piece.step[0] if isinstance(piece, _Lines) else piece.run.first

    @cached_property
    def is_consecutive(self) -> bool:
        """True if step numbers increase by 1 from row to row. The result is cached, so read it after the last `add`."""
        ends = [(piece.column("step")[0], piece.column("step")[-1]) for piece in self._pieces]
        follow = all(int(last) + 1 == first for (_, last), (first, _) in itertools.pairwise(ends))
        return follow and all(piece.is_consecutive for piece in self._pieces)

    @property
    def loss(self) -> NDArray[np.float64]:
        return self.column("loss")

    @property
    def had_backward(self) -> NDArray[np.bool_]:
        """Mask of the steps that had a backward pass, with or without an all-reduce of the gradients."""
        return (self.column("worked") & 1) > 0

    @property
    def worked(self) -> NDArray[np.bool_]:
        """Mask of the steps that had a backward pass or an optimizer step."""
        return self.column("worked") > 0

    @property
    def stepped(self) -> NDArray[np.bool_]:
        return self.column("worked") > 1

    def digests(self, rows: Numbers) -> NDArray[np.uint64]:
        """Return the 128-bit digests of the sample ids of the steps at the sorted `rows`, two words for each."""
        found = [np.zeros((0, 2), np.uint64)]
        for start, piece in zip(self._starts, self._pieces, strict=True):
            first, last = np.searchsorted(rows, [start, start + piece.steps])
            if last > first:
                found.append(piece.digests(rows[first:last] - start))
        return np.concatenate(found)

    def samples(self, row: int) -> Samples:
        """Return the count and the digest of the samples that were trained in the step at index `row`."""
        piece, place = self._place(row)
        high, low = piece.digests(np.array([place]))[0].tolist()
        return Samples(int(piece.column("count")[place]), f"{high:016x}{low:016x}")

    def shared_after(self, step: int) -> int | None:
        """Return the value of `shared` in the first row of `step`, or None without such a row; other rows are not read."""
        if self.is_consecutive:
            row = step - self._first if len(self) else -1
        else:
            row = next(iter(np.flatnonzero(self.step == step).tolist()), -1)
        if not 0 <= row < len(self):
            return None
        piece, place = self._place(row)
        return int(piece.column("shared")[place])

    def _place(self, row: int) -> tuple[_Lines | _Folded, int]:
        number = bisect_right(self._starts, row) - 1
        return self._pieces[number], row - self._starts[number]

    def planned_rows(self, plan: RunPlan) -> Iterator[tuple[range, StepRun]]:
        """Yield the rows of folded steps whose samples were those of `plan` when they were folded."""
        for start, piece in zip(self._starts, self._pieces, strict=True):
            if isinstance(piece, _Folded) and piece.run.is_planned(plan):
                yield range(start, start + piece.steps), piece.run
