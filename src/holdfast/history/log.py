"""Writes and reads histories: append-only logs of events, one file for each writer.

A line is one event (`events/` defines the format), and counts once its newline is on the disk. A writer that is killed
while it writes leaves a torn last line: readers report it, and the next writer of the file cuts it off and records that
in its `open` event. Flushed lines survive the death of the process; only synced ones survive a power failure.
"""

import heapq
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from holdfast.atomic_write import sync_folder
from holdfast.errors import BadInput, Corrupt, FutureVersion, StorageFailed
from holdfast.events import VERSION, Event, Malformed, Open, What, line, parse
from holdfast.history.folded import StepRun, folded_backwards, items, numbered_lines

Where: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]  # one or more files or folders

LONGEST = 16 << 20  # bytes of a line: no event is this long, and a damaged file must not fill the memory


@dataclass(frozen=True, slots=True)
class TornLine:
    """An unfinished line that a killed process left: its file, line number, and size in bytes."""

    path: Path
    line: int
    size: int


@dataclass(frozen=True, slots=True)
class History:
    """The events of a run in the order of time, and its torn (unfinished) lines."""

    events: tuple[Event, ...]
    torn: tuple[TornLine, ...]


class HistoryWriter:
    """A writer of the history file `<folder>/<who>.jsonl`. Appended events are written to the file by `flush`."""

    def __init__(self, folder: Path, who: str, clock: Callable[[], float] = time.time) -> None:
        if not re.fullmatch(r"\w[\w.-]*", who, re.ASCII):
            raise BadInput(f"{who!r} cannot be the name of a history: use letters, digits, dot, dash and underscore.")
        self.path = folder / f"{who}.jsonl"
        self._who = who
        self._clock = clock
        self._lines: list[bytes] = []
        self._half_written = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            # Unbuffered: a forked child that exits must not write its copy of our buffer.
            self._file = open(self.path, "a+b", buffering=0, opener=open_without_waiting)  # noqa: SIM115 - open until we close
            size = self._file.tell()
            self._end = _end_of_last_line(self._file, size)
            self._cut()
            if is_new:
                sync_folder(folder)
                sync_folder(folder.parent)  # the folder may be new, too
        except OSError as error:
            require_file(self.path)  # has a better message
            raise self._failed("open", error) from error
        self.append(Open(VERSION, torn=size - self._end))

    def append(self, what: What, time: float | None = None) -> None:
        """Queue an event for the next flush, with the present time or the given `time`."""
        self._lines.append(line(self._clock() if time is None else time, self._who, what))

    def flush(self) -> None:
        """Write all queued events as complete lines; if that fails, the next flush tries again."""
        if not self._lines:
            return
        data = b"".join(self._lines)
        try:
            if self._half_written:
                self._cut()
            self._half_written = True
            _write_all(self._file, data)
        except OSError as error:
            with suppress(OSError):  # then the next flush cuts
                self._cut()
            raise self._failed("write", error) from error
        self._half_written = False
        self._end += len(data)
        self._lines.clear()

    def sync(self) -> None:
        """Wait until all flushed lines are on the disk. Thread-safe."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed("sync", error) from error

    def close(self) -> None:
        """Flush, sync and close the file; it is closed even if the flush fails."""
        if self._file.closed:
            return
        with self._file:
            self.flush()
            self.sync()

    def __enter__(self) -> "HistoryWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _cut(self) -> None:
        if os.fstat(self._file.fileno()).st_size > self._end:
            os.ftruncate(self._file.fileno(), self._end)
        self._half_written = False

    def _failed(self, verb: str, error: OSError) -> StorageFailed:
        reason = error.strerror or error
        return StorageFailed(f"cannot {verb} the history {self.path}: {reason}. Free space or fix permissions there.")


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file as `os.open` does, but do not wait for a writer if `path` is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def require_files(folder: Path) -> None:
    """Raise StorageFailed if `folder` has an entry named like a history (`*.jsonl`) that is not a regular file."""
    for path in sorted(folder.glob("*.jsonl")):
        require_file(path)


def require_file(path: Path) -> None:
    """Raise StorageFailed if `path` exists but is not a regular file: reading from a pipe, for example, would block."""
    if path.exists() and not path.is_file():
        kinds = {"a directory": path.is_dir(), "a pipe": path.is_fifo(), "a socket": path.is_socket()}
        kind = next((name for name, matches in kinds.items() if matches), "a device")
        raise StorageFailed(f"the history {path} is not a file but {kind}: remove it, and start again.")


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]  # a disk that fills up writes a part before it fails


def _end_of_last_line(file: FileIO, size: int) -> int:
    end, block = size, 1 << 13
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_history(path: Where) -> History:
    """Return the history of a run. `path` is a history file, a folder of them, the folder of a run, or a list of these.

    `history.events` has all events in the order of their times. `event.what` is the event, such as a `Step`."""
    torn: list[TornLine] = []
    files = [list(_read_file(file, torn)) for file in files_of(path)]
    # The merge takes each file's events in their own order, even where its clock went back.
    events = heapq.merge(*files, key=lambda event: event.time)
    return History(tuple(events), tuple(torn))


def stream_history(path: Where, torn: list[TornLine]) -> Iterator[tuple[str, Event]]:
    """Yield (file name, event) for each event of a history, and append torn (unfinished) lines to `torn`."""
    for file in files_of(path):
        name = file.stem
        for event in _read_file(file, torn):
            yield name, event


def stream_blocks(
    path: Where, torn: list[TornLine], *, keep_damaged: bool = False
) -> Iterator[tuple[str, Event | StepRun]]:
    """Yield (file name, event) as `stream_history` does, but one `StepRun` for consecutive steps in a segment.

    With `keep_damaged`, a line that is not an event is yielded as a `Malformed` event of the file's writer."""
    for file in files_of(path):
        name = file.stem
        for item in _read_items(file, torn, keep_damaged=keep_damaged):
            yield name, item


def recall(file: Path, *kinds: str) -> Iterator[Event]:
    """Yield the events of the given `kinds` in one history file, without parsing other lines."""
    if not file.exists():
        return
    require_file(file)
    marks = tuple(f'{{"event": "{kind}"'.encode() for kind in kinds)  # as `events.line` begins a line
    try:
        for number, item in numbered_lines(file, LONGEST):
            if isinstance(item, StepRun):
                yield from item.events() if "step" in kinds else ()
            elif item.startswith(marks) and item.endswith(b"\n"):
                yield _decode(item, file, number)
    except OSError as error:
        raise StorageFailed(f"cannot read the history {file}: {error.strerror or error}.") from error


def backwards(file: Path) -> Iterator[Event]:
    """Yield the events of one history file from the last to the first, reading only as far as the caller iterates."""
    require_file(file)
    try:
        with file.open("rb", buffering=0) as lines:
            folded_end = next((part.end for _, part in folded_backwards(file)), 0)
            end = _end_of_last_line(lines, lines.seek(0, os.SEEK_END))
            while end > folded_end:
                start = _end_of_last_line(lines, end - 1)
                lines.seek(start)
                text = lines.read(end - start)
                if b"\0" in text and next((part.end for _, part in folded_backwards(file)), 0) > start:
                    break  # it was folded a moment ago
                yield _decode(text, file, start, "byte")
                end = start
        for segment, part in folded_backwards(file):
            if part.end > end:
                whole = b"".join(segment.lines(part))[: end - part.start].split(b"\n")[:-1]
                yield from (_decode(text, file, part.line) for text in reversed(whole))
                continue
            for number, item in reversed(list(items(segment, part))):
                if isinstance(item, StepRun):
                    yield from reversed(list(item.events()))
                else:
                    yield _decode(item, file, number)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageFailed(f"cannot read the history {file}: {error.strerror or error}.") from error


def files_of(path: Where) -> list[Path]:
    """Return the history files at `path`; raise BadInput if there are none."""
    if not isinstance(path, str | os.PathLike):
        return [file for place in path for file in files_of(place)]
    path = Path(path)
    if path.is_file():
        return [path]
    for folder in (path / "history", path):
        if files := sorted(folder.glob("*.jsonl")):
            return files
    raise BadInput(f"there is no history at {path}: name a run's folder or a .jsonl file.")


def _read_file(path: Path, torn: list[TornLine]) -> Iterator[Event]:
    for item in _read_items(path, torn):
        if isinstance(item, StepRun):
            yield from item.events()
        else:
            yield item


def _read_items(path: Path, torn: list[TornLine], *, keep_damaged: bool = False) -> Iterator[Event | StepRun]:
    require_file(path)
    try:
        for number, item in numbered_lines(path, LONGEST):
            if isinstance(item, StepRun):
                yield item
                continue
            is_too_long = len(item) == LONGEST  # the lines behind it must not be ignored
            if not (is_too_long or item.endswith(b"\n")):  # only the last line can lack it
                torn.append(TornLine(path, number, len(item)))
                break
            try:
                event = _event(item, path, number, torn)
            except Corrupt as error:
                if not keep_damaged:
                    raise
                event = _damaged(path, number, error)
            yield event
            if is_too_long:
                break
    except OSError as error:
        raise StorageFailed(f"cannot read the history {path}: {error.strerror or error}.") from error


def _damaged(path: Path, number: int, error: Corrupt) -> Event:
    why = f"{error.__cause__}; restore the file from a copy"
    return Event(0.0, path.stem, Malformed("damaged", {}, why, number))


def _event(text: bytes, path: Path, number: int, torn: list[TornLine]) -> Event:
    event = _decode(text, path, number)
    what = event.what
    if isinstance(what, Open) and what.torn:
        torn.append(TornLine(path, number, what.torn))
    return event if not isinstance(what, Malformed) else event._replace(what=what._replace(line=number))


def _decode(text: bytes, path: Path, number: int, of: str = "line") -> Event:
    try:
        if len(text) == LONGEST:
            raise ValueError("it is longer than any event")
        event = parse(text)
    except ValueError as error:
        raise Corrupt(
            f"{path}, {of} {number}, is not an event: {error}. A line is one JSON object with event, time and who, and "
            "this one was changed after it was written: restore the file from a copy."
        ) from error
    if isinstance(event.what, Open) and (version := event.what.version) != VERSION:
        if version > VERSION:
            raise FutureVersion(
                f"the history {path} has version {version}, but this holdfast reads version {VERSION}: upgrade holdfast."
            )
        raise BadInput(
            f"the history {path} has version {version}, which this holdfast no longer reads: use the holdfast that wrote it."
        )
    return event
