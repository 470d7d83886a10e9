"""The time that a thread waited for a processor: it was ready to run, but other work had all processors.

The kernel counts it for every thread. Time in which a thread sleeps, or waits for a disk or another thread, is not part
of it. Where the kernel does not count (on other systems than Linux, or in a sandbox), it is always 0.
"""

import os
from pathlib import Path

COUNTER = Path("/proc/thread-self/schedstat")  # nanoseconds that a thread ran, those that it waited, and its turns


class ProcessorWait:
    """A counter of the time that one thread, in which this object was made, waits for a processor.

    To measure an interval, read the clock first and this counter after it, at both ends: a thread often loses its
    processor as it returns from the kernel, which is right after the counter was read."""

    def __init__(self, counter: Path = COUNTER) -> None:
        self._file = -1
        if counter.exists():
            self._file = os.open(counter, os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """Return the seconds that the thread has waited so far. This takes 1.5 microseconds."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
