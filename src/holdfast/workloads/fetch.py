"""How a data file comes to be on this disk: found in a folder, or fetched from its official home into the cache.

Nothing here knows what a file contains; its checksum is all that is asked of it.

Arrays that took long to make from a file, kept in the cache folder for the next process that needs them.

A served run has many processes and each loads its workload, on a machine where reading one archive takes many seconds.
What is kept is named by the content of the file and of the code that read it, so nothing stale is ever found.
"""

import hashlib
import http.client
import os
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from holdfast.errors import BadInput, DataMissing, StorageFailed

VARIABLE = "HOLDFAST_DATA"
TIMEOUT = 30.0  # seconds without a byte before a server counts as silent
CHUNK = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a data set: what it may be called, in which folders, and where its official copy lives.

    The first folder and the first name are those of the official copy, whose checksum this is.
    """

    dataset: str
    folders: tuple[str, ...]  # below a data folder; "." is the data folder itself
    names: tuple[str, ...]
    urls: tuple[str, ...]  # the official home first, then mirrors
    sha256: str

    def at_home_in(self, cache: Path) -> Path:
        return cache / self.folders[0] / self.names[0]


class _Refused(Exception):
    """A server did not deliver the file; the next one may."""


def obtain(file: DataFile, data: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """The path of a data file: from `data` or else $HOLDFAST_DATA, from the cache, or fetched now.

    A download shows as a task of `progress`, or as a bar of its own where stderr is a terminal.
    """
    cache = cache_folder()
    looked = [folder for folder in (data_folder(data), cache) if folder is not None]
    for folder in looked:
        if found := find(file, folder):
            return found
    try:
        return fetch(file, cache, progress)
    except _Refused as error:
        raise DataMissing(
            f"{file.dataset}: no {file.names[0]} in {' or '.join(map(str, looked))}, and fetching it failed ({error}). "
            f"Name a folder that holds it with --data DIR or ${VARIABLE}, or download it to {file.at_home_in(cache)}."
        ) from None


def data_folder(data: str | os.PathLike[str] | None) -> Path | None:
    """The folder the user named, by argument or by environment; a folder that is not there is a mistake."""
    named, by = (data, "--data") if data is not None else (os.environ.get(VARIABLE) or None, f"${VARIABLE}")
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise BadInput(f"the data folder {folder} ({by}) is not a folder: name one that holds the data sets.")
    return folder


def cache_folder() -> Path:
    """Where fetched files are kept, as the XDG convention has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "holdfast"


def find(file: DataFile, folder: Path) -> Path | None:
    """The first of the file's places below a data folder that exists."""
    places = (folder / below / name for below in file.folders for name in file.names)
    return next((place for place in places if place.is_file()), None)


def fetch(file: DataFile, cache: Path, progress: Progress | None = None) -> Path:
    """Download a file into the cache: whole and with the right checksum, or not at all."""
    final = file.at_home_in(cache)
    if progress is None:
        with _bar() as own:
            return _fetch(file, final, own)
    return _fetch(file, final, progress)


def _fetch(file: DataFile, final: Path, progress: Progress) -> Path:
    refusals = []
    for url in file.urls:
        try:
            _fetch_one(url, file.sha256, final, progress)
        except _Refused as error:
            refusals.append(f"{url}: {error}")
        except OSError as error:
            raise StorageFailed(
                f"cannot keep {final.name} in {final.parent}: {error.strerror or error}. "
                "Free space or fix permissions there, or set $XDG_CACHE_HOME to another folder."
            ) from error
        else:
            return final
    raise _Refused("; ".join(refusals) or "there is no address to fetch it from")


def _fetch_one(url: str, sha256: str, final: Path, progress: Progress) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own for every download: two processes may fetch the same file at once.
    descriptor, name = tempfile.mkstemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as out:
            got = _download(url, out, progress)
            os.fsync(out.fileno())
        if got != sha256:
            raise _Refused(f"sha256 is {got[:12]}, expected {sha256[:12]}")
        os.replace(name, final)  # the commit point: before it the cache does not have the file
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108  # the twin of mkstemp and os.replace above


def _download(url: str, out: BinaryIO, progress: Progress) -> str:
    """Copy what the server sends and return its sha256."""
    digest = hashlib.sha256()
    task = progress.add_task(url.rsplit("/", 1)[-1], total=None)
    try:
        for chunk, total in _chunks(url):
            out.write(chunk)
            digest.update(chunk)
            progress.update(task, total=total, advance=len(chunk))
        out.flush()
    finally:
        progress.remove_task(task)
    return digest.hexdigest()


def _chunks(url: str) -> Iterator[tuple[bytes, int | None]]:
    """The body in pieces, each with the length the server announced; every network error is a refusal."""
    request = urllib.request.Request(url, headers={"User-Agent": "holdfast"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            got = 0
            while chunk := response.read(CHUNK):
                got += len(chunk)
                yield chunk, total
            # A connection cut short ends like a complete one: http.client does not complain.
            if total is not None and got < total:
                raise _Refused(f"the transfer ended after {got} of {total} bytes")
    except (OSError, http.client.HTTPException) as error:
        raise _Refused(" ".join(str(error).split()) or type(error).__name__) from error


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


Named = dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32]]
WORTH = 1 << 20  # bytes of a file: a smaller one is read at once


def kept(source: Path, code: Path, make: Callable[[], Named]) -> Named:
    """What `make` makes of a file, found in the cache or put there; a cache that cannot be used is passed over."""
    if not source.is_file() or source.stat().st_size < WORTH:
        return make()
    place = cache_folder() / "prepared" / f"{_digest(source, code)}.npz"
    with suppress(OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return _read(place)
    made = make()
    with suppress(OSError):
        _put(place, made)
    return made


def _read(place: Path) -> Named:
    with place.open("rb") as file, np.load(file) as found:
        return {name: found[name] for name in found.files}


def _put(place: Path, made: Named) -> None:
    """Several processes may do so at once: each puts a whole file in place."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **made)  # type: ignore[arg-type]
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(*files: Path) -> str:
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:32]
