"""The steps of a rank on their way to its history: each is put on record once what came out of it is known.

On a device that is a little later than the boundary; and lines are written several at a time, because a loop of short
steps would feel every one. So the last steps before a kill may be missing from a history: they are lost in any case, and
trained again. A save waits for none that it covers: they are settled first.

How long a step took: by the clock of the process, or on a device by events in its own queue.

A process only hands work to a device, and may be done with that long before the device is: what it would measure is the
time to launch. Events are marks in the device's queue; nobody waits for them.

What is done with a window: backward passes of the replicas, steps of the optimizers, and gradients that wait for one.

That a window was trained, and not only handed out, goes on record; and a state is saved only where no gradients wait for
their optimizer, since gradients are no part of it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.errors import BadInput
from holdfast.events import Seconds, Step
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position
from holdfast.train.replicate import Replica
from holdfast.train.state.attempt import Recorder
from holdfast.train.state.fingerprint import Fingerprints, Sample
from holdfast.train.state.protected import Protected

Moment = float | torch.cuda.Event
"""A moment of the training: when everything queued before it is done."""


def clock_of(device: torch.device) -> Callable[[], Moment]:
    """What tells the moment that it is, for a training on this device."""
    if device.type != "cuda":
        return perf_counter

    def now() -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return now


def is_past(moment: Moment) -> bool:
    """Whether it has come."""
    return isinstance(moment, float) or moment.query()


def is_of_device(moment: Moment) -> bool:
    """Whether it is a moment of a device."""
    return not isinstance(moment, float)


def between(earlier: Moment, later: Moment) -> float:
    """Seconds from one moment to a later one; waits until that has come."""
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000
    assert isinstance(earlier, float)
    assert isinstance(later, float)
    return later - earlier


LONGEST = 1000  # windows that gradients are waited for; a script that never steps is saved all the same


class Effort:
    """Counts what is done with each window."""

    def __init__(self, replicas: Iterable[Replica], protected: Protected) -> None:
        self._replicas, self._protected = list(replicas), protected
        self._stepped = 0
        self._before = (0, 0, 0)
        self._waited = 0  # windows since the last step of an optimizer
        self._known: set[int] = set()
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def taken(self) -> tuple[int, int, int]:
        """Since the last time: backward passes that were summed over the ranks, those held back, steps of optimizers."""
        reduced = held = 0
        for each in self._replicas:
            reduced, held = reduced + each.reduced, held + each.held
        before, self._before = self._before, (reduced, held, self._stepped)
        stepped = self._stepped - before[2]
        self._waited = 0 if stepped else self._waited + 1
        return reduced - before[0], held - before[1], stepped

    @property
    def is_idle(self) -> bool:
        """Whether nothing was done since the last time: no backward pass, no step, and no gradients are there."""
        passes = sum(each.reduced + each.held for each in self._replicas)
        return passes == sum(self._before[:2]) and self._stepped == self._before[2] and not self._has_gradients

    @property
    def is_pending(self) -> bool:
        """Whether gradients of earlier windows wait for their optimizer to step."""
        return 0 < self._waited <= LONGEST and self._has_gradients

    @property
    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None
            for optimizer in self._protected.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def close(self) -> None:
        """Count no more."""
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._known:
            self._protected.check_trainer(optimizer)
            self._known.add(id(optimizer))
        for each in self._replicas:
            if each.holds_back:
                _check_summed(optimizer, each)
        self._stepped += 1


def _check_summed(optimizer: Optimizer, replica: Replica) -> None:
    """Refuse a step by the gradients of one rank: from then on no two ranks would have the same weights."""
    held = {id(each) for each in replica.ddp.parameters()}
    if any(id(each) in held for group in optimizer.param_groups for each in group["params"]):
        raise BadInput(
            f"{type(optimizer).__name__} stepped before the gradients of all ranks were summed: with micro_batches, step "
            "only where batch.is_last is true"
        )


TOGETHER = 64  # steps that wait at most
LATEST = 0.1  # seconds that a step waits at most, if another follows


@dataclass(slots=True, eq=False)
class Place:
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

    record: Recorder
    fingerprints: Fingerprints
    attempt: int
    part: Place
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
            if not (is_past(end) and sample.has_arrived):
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
