"""Segments: compact files that store lines of histories as columns, in a fraction of their size.

A segment is a NumPy archive (`numpy.load` reads it) with the lines of one or more history files, from a first byte to a
last one. Steps are in panels, other lines are text. The comment of the archive is the digest of all bytes before it.
Every line can be written again byte for byte.
"""

import contextlib
import io
import json
import lzma
import os
import re
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import Corrupt, FutureVersion, StorageFailed
from holdfast.events import Plan, parse
from holdfast.history.packing import pack, unpack
from holdfast.history.panel import DIGESTS, PanelRow, PlannedPhase, StepPanel, build_panel, group, stretch_of
from holdfast.history.step_table import Stretch, StretchBuilder, lines_of, read_row

FORMAT = 1
HEADER = "header.json"
DIGEST = 32  # hexadecimal digits of the digest in the comment of the archive
_PLAN = b'{"event": "plan"'
_NAME_LENGTHS = 26  # bytes from the beginning of a member to the lengths of its name and of its extra field
_LARGEST = 1 << 31  # bytes of a column: a damaged file must not fill the memory
_DATE = (1980, 1, 1, 0, 0, 0)
_NPY = re.compile(  # as `write_array` begins an array of bytes or of integers
    rb"\x93NUMPY\x01\x00..\{'descr': '(\|u1|<i8)', 'fortran_order': False, 'shape': \((\d+),(?: (\d+))?\), \} *\n",
    re.DOTALL,
)
_KEPT = 64 << 20  # bytes of columns that are kept in memory
# What a damaged file, or one that is not ours, can raise while it is read.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)
T = TypeVar("T")


class FilePart(NamedTuple):
    """Whole lines of the history file of a rank: those from byte `start` on, the first of which is line `line`."""

    who: str
    start: int
    line: int
    data: bytes
    file: str = ""  # a digest of the first line of the whole file, which no other file has
    plan: str | None = None  # the last plan in earlier lines, as JSON


class FoldedPart(NamedTuple):
    """The lines of a history file that a segment has.

    Its steps are in the `rows` (number of a panel, row) in their order. `texts` is the range of its other lines among
    those of the segment."""

    who: str
    start: int
    end: int  # the byte after its last line
    line: int  # the number of its first line, counted from 1
    lines: int
    file: str  # the digest of the first line of the file
    plan: str | None  # the last plan in it or before it
    rows: Sequence[tuple[int, int]]
    texts: range


class RecentColumns:
    """The values that were read last from segments, of about `limit` bytes in total."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._values: OrderedDict[tuple[bytes, str], Any] = OrderedDict()

    def value(self, key: tuple[bytes, str], make: Callable[[], Any]) -> Any:
        """Return the value of `key`, which `make` returns if it is not here."""
        if key not in self._values:
            self._values[key] = made = make()
            self._size += _bytes(made)
            while self._size > self._limit and len(self._values) > 1:
                self._size -= _bytes(self._values.popitem(last=False)[1])
        self._values.move_to_end(key)
        return self._values[key]


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else 100 * len(value)


_RECENT = RecentColumns(_KEPT)


def encode(parts: Sequence[FilePart]) -> bytes:
    """Return the segment with the lines of `parts`."""
    texts: list[bytes] = []
    places: list[int] = []  # of the texts: their indices among the lines of their part
    folded: list[FoldedPart] = []
    stretches, owners = [], []
    for part in parts:
        builder, plan, first_text = StretchBuilder(), part.plan, len(texts)
        lines = [line + b"\n" for line in part.data.split(b"\n")[:-1]]
        for number, line in enumerate(lines):
            if row := read_row(line, part.who):
                builder.add(row)
            else:
                plan = line.decode(errors="replace") if line.startswith(_PLAN) else plan
                texts.append(line)
                places.append(number)
        made = builder.stretches()
        owners += [len(folded)] * len(made)
        stretches += made
        end, range_of_texts = part.start + len(part.data), range(first_text, len(texts))
        folded.append(FoldedPart(part.who, part.start, end, part.line, len(lines), part.file, plan, [], range_of_texts))
    panels: list[StepPanel] = []
    rows: dict[int, tuple[int, int]] = {}
    for members in group(stretches):
        rows |= {stretch: (len(panels), row) for row, stretch in enumerate(members)}
        phase = _phase(folded[owners[members[0]]].plan, stretches[members[0]].first)
        panels.append(build_panel([stretches[stretch] for stretch in members], phase))
    rows_of: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for stretch, owner in enumerate(owners):
        rows_of[owner].append(rows[stretch])
    folded = [part._replace(rows=rows_of[i]) for i, part in enumerate(folded)]
    return _archive(folded, panels, b"".join(texts), places)


def _phase(plan: str | None, step: int) -> PlannedPhase | None:
    """Return the phase of `step` in `plan`, a line of a history; None if its samples cannot be computed."""
    what = None
    with contextlib.suppress(ValueError):
        what = parse(plan.encode()).what if plan else None
    if not isinstance(what, Plan) or what.tensor_parallel < 1:
        return None
    first = 0
    for phase in (what._asdict(), *what.later_phases):
        found = PlannedPhase(first, phase["samples"], phase["batch"], phase["seed"], what.tensor_parallel)
        length, limit = found.samples // max(1, found.batch) * phase["epochs"], phase.get("limit")
        first += length if limit is None else limit
        if step < first:
            return None if phase.get("sampler") else found
    return None


def _archive(parts: Sequence[FoldedPart], panels: Sequence[StepPanel], texts: bytes, places: Sequence[int]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        _add(archive, "texts", np.frombuffer(texts, np.uint8), zipfile.ZIP_LZMA)
        _add(archive, "places", np.array(places, np.int64))
        described = []
        for number, panel in enumerate(panels):
            columns = {}
            for name, column in panel.columns.items():
                columns[name], packed = pack(column)
                if packed is not None:
                    _add(archive, f"{number}/{name}", packed)
            described.append(
                {
                    "attempt": panel.attempt,
                    "world": panel.world,
                    "first": panel.first,
                    "rows": [list(row) for row in panel.rows],
                    "phase": panel.phase,
                    "planned": list(panel.planned),
                    "columns": columns,
                }
            )
        of_parts = [{**part._asdict(), "texts": [part.texts.start, part.texts.stop]} for part in parts]
        header = {"version": FORMAT, "parts": of_parts, "panels": described}
        info = zipfile.ZipInfo(HEADER, _DATE)
        archive.writestr(info, json.dumps(header), zipfile.ZIP_DEFLATED)
        archive.comment = b"-" * DIGEST
    data = buffer.getvalue()[:-DIGEST]
    return data + xxhash.xxh3_128_hexdigest(data).encode()


def _add(archive: zipfile.ZipFile, name: str, array: NDArray[Any], method: int = zipfile.ZIP_DEFLATED) -> None:
    member = io.BytesIO()
    np.lib.format.write_array(member, array, allow_pickle=False)
    archive.writestr(zipfile.ZipInfo(f"{name}.npy", _DATE), member.getvalue(), method)


def _read_part(described: Any) -> FoldedPart:
    rows = [(panel, row) for panel, row in described["rows"]]
    return FoldedPart(**{**described, "rows": rows, "texts": range(*described["texts"])})


def _array_in(data: bytes) -> NDArray[Any]:
    """Return the array in the bytes of an .npy file.

    `read_array` evaluates the header as Python, which takes longer than reading the columns of a short segment."""
    if (match := _NPY.match(data)) is None:
        other: NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return other
    dtype, *shape = match.groups()
    sizes = [int(size) for size in shape if size is not None]
    return np.frombuffer(data, dtype.decode(), offset=match.end()).reshape(sizes)


class _Member(NamedTuple):
    """A file in the archive: where it begins, its size there, its size and CRC, and how it is compressed."""

    offset: int
    packed: int
    size: int
    crc: int
    method: int


class Columns(Mapping[str, NDArray[Any]]):
    """The columns of a panel in a segment, each read when it is needed."""

    def __init__(
        self, segment: "HistorySegment", panel: int, described: Mapping[str, Any], planned: Sequence[bool]
    ) -> None:
        self._segment, self._panel, self._described, self._planned = segment, panel, described, planned

    def __getitem__(self, name: str) -> NDArray[Any]:
        column = self.stored(name)
        rows = self._planned.count(False) if name in DIGESTS else len(self._planned)
        return np.broadcast_to(column, (rows, column.shape[1]))

    def stored(self, name: str) -> NDArray[Any]:
        """Return a column, with only one row if all of its rows are equal."""
        described, member = self._described[name], f"{self._panel}/{name}"
        return self._segment.cached(member, lambda read: unpack(described, lambda: read(member)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)


class HistorySegment:
    """The segment in the file `path`: its parts and panels. The values of steps are read when they are needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._digest, self._members = self.checked(self._read_header)
        self.parts, self.panels = self.checked(lambda: self._described(header))

    def stretch(self, part: FoldedPart, index: int) -> Stretch:
        """Return the stretch of steps that is row `index` of `part`."""
        panel, row = part.rows[index]
        return self.checked(lambda: stretch_of(self.panels[panel], row))

    def lines(self, part: FoldedPart) -> Iterator[bytes]:
        """Yield the lines of `part`, byte for byte as they were written."""
        steps = (line for index in range(len(part.rows)) for line in lines_of(self.stretch(part, index)))
        texts = dict(self.texts(part))
        for number in range(part.lines):
            yield texts[number] if number in texts else next(steps)

    def texts(self, part: FoldedPart) -> list[tuple[int, bytes]]:
        """Return the lines of `part` that are not in panels, each with its index among the lines of the part."""
        lines: list[bytes] = self.cached("lines", lambda read: read("texts").tobytes().split(b"\n"))
        places = self.cached("places", lambda read: read("places").tolist())
        return [(places[i], lines[i] + b"\n") for i in part.texts]

    def cached(self, name: str, make: Callable[[Callable[[str], NDArray[Any]]], T]) -> T:
        """Return a value that `make` computes from arrays of the archive; recently used values are kept."""
        value: T = _RECENT.value((self._digest, name), lambda: self.checked(lambda: make(self._array)))
        return value

    def _read_header(self) -> tuple[Any, bytes, dict[str, _Member]]:
        data = self.path.read_bytes()
        if xxhash.xxh3_128_hexdigest(data[:-DIGEST]).encode() != data[-DIGEST:]:
            raise ValueError("its digest is another")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {
                info.filename: _Member(
                    info.header_offset, info.compress_size, info.file_size, info.CRC, info.compress_type
                )
                for info in archive.infolist()
            }
            return json.loads(archive.read(HEADER)), data[-DIGEST:], members

    def _described(self, header: Any) -> tuple[list[FoldedPart], list[StepPanel]]:
        if header["version"] > FORMAT:
            raise FutureVersion(
                f"the history {self.path} has version {header['version']}, but this holdfast reads version {FORMAT}: "
                "upgrade holdfast."
            )
        parts = [_read_part(part) for part in header["parts"]]
        return parts, [self._panel(number, panel) for number, panel in enumerate(header["panels"])]

    def _panel(self, number: int, described: Any) -> StepPanel:
        rows = [PanelRow(*row) for row in described["rows"]]
        phase = described["phase"] and PlannedPhase(*described["phase"])
        columns = Columns(self, number, described["columns"], described["planned"])
        place = described["attempt"], described["world"], described["first"]
        return StepPanel(*place, rows, columns, phase, described["planned"])

    def _array(self, name: str) -> NDArray[Any]:
        member = self._members[f"{name}.npy"]
        if member.size > _LARGEST:
            raise ValueError("a column is too large")
        data = self._deflated(member) if member.method == zipfile.ZIP_DEFLATED else self._extracted(f"{name}.npy")
        return _array_in(data)

    def _deflated(self, member: _Member) -> bytes:
        """Return the content of a member. `zipfile` would read the list of all members first."""
        with self.path.open("rb") as file:
            file.seek(member.offset + _NAME_LENGTHS)
            of_name, of_extra = file.read(2), file.read(2)
            file.seek(int.from_bytes(of_name, "little") + int.from_bytes(of_extra, "little"), os.SEEK_CUR)
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(member.packed), member.size)
        if len(data) != member.size or zlib.crc32(data) != member.crc:
            raise ValueError("a column was changed")
        return data

    def _extracted(self, name: str) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    def checked(self, read: Callable[[], T]) -> T:
        """Return what `read` returns; raise Corrupt if it fails because the file is damaged."""
        try:
            return read()
        except OSError as error:
            raise StorageFailed(f"cannot read the history {self.path}: {error.strerror or error}.") from error
        except _DAMAGE as error:
            raise Corrupt(
                f"{self.path} is not a segment of a history as it was written ({error}): restore the file from a copy."
            ) from error
