"""The steps of a rank on their way to its history: each is put on record once what came out of it is known.

On a device that is a little later than the boundary; and lines are written several at a time, because a loop of short
steps would feel every one. So the last steps before a kill may be missing from a history: they are lost in any case, and
trained again. A save waits for none that it covers: they are settled first.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from holdfast.ddp.clock import Mark
from holdfast.ddp.fingerprint import Fingerprints, Sample
from holdfast.ddp.record import Record
from holdfast.events import Seconds, Step

TOGETHER = 64  # steps that wait at most
LATEST = 0.1  # seconds that a step waits at most, if another follows


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A step that was trained, all but what its device has yet to tell."""

    step: Step
    began: Mark
    ended: Mark
    sample: Sample
    time: float

    @property
    def is_known(self) -> bool:
        return self.ended.is_past and self.sample.is_there

    def settled(self) -> Step:
        """The step as it goes on record."""
        told = self.step.seconds
        seconds = Seconds(told.data, self.ended.since(self.began), told.stall, self.ended.of_device)
        return self.step._replace(seconds=seconds, state=self.sample.digest())


@dataclass(slots=True, eq=False)
class Reporting:
    """Puts the steps of a rank on record, in order."""

    record: Record
    fingerprints: Fingerprints
    _waiting: deque[Report] = field(default_factory=deque)

    def trained(self, step: Step, began: Mark, ended: Mark) -> None:
        """A step was trained; from time to time, what is known by then goes on record."""
        waiting, now = self._waiting, time.time()
        waiting.append(Report(step, began, ended, self.fingerprints.take(), now))
        if len(waiting) >= TOGETHER or not 0 <= now - waiting[0].time < LATEST:
            while waiting and (len(waiting) >= TOGETHER or waiting[0].is_known):
                self._settle()
            self.record.flush()

    def settle(self) -> None:
        """Put every step on record that was trained by now; waits for the device."""
        while self._waiting:
            self._settle()
        self.record.flush()

    def _settle(self) -> None:
        report = self._waiting.popleft()
        self.record.append(report.settled(), report.time)
