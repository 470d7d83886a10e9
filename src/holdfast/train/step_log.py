"""The steps of a rank on their way to its history: each is put on record once what came out of it is known.

On a device that is a little later than the boundary; and lines are written several at a time, because a loop of short
steps would feel every one. So the last steps before a kill may be missing from a history: they are lost in any case, and
trained again. A save waits for none that it covers: they are settled first.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.events import Seconds, Step
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position
from holdfast.train.clock import Moment, between, is_of_device, is_past
from holdfast.train.state.fingerprint import Fingerprints, Sample
from holdfast.train.state.record import Record

TOGETHER = 64  # steps that wait at most
LATEST = 0.1  # seconds that a step waits at most, if another follows


@dataclass(slots=True, eq=False)
class Part:
    """Which part of every window is this rank's: that of this rank among so many."""

    rank: int
    of: int


Handed: TypeAlias = tuple[int, Position, Samples, float, float, Moment]
"""What is known of a step when it begins: its number and place, its samples, the seconds that were waited for them and
for a save, and when."""
Ended: TypeAlias = tuple[Moment, tuple[int, int, int], float | None]
"""What is known at its end: when, what was done, and the loss. The rest is told by the device, later."""
# Tuples, because to make an object of a class of ours takes longer, at a moment when training waits for it.


@dataclass(slots=True, eq=False)
class Reporting:
    """Puts the steps of a rank on record, in order."""

    record: Record
    fingerprints: Fingerprints
    attempt: int
    part: Part
    _waiting: deque[tuple[float, Handed, Ended, Sample]] = field(default_factory=deque)
    _flushed: float = 0.0

    def trained(self, handed: Handed, ended: Ended) -> None:
        """A step was trained; from time to time, what is known by then goes on record."""
        waiting, now = self._waiting, time.time()
        waiting.append((now, handed, ended, self.fingerprints.take()))
        if len(waiting) >= TOGETHER or not 0 <= now - self._flushed < LATEST:
            while len(waiting) >= TOGETHER:
                self._settle()
            self.settle_known()
            self.record.flush()
            self._flushed = now

    def settle_known(self) -> None:
        """Remember the steps that can be told without waiting, for the next flush."""
        waiting = self._waiting
        while waiting:
            _, _, (end, *_), sample = waiting[0]
            if not (is_past(end) and sample.is_there):
                return
            self._settle()

    def settle(self) -> None:
        """Put every step on record that was trained by now; waits for the device."""
        while self._waiting:
            self._settle()
        self.record.flush()

    def _settle(self) -> None:
        time, (step, at, samples, data, stall, began), (end, effort, loss), sample = self._waiting.popleft()
        seconds = Seconds(data, between(began, end), stall, is_of_device(end))
        trained = Step(
            self.attempt,
            self.part.of,
            self.part.rank,
            at.epoch,
            at.cursor,
            step,
            samples,
            seconds,
            sample.digest(),
            *effort,
            loss,
        )
        self.record.append(trained, time)
