"""The steps of a rank on their way to its history: each is put on record once what came out of it is known.

On a device that is a little later than the boundary, so a few steps may be waiting. A save waits for none that it
covers: they are settled first.
"""

from collections import deque
from dataclasses import dataclass, field

from holdfast.ddp.clock import Mark
from holdfast.ddp.fingerprint import Fingerprints, Sample
from holdfast.ddp.record import Record
from holdfast.events import Step

LATE = 8  # steps that may be waiting: fewer than a device can be behind, so it always has work


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A step that was trained, all but what its device has yet to tell."""

    step: Step
    began: Mark
    ended: Mark
    sample: Sample

    @property
    def is_known(self) -> bool:
        return self.ended.is_past and self.sample.is_there

    def settled(self) -> Step:
        """The step as it goes on record."""
        seconds = self.step.seconds._replace(compute=self.ended.since(self.began), device=self.ended.of_device)
        return self.step._replace(seconds=seconds, state=self.sample.digest())


@dataclass(slots=True, eq=False)
class Reporting:
    """Puts the steps of a rank on record, in order."""

    record: Record
    fingerprints: Fingerprints
    _waiting: deque[Report] = field(default_factory=deque)

    def trained(self, step: Step, began: Mark, ended: Mark) -> None:
        """A step was trained; what is known by now goes on record."""
        self._waiting.append(Report(step, began, ended, self.fingerprints.take()))
        while self._waiting and (len(self._waiting) > LATE or self._waiting[0].is_known):
            self._settle()
        self.record.flush()

    def settle(self) -> None:
        """Put every step on record that was trained by now; waits for the device."""
        while self._waiting:
            self._settle()
        self.record.flush()

    def _settle(self) -> None:
        self.record.append(self._waiting.popleft().settled())
