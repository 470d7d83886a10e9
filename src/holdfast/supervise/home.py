"""Whether the folder of a run is still where it was: somebody may move it, or remove it, while the run trains."""

import time
from pathlib import Path

LOOK = 0.5  # seconds between two looks


class Home:
    """The folder, as it was when the run began."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._looked, self._is_gone = folder, 0.0, False
        self._was: tuple[int, int] | None = None
        self._was = self._identity()

    def is_gone(self, *, now: bool = False) -> bool:
        """Whether its name stands for another folder, or for none, when it was last looked at, or now."""
        if now or time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            self._is_gone = self._identity() != self._was
        return self._is_gone

    @property
    def line(self) -> str:
        """What there is to say of it."""
        return (
            f"{self._folder} was moved or removed while the run trained: put it back, or name its new place with --out"
        )

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._folder.stat()
        except FileNotFoundError:
            return None
        except OSError:  # a disk that does not answer is no folder that was moved
            return self._was
        return found.st_dev, found.st_ino
