"""A sign of life: a worker touches a file twice a second, and its supervisor sees how long it has been silent.

It tells a stopped process, or one that never gives another Python thread its turn, from one that works.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

BEAT = 0.5
LONGEST_LOOK = 1.0


def start(path: Path) -> None:
    """Touch the file now and then twice a second, for as long as this process lives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    threading.Thread(target=_beat, args=(path,), name="heartbeat", daemon=True).start()


class Pulse:
    """How long the owner of a heartbeat file has been silent, by our own clock."""

    def __init__(self, path: Path, now: float) -> None:
        self._path, self._looked = path, now
        self._beat = self._last_beat()
        self._silence = 0.0

    def silence(self, now: float) -> float:
        """Seconds without a beat, as far as we were looking.

        A gap between two looks counts for little: whoever stopped us (a suspended machine, Ctrl-Z) may have stopped
        the worker, too.
        """
        beat = self._last_beat()
        self._silence = 0.0 if beat != self._beat else self._silence + min(now - self._looked, LONGEST_LOOK)
        self._beat, self._looked = beat, now
        return self._silence

    def _last_beat(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0


def _beat(path: Path) -> None:
    while True:
        time.sleep(BEAT)
        with suppress(OSError):  # the folder may be gone; silence is then what the supervisor hears
            os.utime(path)
