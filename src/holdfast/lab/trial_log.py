"""Trials that are done, on disk: an interrupted experiment resumes where it stopped.

In go keys and numbers as they are found; `known` has all that were written, also by an earlier process.
"""

import json
from pathlib import Path

import numpy as np

from holdfast.errors import StorageFailed


class TrialLog:
    """Numbers by key, one line each, written as they come; a line torn by a kill is passed over."""

    def __init__(self, path: Path) -> None:
        self._path, self.known = path, dict(_read(path))
        try:
            self._file = path.open("ab", buffering=0)  # nothing is left over that could fail to be written at the end
            self._file.write(b"\n")  # a torn line must not swallow the next one
        except OSError as error:
            raise StorageFailed(f"cannot write {path}: {error.strerror}; name another --out") from error

    def note(self, key: str, value: float) -> None:
        """Write down a number, unless it is there already."""
        if key in self.known:
            return
        self.known[key] = value
        try:
            self._file.write(f"{json.dumps([key, value if np.isfinite(value) else None])}\n".encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {self._path}: {error.strerror}; free space and run again") from error

    def close(self) -> None:
        """Nothing more will be noted."""
        self._file.close()


def _read(path: Path) -> list[tuple[str, float]]:
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            key, value = json.loads(line)
            found.append((str(key), float("inf") if value is None else float(value)))
        except (ValueError, TypeError):
            continue
    return found
