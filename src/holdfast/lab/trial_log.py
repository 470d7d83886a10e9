"""A log of finished trials on disk, so that an interrupted experiment resumes where it stopped."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.errors import StorageFailed


class TrialLog:
    """An append-only log file of numbers by key; `known` also holds the entries that earlier processes wrote.

    `code` is a digest of the code that computes the numbers. Entries of other code are not in `known`; `outdated` is
    their number. `reused` has the keys of earlier entries that were asked for again."""

    def __init__(self, path: Path, code: str) -> None:
        self._path, self._code, self.known, self.outdated = path, code, dict[str, float](), 0
        self.reused = set[str]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageFailed(
                f"cannot write to {path.parent}: {error.strerror}; name another folder with --out."
            ) from error
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            with suppress(ValueError, TypeError):  # a line that was torn by a kill
                digest, key, value = json.loads(line)
                if digest == code:
                    self.known[str(key)] = float("inf") if value is None else float(value)
                else:
                    self.outdated += 1
        self._earlier = frozenset(self.known)
        try:
            self._file = path.open("ab", buffering=0)  # nothing stays in a buffer that could fail to be written later
            self._file.write(b"\n")  # ends a line that was torn by a kill
        except OSError as error:
            raise StorageFailed(f"cannot write {path}: {error.strerror}; name another --out.") from error

    def get(self, key: str) -> float | None:
        """Return the value under `key`, or None if this code has not computed it yet."""
        self.reused |= {key} & self._earlier
        return self.known.get(key)

    def record(self, key: str, value: float) -> None:
        """Append `value` under `key`, unless the log already has this key."""
        if self.get(key) is not None:
            return
        self.known[key] = value
        line = json.dumps([self._code, key, value if np.isfinite(value) else None])
        try:
            self._file.write(f"{line}\n".encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {self._path}: {error.strerror}; free space and run again.") from error

    @property
    def remarks(self) -> list[str]:
        """Sentences for the reader of a result: which trials come from an earlier run, and which could not be used."""
        place, lines = f"{self._path.parent.name}/{self._path.name}", []
        if self.reused:
            lines.append(
                f"{len(self.reused)} measurements in {place} are reused from an earlier run with the same code; delete the "
                "file to measure them again."
            )
        if self.outdated:
            lines.append(
                f"{self.outdated} earlier measurements in {place} are not used, because the code of the model or of holdfast "
                "has changed since."
            )
        return lines

    def close(self) -> None:
        """Close the log file."""
        self._file.close()
