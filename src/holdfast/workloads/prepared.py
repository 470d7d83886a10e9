"""Arrays that took long to make from a file, kept in the cache folder for the next process that needs them.

A served run has many processes and each loads its workload, on a machine where reading one archive takes many seconds.
What is kept is named by the content of the file and of the code that read it, so nothing stale is ever found.
"""

import os
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.workloads.fetch import cache_folder

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
