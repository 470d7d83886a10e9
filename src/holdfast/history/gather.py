"""The history of a run whose nodes have folders of their own: sent to the store of its checkpoints, and brought together.

A node sends the files of its folder; whoever audits the run reads the files at hand and those that other nodes sent.
In the store a file is `histories/<who>.jsonl/<digest>/<piece>`. The digest is that of its first line, which no other
file has: the same rank may have lived on several nodes, and a node may come back on another machine. A piece is so
many bytes of it, and all but the last are final: to send a file again costs a piece, however long the run.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import xxhash

from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt, StorageFailed
from holdfast.events import What, parse
from holdfast.history.log import files_of

PIECE = 4 << 20
FIRST_LINE = 1 << 16  # more than any writer's first line has
_NAME = re.compile(r"histories/(\w[\w.-]*\.jsonl)/([0-9a-f]{16})/(\d{8})", re.ASCII)
_OPEN = b'{"event": "open"'  # as a writer begins each of its lives


def send(history: Path, store: Store) -> None:
    """Put every history file of this folder into the store, or what of it is new."""
    there: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
    for file, mark, piece in _sent(store):
        there[file, mark].append(piece)
    for path in sorted(history.glob("*.jsonl")):
        if of := _mark(path):
            _send_file(path, of, there[path.name, of], store)


def supervised(store: Store) -> Iterator[What]:
    """What supervisors told in the histories that were sent to this store; a damaged line is for the audit to report."""
    for (file, _), pieces in _by_file(store).items():
        if file.startswith("supervisor"):
            for line in b"".join(_piece(store, name) for name in pieces).splitlines():
                with suppress(ValueError):
                    yield parse(line).what


def last_attempt(store: Store) -> int:
    """The number of the last attempt of which supervisors told in the histories that were sent to this store."""
    numbers = (getattr(what, "attempt", None) for what in supervised(store))
    return max((number for number in numbers if isinstance(number, int)), default=0)


@contextmanager
def gathered(paths: Sequence[Path], store: Store | None = None) -> Iterator[list[Path]]:
    """The files of one history, each writer's lives in order: those at these paths, and those sent to the store.

    What does not lie at the paths as it is needed is put into a temporary folder, which is gone afterwards.
    """
    with TemporaryDirectory(prefix="holdfast-history-") as folder:
        files = [file for path in paths for file in files_of(path)]
        files += _fetched(store, Path(folder)) if store else ()
        writers: defaultdict[str, list[Path]] = defaultdict(list)
        for file in _longest_copies(files):
            writers[file.name].append(file)
        yield [file for name in sorted(writers) for file in _in_order(writers[name], Path(folder) / "whole")]


def _send_file(path: Path, mark: str, there: Sequence[int], store: Store) -> None:
    last = _size(path) // PIECE
    with path.open("rb") as file:
        # The last piece that is there may have been sent when the file was shorter.
        for number in range(min(max(there, default=0), last), last + 1):
            file.seek(number * PIECE)
            store.put(_name(path.name, mark, number), [file.read(PIECE)])
    for number in there:
        if number > last:  # of lines that a power cut took back
            store.remove(_name(path.name, mark, number))


def _name(file: str, mark: str, piece: int) -> str:
    return f"histories/{file}/{mark}/{piece:08d}"


def _sent(store: Store) -> Iterator[tuple[str, str, int]]:
    for name in store.names("histories/"):
        if found := _NAME.fullmatch(name):
            yield found[1], found[2], int(found[3])


def _by_file(store: Store) -> dict[tuple[str, str], list[str]]:
    """The names of the pieces of every file that was sent, in order."""
    files: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for file, mark, piece in _sent(store):
        if piece != len(files[file, mark]):
            raise Corrupt(f"a piece of {file} is missing in {store}: send it again, or name the folders of all nodes.")
        files[file, mark].append(_name(file, mark, piece))
    return dict(files)


def _piece(store: Store, name: str) -> bytes:
    with store.open(name) as reader:
        if reader.length > PIECE:
            raise Corrupt(f"{name} in {store} is no piece of a history: it has {reader.length} bytes.")
        data, filled = bytearray(reader.length), 0
        while count := reader.readinto(memoryview(data)[filled:]):
            filled += count
    return bytes(data[:filled])


def _fetched(store: Store, folder: Path) -> Iterator[Path]:
    for (file, mark), pieces in _by_file(store).items():
        path = folder / mark / file
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as whole:
            whole.writelines(_piece(store, piece) for piece in pieces)
        yield path


def _mark(path: Path) -> str | None:
    """What tells a file from all others of its writer's name: its first line, which says when it was written."""
    try:
        if not path.is_file():  # a FIFO would make us wait for ever
            raise StorageFailed(f"the history {path} is no file: take it away, and audit what is left.")
        with path.open("rb") as file:
            line = file.readline(FIRST_LINE)
    except OSError as error:
        raise StorageFailed(f"cannot read the history {path}: {error.strerror or error}.") from error
    return xxhash.xxh3_64_hexdigest(line) if line.endswith(b"\n") else None


def _longest_copies(files: Iterable[Path]) -> list[Path]:
    """Every file once: of several copies, such as a folder's own and the one that it sent, the one that says most."""
    longest: dict[tuple[str, str | Path], Path] = {}
    for file in files:
        key = file.name, _mark(file) or file
        if key not in longest or _size(file) > _size(longest[key]):
            longest[key] = file
    return list(longest.values())


def _in_order(files: Sequence[Path], folder: Path) -> list[Path]:
    """One writer's files as one that has its lives in the order of attempts; torn lines are in files of their own."""
    if len(files) == 1:
        return list(files)
    folder.mkdir(exist_ok=True)
    whole = folder / files[0].name
    scans = [_scan(file) for file in files]
    with whole.open("wb") as into:
        for life in sorted(life for lives, _ in scans for life in lives):
            into.writelines(_between(life.file, life.start, life.end))
    return [
        whole,
        *(_torn(file, end, folder) for file, (_, end) in zip(files, scans, strict=True) if _size(file) > end),
    ]


class _Life(NamedTuple):
    """One opening of a history file by its writer, and what was written until the next."""

    attempt: int
    time: float
    file: Path
    start: int
    end: int


def _scan(file: Path) -> tuple[list[_Life], int]:
    """The lives in a file, and where its last whole line ends."""
    lives: list[_Life] = []
    end = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            if not lives or line.startswith(_OPEN):
                attempt = lives[-1].attempt if lives else 0
                lives.append(_Life(attempt, _time(line), file, end, end))
                known = False
            end += len(line)
            if not known and (number := _attempt(line)) is not None:
                lives[-1], known = lives[-1]._replace(attempt=number), True
            lives[-1] = lives[-1]._replace(end=end)
    return lives, end


def _torn(file: Path, start: int, folder: Path) -> Path:
    path = folder / f"{file.stem}.torn-{_mark(file)}.jsonl"
    path.write_bytes(b"".join(_between(file, start, _size(file))))
    return path


def _between(file: Path, start: int, end: int) -> Iterator[bytes]:
    with file.open("rb") as source:
        source.seek(start)
        while start < end and (data := source.read(min(PIECE, end - start))):
            start += len(data)
            yield data


def _size(file: Path) -> int:
    return file.stat().st_size


def _time(line: bytes) -> float:
    with suppress(ValueError):  # a damaged line is for the reader to report
        return parse(line).time
    return 0.0


def _attempt(line: bytes) -> int | None:
    with suppress(ValueError):
        number = getattr(parse(line).what, "attempt", None)
        return number if isinstance(number, int) else None
    return None
