"""The text on which sharded-tradeoff trains: the sources of Python's standard library, or a file of the user."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from holdfast.errors import BadInput

HELD_OUT = 16  # one file in 16 is held out
SHORTEST = 100_000  # bytes
PIECE = 1 << 16  # bytes: another text is divided as if it were files of this size


@dataclass(frozen=True, slots=True, eq=False)
class TrainingText:
    """Bytes for training, and held-out bytes of the same kind."""

    name: str
    trained: NDArray[np.uint8]
    held_out: NDArray[np.uint8]

    @property
    def digest(self) -> str:
        """A hash of both parts, to recognize equal texts."""
        return xxh3_64_hexdigest(self.trained.tobytes() + self.held_out.tobytes())


def load_text(path: Path | None, limit: int) -> TrainingText:
    """Return up to `limit` bytes of text from the file `path`, or from Python's standard library if it is None."""
    name, pieces = "Python's standard library", _library()
    if path is not None:
        name, pieces = path.name, _pieces(path)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, piece in enumerate(pieces):
        parts[number % HELD_OUT == HELD_OUT - 1].append(piece)
        size += len(piece)
        if size >= limit:
            break
    if size < SHORTEST or not parts[1]:
        raise BadInput(f"{name} has {size:,} bytes of text: name a file of 2 MB or more with --data.")
    trained, held_out = (np.frombuffer(bytearray(b"".join(part)), dtype=np.uint8) for part in parts)
    return TrainingText(name, trained, held_out)


def _library() -> Iterator[bytes]:
    """Yield the source files of the standard library, in an order that mixes its packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "dist-packages"} & set(path.parts)]
    for number in np.random.default_rng(0).permutation(len(paths)):
        yield paths[number].read_bytes()


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise BadInput(f"cannot read the text {path}: {error.strerror}; name a file with --data.") from error
