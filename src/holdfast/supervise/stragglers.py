"""Finds workers that are slower than the others, by the time that each computes its own part of every step. No I/O.

A worker that is not slow waits for a slow one in every step, so the steps of all workers take equally long. A worker
therefore reports its own time: from the request of its batch until its gradients are computed, without the wait for the
other workers' gradients. The own times of one step are compared with each other, so a step that is longer for all
workers makes no worker slow. Single steps vary; only a worker that is slow in nearly all of its latest steps counts.

On a machine with more work than processors, the workers get unequal shares of the processors, often for many steps. That
says nothing about a worker: its replacement would wait for a processor as well. So the time for which the training
thread waited for a processor (`processor_wait`) is not part of its own time. On CUDA devices it is: there the own time
is measured by the device.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from holdfast.progress import OWN_TIMES
from holdfast.runs.config import SLOWEST_NORMAL

WINDOW = 40  # latest steps that are compared
SLOW_STEPS = 32  # of these, in which the worker was slower than the others
NORMAL_STEPS = 20  # once fewer steps than this are slow, the worker counts as normal again
RATIO = SLOWEST_NORMAL  # of a worker's own time to the median of the others, from which a step counts as slow
LEAST = 0.0005  # seconds by which a step must be slower
LATE = 64  # steps after which a time no longer arrives; times measured on a GPU are known a little later
FIRST = 10  # steps of a worker that do not count: the first ones compile, allocate and fill caches

OwnTime = Callable[[int], float | None]
"""A function that returns a worker's own time of a step in seconds, or None if it is not known."""


class SlowSteps(NamedTuple):
    """The slow steps of the worker with the process number `seat`: from step `since` to before step `until`, and how long the others waited for it."""

    seat: int
    since: int
    until: int
    ratio: float  # median over the latest steps, of the own time to the median own time of the others
    seconds: float
    is_over: bool = False  # the worker is as fast as the others again, or has left


class _OwnStep(NamedTuple):
    step: int
    ratio: float
    excess: float  # seconds

    @property
    def is_slow(self) -> bool:
        return self.ratio >= RATIO and self.excess >= LEAST


@dataclass(slots=True)
class _Latest:
    """The latest steps of one worker, compared with the other workers, and its present period of slow steps."""

    steps: deque[_OwnStep] = field(default_factory=lambda: deque(maxlen=WINDOW))
    compared: int = 0
    since: int | None = None
    seconds: float = 0.0
    reported: int = 0

    def add(self, step: _OwnStep) -> None:
        self.compared += 1
        if self.compared <= FIRST:
            return
        self.steps.append(step)
        slow = [latest for latest in self.steps if latest.is_slow]
        if self.since is None and len(slow) >= SLOW_STEPS:
            period = slow[-SLOW_STEPS:]
            self.since, self.seconds = period[0].step, sum(latest.excess for latest in period)
        elif self.since is not None:
            self.seconds += max(0.0, step.excess)

    @property
    def is_normal_again(self) -> bool:
        return sum(latest.is_slow for latest in self.steps) < NORMAL_STEPS

    @property
    def is_due(self) -> bool:
        """True at the first report of a period, and each time the period has become twice as long."""
        return self.since is not None and self.steps[-1].step + 1 - self.since >= 2 * self.reported

    def period(self, seat: int, *, is_over: bool) -> SlowSteps:
        assert self.since is not None
        until = self.steps[-1].step + 1
        self.reported = until - self.since
        # The last half tells the present ratio soon after the worker has become slow.
        ratio = median(step.ratio for step in list(self.steps)[-WINDOW // 2 :])
        return SlowSteps(seat, self.since, until, ratio, self.seconds, is_over)


class StragglerDetector:
    """A detector of slow workers among the training workers of one node."""

    def __init__(self) -> None:
        self._workers: dict[int, _Latest] = {}
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
        over = [seat for seat, worker in self._workers.items() if worker.since is not None and worker.is_normal_again]
        reports += self._end(over)
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
        for seat, own in known.items():
            usual = median(value for other, value in known.items() if other != seat)
            compared = _OwnStep(step, own / usual if usual > 0 else 1.0, own - usual)
            self._workers.setdefault(seat, _Latest()).add(compared)
        return True

    def _end(self, seats: list[int]) -> list[SlowSteps]:
        ended = [(seat, self._workers.pop(seat)) for seat in seats]
        return [worker.period(seat, is_over=True) for seat, worker in ended if worker.since is not None]
