"""Sends the histories of a node to the checkpoint store, and gathers the histories of all nodes of a run.

In the store, a piece of a file is named `histories/<who>.jsonl/<digest>/<piece>`. The digest is the digest of the
file's first line, which is unique: the same rank may have run on several nodes, and a node may return on another
machine. All pieces but the last are final, so sending a file again costs one piece, however long the run. Segments are
sent as they are, with their own digest in their name; of pieces whose lines were folded before, only the first line
of the file is sent.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import Corrupt, StorageFailed
from holdfast.events import What, parse
from holdfast.history.folded import SEGMENTS, first_line, first_line_digest, folded, segment_name, segments_in
from holdfast.history.log import files_of
from holdfast.history.segment import DIGEST

if TYPE_CHECKING:
    from holdfast.checkpoint.store import Reader, Store

PIECE = 4 << 20
_SEGMENT = re.compile(r"histories/segments/(\d{6,})-rank-(\d+)-to-(\d+)/([0-9a-f]{32})", re.ASCII)
_NAME = re.compile(r"histories/(\w[\w.-]*\.jsonl)/([0-9a-f]{16})/(\d{8})", re.ASCII)


def sizes_of_ranks(history: Path) -> dict[str, int]:
    """Return the sizes of the rank files in the folder `history`, by name."""
    return {path.name: path.stat().st_size for path in history.glob("rank-*.jsonl")}


def send(history: Path, store: "Store", until: Mapping[str, int] | None = None) -> None:
    """Upload every history file in the folder `history` to the store; only new lines and segments are sent.

    With `until`, rank files are sent up to these sizes only: a part of an attempt would look to the audit like a rank that
    left out steps, while an attempt that is absent is known to be unknown."""
    names = store.names("histories/")
    _send_segments(history / SEGMENTS, {*names}, store)
    sent = _pieces_by_file(names)
    for path in sorted(history.glob("*.jsonl")):
        size = path.stat().st_size
        if until is not None and path.name.startswith("rank-"):
            size = min(size, until.get(path.name, 0))
        if size and (digest := _first_line_digest(path)):
            pieces, last = sent.get((path.name, digest), []), size // PIECE
            whole = folded(path)
            # The last piece may have been sent when the file was shorter.
            for number in range(min(max(pieces, default=0), last), last + 1):
                is_folded = number < last and (number + 1) * PIECE <= whole.end
                if not is_folded:
                    data = b"".join(whole.read(number * PIECE, min((number + 1) * PIECE, size)))
                    store.put(_piece_name(path.name, digest, number), [data])
                elif number == 0:
                    store.put(_piece_name(path.name, digest, number), [first_line(path)])
            for number in pieces:
                if number > last:  # of lines that were lost in a power failure
                    store.remove(_piece_name(path.name, digest, number))


def _send_segments(folder: Path, sent: Container[str], store: "Store") -> None:
    for _, _, _, path in segments_in(folder):
        data = path.read_bytes()
        name = f"histories/segments/{path.stem}/{data[-DIGEST:].decode(errors='replace')}"
        if name not in sent:
            store.put(name, [data])


def supervisor_events(store: "Store") -> Iterator[What]:
    """Yield the events of all supervisors' histories in `store`, without damaged lines."""
    for (file, digest), pieces in _pieces_by_file(store.names("histories/")).items():
        if file.startswith("supervisor"):
            _require_all(pieces, file, store)
            for line in b"".join(_read_piece(store, _piece_name(file, digest, n)) for n in pieces).splitlines():
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
            at_hand = {(file.name, _first_line_digest(file)): file.stat().st_size for file in files}
            files = [*_fetch(store, Path(folder) / "stored", at_hand), *files]
        # Of copies of one file, such as a folder's own and the one that it sent, take the longest; if equal, the last.
        digests = {file: _first_line_digest(file) or file for file in files}
        by_size = sorted(files, key=lambda file: file.stat().st_size)
        copies = {(file.name, digests[file]): file for file in by_size}
        writers: defaultdict[str, list[Path]] = defaultdict(list)
        for file in copies.values():
            writers[file.name].append(file)
        yield [file for name in sorted(writers) for file in _merge(writers[name], Path(folder) / "whole")]


def _piece_name(file: str, digest: str, piece: int) -> str:
    return f"histories/{file}/{digest}/{piece:08d}"


def _pieces_by_file(names: Iterable[str]) -> dict[tuple[str, str], list[int]]:
    """Return the numbers of the pieces in the store, by the name of the file and the digest of its first line."""
    files: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        if found := _NAME.fullmatch(name):
            files[found[1], found[2]].append(int(found[3]))
    return {file: sorted(pieces) for file, pieces in files.items()}


def _fetch(store: "Store", folder: Path, at_hand: Mapping[tuple[str, str | None], int]) -> Iterator[Path]:
    """Download the files that are longer in the store than `at_hand` into `folder`, with holes where they were folded."""
    names = store.names("histories/")
    copies: Counter[str] = Counter()
    for (name, digest), pieces in _pieces_by_file(names).items():
        with store.open(_piece_name(name, digest, pieces[-1])) as last:
            length = pieces[-1] * PIECE + last.length
        if at_hand.get((name, digest), -1) >= length:
            continue
        path = folder / str(copies[name]) / name  # one folder for all, as far as their names differ
        copies[name] += 1
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            _fetch_segments(store, names, path.parent / SEGMENTS)
        present = []
        with path.open("wb") as file:
            for number in pieces:
                data = _read_piece(store, _piece_name(name, digest, number))
                present += [number] if len(data) == PIECE or number == pieces[-1] else []
                file.seek(number * PIECE)
                file.write(data)
        _require_all(present, name, store, folded(path).end)
        yield path


def _require_all(pieces: Collection[int], file: str, store: "Store", end: int = 0) -> None:
    """Raise Corrupt if a piece of a file is missing that segments do not have. They have its lines before byte `end`."""
    if any((number + 1) * PIECE > end for number in {*range(max(pieces) + 1)} - {*pieces}):
        raise Corrupt(f"a piece of {file} is missing in {store}: send it again, or name the folders of all nodes.")


def _fetch_segments(store: "Store", names: Iterable[str], folder: Path) -> None:
    copies: Counter[tuple[str, ...]] = Counter()
    for name in names:
        if found := _SEGMENT.fullmatch(name):
            folder.mkdir(exist_ok=True)
            number, *ranks = found.groups()[:3]
            # Segments of two machines may have one name; those of one machine keep their order.
            place = int(number) * 1000 + copies[found.groups()[:3]]
            copies[found.groups()[:3]] += 1
            with store.open(name) as reader, (folder / segment_name(place, *map(int, ranks))).open("wb") as file:
                file.write(_read_all(reader))


def _read_piece(store: "Store", name: str) -> bytes:
    with store.open(name) as reader:
        if reader.length > PIECE:
            raise Corrupt(f"{name} in {store} is not a piece of a history: it has {reader.length} bytes.")
        return _read_all(reader)


def _read_all(reader: "Reader") -> bytes:
    data, filled = bytearray(reader.length), 0
    while count := reader.readinto(memoryview(data)[filled:]):
        filled += count
    return bytes(data[:filled])


def _first_line_digest(path: Path) -> str | None:
    try:
        if not path.is_file():  # a FIFO would block
            raise StorageFailed(f"the history {path} is not a file: remove it, and audit the others.")
        return first_line_digest(path)
    except OSError as error:
        raise StorageFailed(f"cannot read the history {path}: {error.strerror or error}.") from error


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
            into.writelines(folded(session.file).read(session.start, session.end))
    merged = [whole]
    for file, (_, end) in zip(files, scans, strict=True):
        if torn := b"".join(folded(file).read(end, file.stat().st_size)):
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
    for line in _lines(file):
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


def _lines(file: Path) -> Iterator[bytes]:
    rest = b""
    for data in folded(file).read(0, file.stat().st_size):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line + b"\n" for line in lines)
