"""Sends the histories of a node to the checkpoint store, and gathers the histories of all nodes of a run.

In the store, a piece of a file is named `histories/<who>.jsonl/<digest>/<piece>`. The digest is the digest of the
file's first line, which is unique: the same rank may have run on several nodes, and a node may return on another
machine. All pieces but the last are final, so sending a file again costs one piece, however long the run.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from holdfast.errors import Corrupt, StorageFailed
from holdfast.events import What, parse
from holdfast.history.log import files_of

if TYPE_CHECKING:
    from holdfast.checkpoint.store import Store

PIECE = 4 << 20
FIRST_LINE = 1 << 16  # bytes; longer than any first line
_NAME = re.compile(r"histories/(\w[\w.-]*\.jsonl)/([0-9a-f]{16})/(\d{8})", re.ASCII)


def send(history: Path, store: "Store") -> None:
    """Upload every history file in the folder `history` to the store; only new lines are sent."""
    sent: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
    for name, first_line, piece in _list_pieces(store):
        sent[name, first_line].append(piece)
    for path in sorted(history.glob("*.jsonl")):
        if digest := _first_line_digest(path):
            pieces, last = sent[path.name, digest], path.stat().st_size // PIECE
            with path.open("rb") as file:
                # The last piece may have been sent when the file was shorter.
                for number in range(min(max(pieces, default=0), last), last + 1):
                    file.seek(number * PIECE)
                    store.put(_piece_name(path.name, digest, number), [file.read(PIECE)])
            for number in pieces:
                if number > last:  # of lines that were lost in a power failure
                    store.remove(_piece_name(path.name, digest, number))


def supervisor_events(store: "Store") -> Iterator[What]:
    """Yield the events of all supervisors' histories in `store`, without damaged lines."""
    for (file, _), pieces in _pieces_by_file(store).items():
        if file.startswith("supervisor"):
            for line in b"".join(_read_piece(store, name) for name in pieces).splitlines():
                with suppress(ValueError):
                    yield parse(line).what


def last_attempt(store: "Store") -> int:
    """Return the number of the last attempt in the supervisors' histories in `store`; 0 if there is none."""
    numbers = (getattr(what, "attempt", None) for what in supervisor_events(store))
    return max((number for number in numbers if isinstance(number, int)), default=0)


@contextmanager
def gather_files(paths: Sequence[Path], store: "Store | None" = None) -> Iterator[list[Path]]:
    """Yield the history files of a run, one for each process, merged from the files and folders `paths` and the store.

    Fetched and merged files are in a temporary folder, which is removed when the `with` block ends."""
    with TemporaryDirectory(prefix="holdfast-history-") as folder:
        files = [file for path in paths for file in files_of(path)]
        if store:
            for (name, digest), pieces in _pieces_by_file(store).items():
                files.append(Path(folder, digest, name))
                files[-1].parent.mkdir(exist_ok=True)
                with files[-1].open("wb") as whole:
                    whole.writelines(_read_piece(store, piece) for piece in pieces)
        # Of copies of one file, such as a folder's own and the one that it sent, take the longest.
        digests = {file: _first_line_digest(file) or file for file in files}
        by_size = sorted(files, key=lambda file: file.stat().st_size)
        copies = {(file.name, digests[file]): file for file in by_size}
        writers: defaultdict[str, list[Path]] = defaultdict(list)
        for file in copies.values():
            writers[file.name].append(file)
        yield [file for name in sorted(writers) for file in _merge(writers[name], Path(folder) / "whole")]


def _piece_name(file: str, digest: str, piece: int) -> str:
    return f"histories/{file}/{digest}/{piece:08d}"


def _list_pieces(store: "Store") -> Iterator[tuple[str, str, int]]:
    for name in store.names("histories/"):
        if found := _NAME.fullmatch(name):
            yield found[1], found[2], int(found[3])


def _pieces_by_file(store: "Store") -> dict[tuple[str, str], list[str]]:
    files: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for file, digest, piece in _list_pieces(store):
        if piece != len(files[file, digest]):
            raise Corrupt(f"a piece of {file} is missing in {store}: send it again, or name the folders of all nodes.")
        files[file, digest].append(_piece_name(file, digest, piece))
    return dict(files)


def _read_piece(store: "Store", name: str) -> bytes:
    with store.open(name) as reader:
        if reader.length > PIECE:
            raise Corrupt(f"{name} in {store} is not a piece of a history: it has {reader.length} bytes.")
        data, filled = bytearray(reader.length), 0
        while count := reader.readinto(memoryview(data)[filled:]):
            filled += count
    return bytes(data[:filled])


def _first_line_digest(path: Path) -> str | None:
    try:
        if not path.is_file():  # a FIFO would block
            raise StorageFailed(f"the history {path} is not a file: remove it, and audit the others.")
        with path.open("rb") as file:
            line = file.readline(FIRST_LINE)
    except OSError as error:
        raise StorageFailed(f"cannot read the history {path}: {error.strerror or error}.") from error
    return xxhash.xxh3_64_hexdigest(line) if line.endswith(b"\n") else None


def _merge(files: Sequence[Path], folder: Path) -> list[Path]:
    """Merge the history files of one process into one file in `folder`, sorted by attempt, and return its path.

    Unfinished last lines go to further files, whose paths are also returned. A single file is returned unchanged."""
    if len(files) == 1:
        return list(files)
    folder.mkdir(exist_ok=True)
    whole = folder / files[0].name
    scans = [_scan(file) for file in files]
    with whole.open("wb") as into:
        for session in sorted(session for sessions, _ in scans for session in sessions):
            into.writelines(_read_range(session.file, session.start, session.end))
    merged = [whole]
    for file, (_, end) in zip(files, scans, strict=True):
        if torn := b"".join(_read_range(file, end, file.stat().st_size)):
            merged.append(folder / f"{file.stem}.torn-{_first_line_digest(file)}.jsonl")
            merged[-1].write_bytes(torn)
    return merged


class _Session(NamedTuple):
    """The part of a history file that one process wrote, from byte `start` to byte `end`."""

    attempt: int
    time: float
    file: Path
    start: int
    end: int


def _scan(file: Path) -> tuple[list[_Session], int]:
    sessions: list[_Session] = []
    end, knows_attempt = 0, False
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            if not sessions or line.startswith(b'{"event": "open"'):  # the first event of each process
                attempt = sessions[-1].attempt if sessions else 0
                sessions.append(_Session(attempt, 0.0, file, end, end))
                with suppress(ValueError):  # the reader reports damaged lines
                    sessions[-1] = sessions[-1]._replace(time=parse(line).time)
                knows_attempt = False
            end += len(line)
            sessions[-1] = sessions[-1]._replace(end=end)
            if not knows_attempt:
                with suppress(ValueError):
                    number = getattr(parse(line).what, "attempt", None)
                    if isinstance(number, int):
                        sessions[-1], knows_attempt = sessions[-1]._replace(attempt=number), True
    return sessions, end


def _read_range(file: Path, start: int, end: int) -> Iterator[bytes]:
    with file.open("rb") as source:
        source.seek(start)
        while start < end and (data := source.read(min(PIECE, end - start))):
            start += len(data)
            yield data
