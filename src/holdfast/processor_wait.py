"""The time that a thread waited for a processor: it was ready to run, but other work had all processors.

The kernel counts it for every thread. Time in which a thread sleeps, or waits for a disk or another thread, is not part
of it. Where the kernel does not count (on other systems than Linux, or in a sandbox), it is always 0.
"""

import os
from pathlib import Path

COUNTER = Path("/proc/thread-self/schedstat")  # nanoseconds that a thread ran, those that it waited, and its turns
NEGLIGIBLE = 0.1  # of the own part of a step: waits of this share make no worker slow (`supervise.stragglers.RATIO`)
CAREFUL = 64  # steps that are measured from their beginning after a wait


class ProcessorWait:
    """A counter of the time that one thread, in which this object was made, waits for a processor.

    To measure an interval, read the clock first and this counter after it, at both ends: a thread often loses its
    processor as it returns from the kernel, which is right after the counter was read."""

    def __init__(self, counter: Path = COUNTER) -> None:
        self._file = -1
        if counter.exists():
            self._file = os.open(counter, os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """Return the seconds that the thread has waited so far."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class OwnWaits:
    """The waits for a processor in a rank's own part of each step, which ends when its gradients are computed.

    A read takes some microseconds. At the end of the own part it costs nothing, because the rank would wait for the
    other ranks. At the beginning it would make each step longer, so the counter is read there only while the thread
    does wait: within the last `CAREFUL` steps, the waits from one end to the next were not `NEGLIGIBLE`."""

    def __init__(self, counter: ProcessorWait) -> None:
        self._counter = counter
        self._begun: float | None = None
        self._ended = 0.0
        self._careful = 0  # steps that are still to be measured from the beginning

    def begin(self) -> None:
        """Note that the own part of a step begins. Read the clock before this call."""
        self._begun = self._counter.seconds() if self._careful else None

    def end(self, seconds: float) -> float:
        """Return the seconds that the thread waited in the own part, which took `seconds` by the clock.

        Read the clock before this call."""
        now = self._counter.seconds()
        since_last, self._ended = now - self._ended, now
        self._careful = CAREFUL if since_last > NEGLIGIBLE * seconds else max(0, self._careful - 1)
        # Between the readings of the clock and of the counter, the thread may wait for longer than the step took.
        return 0.0 if self._begun is None else min(seconds, now - self._begun)
