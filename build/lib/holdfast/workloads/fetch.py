"""Find a data file in a folder, or download it from its official home into the cache.

Arrays that take long to read from a file are cached too, because every process of a run loads its workload.
"""

import hashlib
import http.client
import io
import os
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from holdfast.atomic_write import write_atomically
from holdfast.errors import BadInput, DataMissing, StorageFailed

VARIABLE = "HOLDFAST_DATA"
TIMEOUT = 30.0  # seconds without a byte before a server counts as silent
CHUNK = 1 << 18
Folder = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a data set: its checksum, its URLs, and the folders and names under which it may be stored."""

    dataset: str
    folders: tuple[str, ...]  # below a data folder; "." is the data folder itself
    names: tuple[str, ...]
    urls: tuple[str, ...]  # the official home first, then mirrors
    sha256: str
    extracted: tuple[str, ...] = ()  # folders below a data folder that may hold the content of the archive

    def at_home_in(self, cache: Path) -> Path:
        return cache / self.folders[0] / self.names[0]


class _Refused(Exception):
    """An exception that says that one server did not deliver the file; another server may be tried."""


def obtain(file: DataFile, data: Folder = None) -> Path:
    """Return the path of a data file in `data`, $HOLDFAST_DATA or the cache; download it if it is not there."""
    cache = cache_folder()
    folders = [folder for folder in (data_folder(data), cache) if folder is not None]
    for folder in folders:
        if path := find(file, folder):
            return path
    try:
        return fetch(file, cache)
    except _Refused as error:
        raise DataMissing(
            f"{file.dataset}: no {file.names[0]} in {' or '.join(map(str, folders))}, and fetching it failed ({error}). "
            f"Name a folder that holds it with --data DIR or ${VARIABLE}, or download it to {file.at_home_in(cache)}."
        ) from None


def data_folder(data: Folder) -> Path | None:
    """Return the folder `data` or $HOLDFAST_DATA, or None if both are unset.

    Raise BadInput if the folder does not exist."""
    named, by = (data, "--data") if data is not None else (os.environ.get(VARIABLE) or None, f"${VARIABLE}")
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise BadInput(f"the data folder {folder} ({by}) is not a folder: name one that holds the data sets.")
    return folder


def cache_folder() -> Path:
    """Return the folder for downloaded files, $XDG_CACHE_HOME/holdfast or ~/.cache/holdfast."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "holdfast"


def find(file: DataFile, folder: Path) -> Path | None:
    files = (folder / below / name for below in file.folders for name in file.names)
    extracted = (folder / name for name in file.extracted)
    return next(chain(filter(Path.is_file, files), filter(Path.is_dir, extracted)), None)


def fetch(file: DataFile, cache: Path) -> Path:
    """Download a file into the cache and return its path; only a complete file with the right checksum is stored."""
    final = file.at_home_in(cache)
    refusals = []
    for url in file.urls:
        try:
            _fetch_one(url, file.sha256, final)
        except _Refused as error:
            refusals.append(f"{url}: {error}")
        except OSError as error:
            hint = "Free space or fix permissions there, or set $XDG_CACHE_HOME to another folder."
            reason = error.strerror or error
            raise StorageFailed(f"cannot keep {final.name} in {final.parent}: {reason}. {hint}") from error
        else:
            return final
    raise _Refused("; ".join(refusals) or "there is no address to fetch it from")


def _fetch_one(url: str, sha256: str, final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for every download: two processes may fetch the same file at once.
    descriptor, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as out:
            digest = _download(url, out)
            out.flush()
            os.fsync(out.fileno())
        if digest != sha256:
            raise _Refused(f"sha256 is {digest[:12]}, expected {sha256[:12]}")
        os.replace(name, final)  # the commit point: before it the cache does not have the file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108  # the twin of mkstemp and os.replace above


def _download(url: str, out: BinaryIO) -> str:
    digest, console = hashlib.sha256(), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(url.rsplit("/", 1)[-1], total=None)
        for chunk, total in _chunks(url):
            out.write(chunk)
            digest.update(chunk)
            progress.update(task, total=total, advance=len(chunk))
    return digest.hexdigest()


def _chunks(url: str) -> Iterator[tuple[bytes, int | None]]:
    request = urllib.request.Request(url, headers={"User-Agent": "holdfast"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            received = 0
            while chunk := response.read(CHUNK):
                received += len(chunk)
                yield chunk, total
            # A connection cut short ends like a complete one: http.client does not complain.
            if total is not None and received < total:
                raise _Refused(f"the transfer ended after {received} of {total} bytes")
    except (OSError, http.client.HTTPException) as error:
        raise _Refused(" ".join(str(error).split()) or type(error).__name__) from error


Named = dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32]]
WORTH = 1 << 20  # bytes; a smaller file is not worth caching


def kept(source: Path, code: Path, make: Callable[[], Named]) -> Named:
    """Return the arrays that `make` reads from the file `source`, or the cached result of an earlier call.

    The cache is used until `source` changes, or `code`, the file of the module that defines `make`."""
    if not source.is_file() or source.stat().st_size < WORTH:
        return make()
    digests = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in (source, code))
    path = cache_folder() / "prepared" / f"{hashlib.sha256(digests).hexdigest()[:32]}.npz"
    unusable = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)
    with suppress(*unusable), path.open("rb") as file, np.load(file) as stored:
        return {name: stored[name] for name in stored.files}
    arrays = make()
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, packed.getvalue(), path.with_suffix(f".{os.getpid()}"))
    return arrays
