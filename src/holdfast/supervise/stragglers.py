"""Finds workers that are slower than the others, by the time that each computes its own part of every step. No I/O.

A worker that is not slow waits for a slow one in every step, so the steps of all workers take equally long. A worker
therefore reports its own time: from the request of its batch until its gradients are computed, without the wait for the
other workers' gradients. The own times of one step are compared with each other, so a step that is longer for all
workers makes no worker slow.

Single steps vary, often by 20 % even on an idle machine. So the evidence of many steps is added up, as in Page's CUSUM
test: the logarithm of the ratio of a worker's own time to the others', minus the logarithm of `RATIO`. Steps in which
the worker was slower add to its evidence, and other steps take from it. The worker counts as slow once the evidence
reaches `SLOW`, and as normal again once it is back at 0. A worker that is twice as slow is thus named after fewer steps
than a worker that is only a little slower. Workers that are slow at the same time are compared with each other, too, so
they are named later than a single slow worker.

On a machine with more work than processors, the workers get unequal shares of the processors, often for many steps. That
says nothing about a worker: its replacement would wait for a processor as well. So the time for which the training
thread waited for a processor (`processor_wait`) is not part of its own time. On CUDA devices it is: there the own time
is measured by the device.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from statistics import geometric_mean, median_low
from typing import NamedTuple

from holdfast.progress import OWN_TIMES
from holdfast.runs.config import SLOWEST_NORMAL

RATIO = SLOWEST_NORMAL  # of a worker's own time to that of the others, from which a step counts as slow
SLOW = 5.0  # evidence from which a worker counts as slow: 28 steps in a row at 1.5 times the time of the others
MOST = 2.0  # ratio as which a time counts at most: it takes 11 steps to name a worker, however long they are
LEAST_RATIO = 1 / 1.5  # as which a time counts at least: a long step of another worker takes little from the evidence
LEAST = 0.0005  # seconds by which a step must be slower
LATEST = 20  # steps whose mean is the reported ratio
LATE = 64  # steps after which a time no longer arrives; times measured on a GPU are known a little later
FIRST = 10  # steps of a worker that do not count: the first ones compile, allocate and fill caches

OwnTime = Callable[[int], float | None]
"""A function that returns a worker's own time of a step in seconds, or None if it is not known."""


class SlowSteps(NamedTuple):
    """The slow steps of the worker with the process number `seat`: from step `since` to before step `until`, and how long the others waited for it."""

    seat: int
    since: int
    until: int
    ratio: float  # of the own time to that of the others: the geometric mean of the latest steps
    seconds: float
    is_over: bool = False  # the worker is as fast as the others again, or has left


@dataclass(slots=True)
class _Comparison:
    """The steps of one worker, compared with the other workers, and its present period of slow steps."""

    steps: int = 0
    evidence: float = 0.0  # from 0, for normal steps, to `SLOW`
    is_slow: bool = False  # the evidence has reached `SLOW`
    since: int = 0  # the first step of the evidence
    until: int = 0  # its last slow step, plus 1
    ratio: float = 1.0  # in the latest steps before `until`
    seconds: float = 0.0  # by which the steps of the evidence were slower
    reported: int = 0  # steps of the period at its last report
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    def add(self, step: int, own: float, others: float) -> None:
        """Compare a step that took the worker `own` seconds, and the other workers `others` seconds (see `_usual`)."""
        if self.is_over:
            return
        if self.evidence == 0.0:
            self.since, self.seconds = step, 0.0
            self.ratios.clear()
        ratio = own / others if others > 0 else 1.0
        self.ratios.append(max(LEAST_RATIO, ratio))
        self.seconds += max(0.0, own - others)
        evidence = _evidence(ratio, own - others)
        self.evidence = min(SLOW, max(0.0, self.evidence + evidence))
        self.is_slow |= self.evidence == SLOW
        if evidence > 0.0:
            self.until, self.ratio = step + 1, geometric_mean(self.ratios)

    @property
    def has_warmed_up(self) -> bool:
        return self.steps > FIRST

    @property
    def is_over(self) -> bool:
        """True once a slow worker is as fast as the others again."""
        return self.is_slow and self.evidence == 0.0

    @property
    def is_due(self) -> bool:
        """True at the first report of a period, and each time the period has become twice as long."""
        return self.is_slow and self.until - self.since >= 2 * self.reported

    def period(self, seat: int, *, is_over: bool) -> SlowSteps:
        self.reported = self.until - self.since
        return SlowSteps(seat, self.since, self.until, self.ratio, self.seconds, is_over)


def _evidence(ratio: float, excess: float) -> float:
    """Return the evidence of one step: positive if the step was slower than `RATIO`, negative if it was not."""
    if excess < LEAST:
        ratio = min(ratio, 1.0)
    return log(min(MOST, max(LEAST_RATIO, ratio)) / RATIO)


def _usual(own_times: Sequence[float]) -> float:
    """Return the geometric mean of the other workers' own times, each within a factor of `MOST` of their median.

    The median alone varies more from step to step, because most nodes have few workers."""
    middle = median_low(own_times)
    return geometric_mean([min(MOST * middle, max(middle / MOST, own)) for own in own_times]) if middle > 0 else 0.0


class StragglerDetector:
    """A detector of slow workers among the training workers of one node."""

    def __init__(self) -> None:
        self._workers: dict[int, _Comparison] = {}
        self._next: int | None = None  # the next step to compare

    def look(self, own_times: Mapping[int, OwnTime], reached: int) -> list[SlowSteps]:
        """Compare the steps that all workers have finished, up to before step `reached`; return what to report.

        `own_times` has the training workers by process number. A worker that is missing has left."""
        reports = self._end([seat for seat in self._workers if seat not in own_times])
        if len(own_times) < 2:
            self._next = reached
            return reports
        first = self._next if self._next is not None and self._next <= reached else reached
        self._next = max(first, reached - OWN_TIMES // 2)
        while self._next < reached and self._compare(self._next, own_times, reached):
            self._next += 1
        reports += self._end([seat for seat, worker in self._workers.items() if worker.is_over])
        return reports + [worker.period(seat, is_over=False) for seat, worker in self._workers.items() if worker.is_due]

    def end(self) -> list[SlowSteps]:
        """Forget all workers, because they have exited; return the final report of each slow one."""
        self._next = None
        return self._end([*self._workers])

    def _compare(self, step: int, own_times: Mapping[int, OwnTime], reached: int) -> bool:
        """Compare the workers in `step`; return False if their times of it may still arrive."""
        known = {seat: value for seat, own_time in own_times.items() if (value := own_time(step)) is not None}
        if len(known) < len(own_times):
            return step < reached - LATE  # a worker has just joined, or works in a way that is not timed
        for seat in known:
            self._workers.setdefault(seat, _Comparison()).steps += 1
        compared = {seat: own for seat, own in known.items() if self._workers[seat].has_warmed_up}
        for seat, own in compared.items() if len(compared) > 1 else ():
            others = _usual([value for other, value in compared.items() if other != seat])
            self._workers[seat].add(step, own, others)
        return True

    def _end(self, seats: list[int]) -> list[SlowSteps]:
        ended = [(seat, self._workers.pop(seat)) for seat in seats]
        return [worker.period(seat, is_over=True) for seat, worker in ended if worker.is_slow]
