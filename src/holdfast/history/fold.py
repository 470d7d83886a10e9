"""Moves lines of history files into compact files (segments), and frees the space that the lines took.

A segment is complete once it has its name. From then on readers take these lines from it, and the bytes in the files are
replaced by a hole, which takes no space; the files keep their length, so their writers need not know. A process that is
killed at any moment leaves the lines, or the segment, or both, of which readers use the segment.
"""

import ctypes
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.atomic_write import sync_folder
from holdfast.errors import Corrupt, StorageFailed
from holdfast.events import rank_of
from holdfast.history.folded import SEGMENTS, first_line_digest, folded_backwards, segment_name, segments_in
from holdfast.history.log import require_file
from holdfast.history.panel import BLOCK
from holdfast.history.segment import FilePart, HistorySegment, encode
from holdfast.history.tail import last_commit

MOST = 4 << 20  # bytes of a file that are folded at once: some ten thousand steps
LEAST = 1 << 20  # bytes of the longest file that are worth a segment
KEPT = 64 << 10  # bytes at the end of a file that stay lines, for readers of the newest steps
PAGE = 4096
_STEP = re.compile(rb'^\{"event": "step", .{1,400}?, "step": (\d{1,18}), ', re.MULTILINE)
_PUNCH = 1 | 2  # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of Linux
_LIBC = ctypes.CDLL(None)


def fold(
    history: Path,
    ranks: Collection[int] | None = None,
    *,
    newest: Callable[[], int | None] = lambda: None,
    least: int = LEAST,
    is_over: bool = False,
) -> int:
    """Fold the settled lines of the files of `ranks` (default: all) in the folder `history`; return how many segments.

    Steps are settled that the newest snapshot covers: the last one in the history of rank 0 or, if that leaves nothing to
    fold, the one that `newest` returns, because rank 0 may be on another node, or lost. Less than `least` bytes of lines
    are left as they are. The newest steps stay lines unless the run `is_over`."""
    committed = last_commit(history) or 0
    files = [
        file
        for file in sorted(history.glob("rank-*.jsonl"))
        if (rank := rank_of(file.stem)) is not None and (ranks is None or rank in ranks)
    ]
    try:
        count = _fold_all(files, committed, least, is_over)
        if not count and (later := newest() or 0) > committed:
            count = _fold_all(files, later, least, is_over)
    except OSError as error:
        raise StorageFailed(f"cannot fold the history {history}: {error.strerror or error}.") from error
    return count


def _fold_all(files: Sequence[Path], committed: int, least: int, is_over: bool) -> int:
    count = 0
    while committed and _fold_once(files, committed, least, is_over):
        count += 1
    return count


def _fold_once(files: Sequence[Path], committed: int, least: int, is_over: bool) -> bool:
    waiting = [part for file in files if (part := _waiting(file, 0 if is_over else KEPT)) is not None]
    longest = max((len(part.data) for part in waiting), default=0)
    if longest < max(1, least):
        return False
    growing = (part for part in waiting if len(part.data) > longest // 2)  # a lost rank must not hold up the others
    last = (int(steps[-1]) for part in growing if (steps := _STEP.findall(part.data)))
    end = min(committed, min(last, default=0) + 1)
    end = end if end == committed and is_over else end // BLOCK * BLOCK  # so the ranks' steps begin and end together
    parts = [part._replace(data=part.data[: _cut(part.data, end)]) for part in waiting]
    parts = [part for part in parts if part.data]
    if not parts:
        return False
    _write_segment(files[0].parent / SEGMENTS, parts)
    for part in parts:
        _free(files[0].with_name(f"{part.who}.jsonl"), part.start + len(part.data))
    return True


def _waiting(file: Path, kept: int) -> FilePart | None:
    """Return the next lines of `file` before its last `kept` bytes, after they have reached the disk."""
    require_file(file)
    start, line, plan = 0, 1, None
    for _, part in folded_backwards(file):
        start, line, plan = part.end, part.line + part.lines, part.plan
        break
    if (digest := first_line_digest(file)) is None:
        return None
    with file.open("rb") as lines:
        os.fsync(lines.fileno())
        count = min(MOST, lines.seek(0, os.SEEK_END) - kept - start)
        lines.seek(start)
        data = lines.read(count) if count > 0 else b""
    return FilePart(file.stem, start, line, data[: data.rfind(b"\n") + 1], digest, plan)


def _cut(data: bytes, end: int) -> int:
    """Return the length of the lines in `data` up to the last step before step `end`."""
    places = [match.start() for match in _STEP.finditer(data) if int(match[1]) < end]
    return data.index(b"\n", places[-1]) + 1 if places else 0


def _write_segment(folder: Path, parts: Sequence[FilePart]) -> None:
    folder.mkdir(exist_ok=True)
    ranks = sorted(int(part.who.removeprefix("rank-")) for part in parts)
    number = max((known[0] for known in segments_in(folder)), default=0) + 1
    path = folder / segment_name(number, ranks[0], ranks[-1])
    temporary = folder / f".{ranks[0]}.tmp"
    with temporary.open("wb") as file:
        file.write(encode(parts))
        file.flush()
        os.fsync(file.fileno())
    written = HistorySegment(temporary)
    for part, stored in zip(parts, written.parts, strict=True):
        if b"".join(written.lines(stored)) != part.data:
            raise Corrupt(f"the lines of {part.who} could not be folded into {path}: they are kept as they are.")
    temporary.replace(path)
    sync_folder(folder)
    sync_folder(folder.parent)  # the folder may be new, too


def _free(path: Path, end: int) -> None:
    """Replace the bytes of `path` before `end` by a hole, where the file system can do that.

    The first and the last page stay: the first line names the file, and a writer looks for the end of the last one."""
    with suppress(OSError), path.open("r+b") as file:
        length = (end - 1) // PAGE * PAGE - PAGE
        if length > 0:
            _LIBC.fallocate(file.fileno(), _PUNCH, ctypes.c_int64(PAGE), ctypes.c_int64(length))
