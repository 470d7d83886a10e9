"""A log of finished trials on disk, so that an interrupted experiment resumes where it stopped."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.errors import StorageFailed


class TrialLog:
    """An append-only log file of numbers by key; `known` also holds the entries of earlier processes."""

    def __init__(self, path: Path) -> None:
        self._path, self.known = path, dict[str, float]()
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            with suppress(ValueError, TypeError):  # a line that was torn by a kill
                key, value = json.loads(line)
                self.known[str(key)] = float("inf") if value is None else float(value)
        try:
            self._file = path.open("ab", buffering=0)  # nothing stays in a buffer that could fail to be written later
            self._file.write(b"\n")  # ends a line that was torn by a kill
        except OSError as error:
            raise StorageFailed(f"cannot write {path}: {error.strerror}; name another --out.") from error

    def record(self, key: str, value: float) -> None:
        """Append `value` under `key`, unless the log already has this key."""
        if key in self.known:
            return
        self.known[key] = value
        try:
            self._file.write(f"{json.dumps([key, value if np.isfinite(value) else None])}\n".encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {self._path}: {error.strerror}; free space and run again.") from error

    def close(self) -> None:
        """Close the log file."""
        self._file.close()


def trials_folder(out: Path) -> Path:
    """Create and return the folder `trials` beside `out`, which experiments below the same parent share."""
    folder = out.parent / "trials"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"cannot write to {folder}: {error.strerror}; name another folder with --out.") from error
    return folder
