"""Data sets as arrays of features and labels, read from the files in which they are published."""

import gzip
import io
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import Corrupt, StorageFailed
from holdfast.extras import require
from holdfast.workloads.fetch import DataFile, Folder, obtain


@dataclass(frozen=True, slots=True, eq=False)
class LabeledData:
    """A data set: `x` has the samples in rows, with features in [0, 1], and `y` the class of each sample."""

    name: str
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int


def load(name: str, data: Folder = None) -> LabeledData:
    """Load the data set called `name` from `data`, $HOLDFAST_DATA or the cache, or download it."""
    return DATASETS[name](data)


def _mnist_file(name: str, sha256: str) -> DataFile:
    stem = f"{name}-ubyte"
    homes = ("http://yann.lecun.com/exdb/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist")
    return DataFile(
        dataset="mnist",
        folders=("mnist", "MNIST/raw", "."),  # the second is torchvision's
        names=(f"{stem}.gz", stem),
        urls=tuple(f"{home}/{stem}.gz" for home in homes),
        sha256=sha256,
    )


TRAIN_IMAGES = _mnist_file("train-images-idx3", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609")
TRAIN_LABELS = _mnist_file("train-labels-idx1", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c")
COVTYPE = DataFile(
    dataset="covtype",
    folders=("covtype", "."),
    names=("covtype.data.gz", "covtype.data", "covertype.zip"),
    urls=(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz",
        "https://ndownloader.figshare.com/files/5976039",  # scikit-learn's copy of the file above
    ),
    sha256="614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
)


def _mnist(data: Folder) -> LabeledData:
    images, labels = obtain(TRAIN_IMAGES, data), obtain(TRAIN_LABELS, data)
    pixels, digits = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
    if len(pixels) != len(digits):
        raise Corrupt(f"{images} has {len(pixels)} images but {labels} has {len(digits)} labels: fetch both again.")
    if digits.max(initial=0) > 9:
        raise Corrupt(f"{labels} has a label {digits.max()}, and digits end at 9: fetch it again.")
    x = np.divide(pixels.reshape(len(pixels), -1), 255, dtype=np.float32)
    return LabeledData("mnist", x, digits.astype(np.int64), classes=10)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the file `path`, in MNIST's IDX format, as an array with `dimensions` axes.

    Raise Corrupt if the file has another format."""
    with unpacked(path) as stream:
        content = stream.read()
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:  # 8: unsigned bytes
        raise Corrupt(
            f"{path} does not start as an IDX file of bytes in {dimensions} dimensions does "
            f"({content[:4].hex() or 'it is empty'}): it is another file or was cut off. Fetch it again."
        )
    sizes = [int(size) for size in np.frombuffer(content, ">u4", count=dimensions, offset=4)]
    promised = int(np.prod(sizes, dtype=object))  # exact: a damaged header may promise more than 64 bits hold
    if len(content) != start + promised:
        raise Corrupt(
            f"{path} holds {len(content) - start} bytes of values where its header promises {promised}: "
            "it was cut off or changed. Fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)


NUMERIC, FEATURES, COVERS = 10, 54, 7  # CoverType's measurements, all features with 44 one-hot ones, and classes


def _covtype(data: Folder) -> LabeledData:
    table = read_covtype(obtain(COVTYPE, data))
    x = table[:, :FEATURES].astype(np.float32)
    numeric = x[:, :NUMERIC]
    low = numeric.min(axis=0)
    numeric -= low
    numeric /= np.maximum(numeric.max(axis=0), 1)  # a column that never varies becomes zero
    return LabeledData("covtype", x, table[:, FEATURES].astype(np.int64) - 1, classes=COVERS)


def read_covtype(path: Path) -> NDArray[np.int16]:
    """Read UCI's CoverType table of integers: 54 features and a class from 1 to 7 in each row."""
    # Every value fits 16 bits, and the text is read as a stream: 64 MB for the table and little beside it.
    with unpacked(path, member="covtype.data.gz") as stream, warnings.catch_warnings():
        warnings.simplefilter("error")  # loadtxt only warns of an empty file
        try:
            table: NDArray[np.int16] = np.loadtxt(stream, delimiter=",", dtype=np.int16, comments=None, ndmin=2)
        except (ValueError, UserWarning, DeprecationWarning) as error:
            reason = str(error).split(";")[0].split(": <")[0].rstrip(".")
            raise Corrupt(f"{path} is not CoverType's table of whole numbers: {reason}. Fetch it again.") from error
    if table.shape[1] != FEATURES + 1:
        raise Corrupt(f"{path} has {table.shape[1]} columns, and CoverType has {FEATURES + 1}: fetch it again.")
    classes = table[:, FEATURES]
    if classes.min() < 1 or classes.max() > COVERS:
        raise Corrupt(f"{path} has classes {classes.min()}..{classes.max()}, and CoverType has 1..7: fetch it again.")
    return table


def _digits(_: Folder) -> LabeledData:
    require("lab", "the data set digits")
    # As scikit-learn's `load_digits` reads its file, without its import, which takes seconds in every process of a run.
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return LabeledData("digits", (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64), classes=10)


DATASETS: dict[str, Callable[[Folder], LabeledData]] = {
    "covtype": _covtype,
    "digits": _digits,
    "mnist": _mnist,
}


# The errors that unpacking damaged bytes raises: zipfile takes a flipped flag for an unsupported encryption or method.
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, struct.error, RuntimeError)


@contextmanager
def unpacked(path: Path, member: str = "") -> Iterator[IO[bytes]]:
    """Open a plain or gzipped file, or the file `member` of a zip archive, for reading; the format is detected."""
    try:
        with ExitStack() as stack:
            stream: IO[bytes] = stack.enter_context(path.open("rb"))
            if _starts(stream, b"PK"):
                archive = stack.enter_context(zipfile.ZipFile(stream))
                if member not in archive.namelist():
                    raise Corrupt(f"{path} is a zip without {member!r} in it: fetch it again.")
                stream = stack.enter_context(archive.open(member))
            if _starts(stream, b"\x1f\x8b"):
                stream = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=stream)))
            yield stream
    except _DAMAGE as error:
        raise Corrupt(f"{path} cannot be unpacked ({error}): it was cut off or changed. Fetch it again.") from error
    except OSError as error:
        raise StorageFailed(f"cannot read {path}: {error.strerror or error}.") from error


def _starts(stream: IO[bytes], magic: bytes) -> bool:
    start = stream.read(len(magic))
    stream.seek(0)
    return start == magic
