"""Data sets: found in the forms they are published in, and refused in one line when they are damaged."""

import gzip
import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.errors import BadInput, Corrupt, HoldfastError, StorageFailed
from holdfast.workloads.datasets import load, read_covtype, read_idx

SEED = 20240607
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def some_mnist() -> dict[str, bytes]:
    rng = np.random.default_rng(SEED)
    pixels = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    pixels[0, 0, :2] = (0, 255)
    return {IMAGES: idx(pixels), LABELS: idx(rng.integers(0, 10, 20, dtype=np.uint8))}


def some_covtype(rows: int = 30) -> bytes:
    rng = np.random.default_rng(SEED)
    numeric = rng.integers(-200, 7000, (rows, 10))
    table = np.hstack([numeric, rng.integers(0, 2, (rows, 44)), rng.integers(1, 8, (rows, 1))])
    return "".join(",".join(map(str, row)) + "\n" for row in table).encode()


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refusal(error: type[HoldfastError], caught: pytest.ExceptionInfo[HoldfastError], path: Path) -> None:
    assert caught.type is error
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_digits_come_with_the_package() -> None:
    digits = load("digits")
    assert (digits.name, digits.classes, digits.x.shape, digits.y.shape) == ("digits", 10, (1797, 64), (1797,))
    assert (digits.x.dtype, digits.y.dtype) == (np.float32, np.int64)
    assert (digits.x.min(), digits.x.max()) == (0.0, 1.0)


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "plain"])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_mnist_is_read_in_every_form_it_comes_in(tmp_path: Path, folder: str, packed: bool) -> None:
    files = some_mnist()
    for name, content in files.items():
        put(tmp_path / folder / (f"{name}.gz" if packed else name), gzip.compress(content) if packed else content)
    mnist = load("mnist", data=tmp_path)
    assert (mnist.name, mnist.classes, mnist.x.shape, mnist.x.dtype) == ("mnist", 10, (20, 784), np.float32)
    assert (mnist.x.min(), mnist.x.max()) == (0.0, 1.0)
    assert mnist.y.tolist() == list(files[LABELS][8:])
    assert mnist.y.dtype == np.int64
    np.testing.assert_array_equal((mnist.x * 255).round().astype(np.uint8).tobytes(), files[IMAGES][16:])


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("covtype/covtype.data.gz", gzip.compress),
        ("covtype.data", bytes),
        ("covtype/covertype.zip", lambda text: zipped(**{"covtype.info": b"", "covtype.data.gz": gzip.compress(text)})),
    ],
)
def test_covtype_is_read_in_every_form_it_comes_in(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    text = some_covtype()
    put(tmp_path / name, pack(text))
    table = np.array([line.split(b",") for line in text.splitlines()]).astype(np.int64)
    covtype = load("covtype", data=tmp_path)
    assert (covtype.name, covtype.classes, covtype.x.shape, covtype.x.dtype) == ("covtype", 7, (30, 54), np.float32)
    assert covtype.y.tolist() == (table[:, 54] - 1).tolist()
    numeric = table[:, :10]
    scaled = (numeric - numeric.min(0)) / (numeric.max(0) - numeric.min(0))
    np.testing.assert_allclose(covtype.x[:, :10], scaled, rtol=1e-6)
    np.testing.assert_array_equal(covtype.x[:, 10:], table[:, 10:54])


def test_a_column_that_never_varies_is_zero(tmp_path: Path) -> None:
    put(tmp_path / "covtype.data", some_covtype(rows=1))
    assert load("covtype", tmp_path).x[0, :10].tolist() == [0.0] * 10


def test_the_folder_of_the_environment_is_used_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a" / "covtype.data", some_covtype(rows=3))
    put(tmp_path / "b" / "covtype.data", some_covtype(rows=4))
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "a"))
    assert len(load("covtype").y) == 3
    assert len(load("covtype", data=tmp_path / "b").y) == 4


def test_a_data_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"missing \(--data\) is not a folder"):
        load("mnist", data=tmp_path / "missing")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "missing"))
    with pytest.raises(BadInput, match=r"missing \(\$HOLDFAST_DATA\) is not a folder"):
        load("mnist")


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: b"",
        lambda good: good[:3],
        lambda good: good[:10],
        lambda good: good[:-1],
        lambda good: good + b"\0",
        lambda good: b"<html>" + good,
        lambda good: good[:3] + b"\1" + good[4:],
        lambda good: good[:4] + b"\xff" * 12 + good[16:],
        lambda good: gzip.compress(good)[:-1],
        lambda good: gzip.compress(good)[:100],
        lambda good: gzip.compress(good)[:200] + b"\0\0\0\0" + gzip.compress(good)[204:],
        lambda good: zipped(other=good),
    ],
)
def test_a_damaged_idx_file_is_corrupt_and_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = put(tmp_path / IMAGES, damage(some_mnist()[IMAGES]))
    with pytest.raises(HoldfastError) as caught:
        read_idx(path, dimensions=3)
    refusal(Corrupt, caught, path)


def test_images_without_a_label_each_are_corrupt(tmp_path: Path) -> None:
    put(tmp_path / IMAGES, some_mnist()[IMAGES])
    path = put(tmp_path / LABELS, idx(np.zeros(19, np.uint8)))
    with pytest.raises(HoldfastError, match=r"20 images but .* 19 labels") as caught:
        load("mnist", tmp_path)
    refusal(Corrupt, caught, path)


def test_a_label_that_is_no_digit_is_corrupt(tmp_path: Path) -> None:
    put(tmp_path / IMAGES, some_mnist()[IMAGES])
    path = put(tmp_path / LABELS, idx(np.full(20, 10, np.uint8)))
    with pytest.raises(HoldfastError, match="label 10") as caught:
        load("mnist", tmp_path)
    refusal(Corrupt, caught, path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda good: b"", "no data"),
        (lambda good: good[:-3], "columns changed from 55 to 54"),
        (lambda good: good.replace(b",", b";"), "could not convert"),
        (lambda good: b"Elevation,Aspect\n" + good, "could not convert"),
        (lambda good: good.replace(b"1", b"1.5", 1), "could not convert"),
        (lambda good: good.replace(b"1", b"99999", 1), "could not convert"),
        (lambda good: good.replace(b",", b",\xff", 1), "could not convert"),
        (lambda good: b"1,2,3\n", "3 columns"),
        (lambda good: b",".join([b"0"] * 55) + b"\n", r"classes 0\.\.0"),
        (lambda good: gzip.compress(good)[:-9], "cannot be unpacked"),
        (lambda good: zipped(**{"covtype.data.gz": gzip.compress(good)[:-9]}), "cannot be unpacked"),
        (lambda good: zipped(**{"covtype.data.gz": gzip.compress(good)})[:-9], "cannot be unpacked"),
        (lambda good: zipped(readme=good), "zip without 'covtype.data.gz'"),
    ],
)
def test_a_damaged_covtype_file_is_corrupt_and_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path = put(tmp_path / "covtype.data", damage(some_covtype()))
    with pytest.raises(HoldfastError, match=reason) as caught:
        read_covtype(path)
    refusal(Corrupt, caught, path)


def test_a_file_that_cannot_be_read_is_a_storage_failure(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"cannot read .*: Is a directory"):
        read_idx(tmp_path, dimensions=1)


real = pytest.mark.skipif(not os.environ.get("HOLDFAST_DATA"), reason="$HOLDFAST_DATA names no folder of real data")


@real
def test_the_real_mnist_has_its_published_counts() -> None:
    mnist = load("mnist")
    assert np.bincount(mnist.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.x.shape == (60_000, 784)
    assert mnist.x.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)
    assert mnist.x.std(dtype=np.float64) == pytest.approx(0.3081, abs=5e-5)


@real
def test_the_real_covtype_has_its_published_counts() -> None:
    covtype = load("covtype")
    assert covtype.x.shape == (581_012, 54)
    assert np.bincount(covtype.y).tolist() == [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    assert covtype.x[:, :10].min(axis=0).tolist() == [0.0] * 10
    assert covtype.x[:, :10].max(axis=0).tolist() == [1.0] * 10
    assert (covtype.x[:, 10:14].sum(axis=1) == 1).all()
    assert (covtype.x[:, 14:].sum(axis=1) == 1).all()
