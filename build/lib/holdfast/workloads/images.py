"""Colour images as bytes, with their classes: CIFAR-10, CIFAR-100, and the first 25 classes of Tiny ImageNet."""

import io
import lzma
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import Corrupt, DataMissing
from holdfast.workloads.fetch import DataFile, data_folder, obtain

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class LabeledImages:
    """Images as an array with the axes image, channel, row and column, and the class of each image."""

    x: Bytes
    y: npt.NDArray[np.int64]


CIFAR10 = DataFile(
    dataset="cifar10",
    folders=("cifar10", "."),
    names=("cifar-10-binary.tar.gz",),
    urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
CIFAR100 = DataFile(  # never downloaded
    dataset="cifar100", folders=("cifar100", "."), names=("cifar-100-binary.tar.gz",), urls=(), sha256=""
)
TINY_IMAGENET = DataFile(
    dataset="tinyimagenet",
    folders=("tinyimagenet", "."),
    names=("tiny-imagenet-200-first25classes.zip", "tiny-imagenet-200.zip"),
    urls=(),  # never downloaded: the official archive has eight times as many classes
    sha256="",
)
TINY_CLASSES = 25
SIDE = 64
# The errors that reading a damaged archive or image raises.
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error)
UNREADABLE = (OSError, EOFError, LookupError, ValueError, NotImplementedError, *_DAMAGED)
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS  # bytes of a CIFAR-10 image: its class, then its colours
RECORD_100 = 2 + PIXELS  # of a CIFAR-100 image: one of 20 groups of classes, its class, then its colours


def cifar10(data: Path | None, *, train: int = 10_000, test: int = 2_000) -> tuple[LabeledImages, LabeledImages]:
    """Return the first `train` images of CIFAR-10's first training batch, and the first `test` of its test batch."""
    folder = data_folder(data)
    places = [] if folder is None else [folder / "cifar10", folder]
    arrays = next((place for place in places if (place / "labels.npz").is_file()), None)
    if arrays is not None:
        return _from_arrays(arrays, "data_batch_1", "train", train), _from_arrays(arrays, "test_batch", "test", test)
    path = obtain(CIFAR10, data)
    batches = (("data_batch_1", train), ("test_batch", test))
    parts = [_records(path, f"cifar-10-batches-bin/{name}.bin", RECORD, count) for name, count in batches]
    first, second = (LabeledImages(x[:, 1:].reshape(-1, 3, 32, 32), x[:, 0].astype(np.int64)) for x in parts)
    return first, second


def cifar100(data: Path | None, *, train: int = 10_000) -> LabeledImages:
    """Return the first `train` training images of CIFAR-100 with their fine-grained classes."""
    path = obtain(CIFAR100, data)
    records = _records(path, "cifar-100-binary/train.bin", RECORD_100, train)
    return LabeledImages(records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1].astype(np.int64))


def tiny_imagenet(data: Path | None) -> tuple[LabeledImages, LabeledImages]:
    """Return the training and the validation images of the first 25 classes of Tiny ImageNet."""
    path = obtain(TINY_IMAGENET, data)
    try:
        with zipfile.ZipFile(path) as archive:
            classes = archive.read(_listing(archive, "wnids")).decode().split()[:TINY_CLASSES]
            images = [name for name in archive.namelist() if name.endswith(".JPEG") and "/train/" in name]
            train = {name: classes.index(part) for name in images if (part := name.split("/")[2]) in classes}
            annotations = _listing(archive, "val_annotations")
            lines = [line.split("\t") for line in archive.read(annotations).decode().splitlines()]
            folder = annotations.rpartition("/")[0]
            test = {f"{folder}/images/{line[0]}": classes.index(line[1]) for line in lines if line[1] in classes}
            return _decoded(archive, train), _decoded(archive, test)
    except UNREADABLE as error:
        raise Corrupt(f"{path} is not Tiny ImageNet as it is published ({error}): fetch it again.") from error


def _from_arrays(folder: Path, batch: str, split: str, count: int) -> LabeledImages:
    path = folder / f"{batch}_images.npy.xz"
    try:
        with np.load(folder / "labels.npz", allow_pickle=False) as labels, lzma.open(path) as packed:
            pixels: Bytes = np.load(io.BytesIO(packed.read()), allow_pickle=False)
            classes = labels[split][:count].astype(np.int64)
    except UNREADABLE as error:
        raise Corrupt(f"{path} and its labels are not CIFAR-10 as arrays ({error}): fetch them again.") from error
    return LabeledImages(np.ascontiguousarray(pixels[:count].transpose(0, 3, 1, 2)), classes)


def _records(path: Path, name: str, size: int, count: int) -> Bytes:
    try:
        with tarfile.open(path) as archive:
            member = archive.extractfile(name)
            content = member.read(count * size) if member else b""
    except UNREADABLE as error:
        raise Corrupt(f"{path} is not a binary archive of CIFAR ({error}): fetch it again.") from error
    if len(content) < size:
        raise Corrupt(f"{path} has no images in {Path(name).name}: fetch it again.")
    return np.frombuffer(content[: len(content) // size * size], np.uint8).reshape(-1, size)


def _listing(archive: zipfile.ZipFile, start: str) -> str:
    names = [name for name in archive.namelist() if Path(name).name.startswith(start)]
    if not names:
        raise ValueError(f"no {start}")
    return names[0]


def _decoded(archive: zipfile.ZipFile, labels: dict[str, int]) -> LabeledImages:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataMissing("tinyimagenet: its JPEG files need a decoder; install pillow.") from error

    def decode(packed: bytes) -> Bytes:
        with Image.open(io.BytesIO(packed)) as image:
            return np.asarray(image.convert("RGB"), np.uint8).transpose(2, 0, 1)

    packed = [archive.read(name) for name in labels]
    with ThreadPoolExecutor() as threads:
        x = np.stack(list(threads.map(decode, packed)))
    return LabeledImages(x, np.array(list(labels.values()), np.int64))
