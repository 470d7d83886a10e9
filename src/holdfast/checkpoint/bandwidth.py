"""A limit of the bytes that a writer writes to the storage in a second, for saves in the background."""

import time
from collections.abc import Callable

from holdfast.checkpoint.digest import Progress

SLICE = 0.1  # seconds of the longest pause, after which an end of the limit is noticed


class TokenBucket:
    """A budget of bytes that grows by `rate` each second, up to that of one second. Taking more than it has makes a debt."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._left, self._at = rate, rate, now

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes at the time `now`; return the seconds until the debt is paid, or 0 if there is none."""
        self._left = min(self._rate, self._left + (now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._left / self._rate)


class BandwidthLimit:
    """A limit of `rate` bytes a second, which ends for good when `lift` is called or `is_over` returns True.

    In t seconds, at most the bytes of t + 1 seconds pass, and one piece of the file (16 MiB at most)."""

    def __init__(
        self,
        rate: float,
        is_over: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._is_over, self._clock, self._sleep = rate, is_over, clock, sleep
        self._bucket = TokenBucket(rate, clock())
        self._lifted = False

    def lift(self) -> None:
        """End the limit: a save that waits goes on. Thread-safe."""
        self._lifted = True

    def limiting(self, progress: Progress) -> Progress:
        """Return a function that reports bytes to `progress`, and waits as long as the limit demands.

        A pause is reported in parts, so that a slow save is not taken for a hang."""

        def passed(count: int) -> None:
            size = max(1, int(SLICE * self._rate))
            for start in range(0, count, size):
                part = min(size, count - start)
                progress(part)
                if not (self._lifted or self._is_over()):
                    self._sleep(self._bucket.take(part, self._clock()))

        return passed
