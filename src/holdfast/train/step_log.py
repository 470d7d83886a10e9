"""The record of every step: its samples, its times, the work done in it, its loss, and a fingerprint of the state.

On a device the result of a step is known a little later than its boundary, and lines are written several at a time,
because a loop of short steps would feel each one. So the last steps before a kill may be missing from a history: they
are lost in any case, and trained again. A save first writes every step that it covers.
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
from holdfast.live.recovery import LiveRecovery
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position
from holdfast.train.data.loader import LoadRequest
from holdfast.train.observe.observer import StepObserver
from holdfast.train.replicate import Replica
from holdfast.train.state.attempt import Recorder
from holdfast.train.state.fingerprint import Fingerprints, Sample
from holdfast.train.state.protected import Protected

MAX_WAITING = 64  # steps that wait to be written
MAX_DELAY = 0.1  # seconds that a step waits to be written, if another follows
MAX_PENDING = 1000  # steps without an optimizer step after which the state is saved although gradients wait
Moment = float | torch.cuda.Event
"""A time: of the process's clock, or an event in a device's queue, which is never waited for.

A process only launches work on a device, and is done with that long before the device is; its own clock would measure
the time to launch.
"""
# Tuples and not classes: objects of a class take longer to make while training waits (1 % of a 2 ms step, benchmarks/steady).
BegunStep: TypeAlias = tuple[int, Position, Samples, float, float, Moment]
"""Step, position and samples; the seconds waited for data and for a save; the time at which it began."""
EndedStep: TypeAlias = tuple[Moment, tuple[int, int, int], float | None]
"""The time at which it ended, the work that was done, and the loss."""


def clock_of(device: torch.device) -> Callable[[], Moment]:
    """Return the function that gives the present moment of training on `device`."""
    if device.type != "cuda":
        return perf_counter

    def now() -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return now


def seconds_between(earlier: Moment, later: Moment) -> float:
    """Return the seconds between two moments of one clock; wait until the later one has come."""
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000
    assert isinstance(earlier, float)
    assert isinstance(later, float)
    return later - earlier


@dataclass(slots=True, eq=False)
class Place:
    """The rank and world size by which each step is split; both change when members are lost or join."""

    rank: int
    world_size: int


@dataclass(slots=True, eq=False)
class StepLog:
    """Writes the steps of a rank to its history, in order, once their results are known."""

    record: Recorder
    fingerprints: Fingerprints
    attempt: int
    place: Place
    _waiting: deque[tuple[float, BegunStep, EndedStep, Sample]] = field(default_factory=deque)
    _flushed: float = 0.0

    def add(self, begun: BegunStep, ended: EndedStep) -> None:
        """Add a trained step; from time to time, write those whose results are known."""
        waiting, now = self._waiting, time.time()
        waiting.append((now, begun, ended, self.fingerprints.take()))
        if len(waiting) >= MAX_WAITING or not 0 <= now - self._flushed < MAX_DELAY:
            while len(waiting) >= MAX_WAITING:
                self._write_first()
            self.write_known()
            self.record.flush()
            self._flushed = now

    def write_known(self) -> None:
        """Append the steps whose results are known, without waiting; the next flush writes them."""
        waiting = self._waiting
        while waiting:
            _, _, (end, *_), sample = waiting[0]
            if not ((isinstance(end, float) or end.query()) and sample.has_arrived):
                return
            self._write_first()

    def write_all(self) -> None:
        """Write every step that was trained so far; wait for the device."""
        while self._waiting:
            self._write_first()
        self.record.flush()

    def _write_first(self) -> None:
        time, (step, at, samples, data, stall, began), (end, work, loss), sample = self._waiting.popleft()
        seconds = Seconds(data, seconds_between(began, end), stall, not isinstance(end, float))
        place = (self.attempt, self.place.world_size, self.place.rank, at.epoch, at.cursor, step)
        self.record.append(Step(*place, samples, seconds, sample.digest(), *work, loss), time)


class WorkDone:
    """Counts backward passes and optimizer steps, and knows whether gradients wait for an optimizer.

    A step counts as trained by its work, not by being handed out. And a state is saved only where no gradients wait for
    their optimizer, because gradients are not part of it.
    """

    def __init__(self, replicas: Iterable[Replica], protected: Protected) -> None:
        self._replicas, self._protected = list(replicas), protected
        self._stepped = 0
        self._before = (0, 0, 0)
        self._waited = 0  # steps of the run since the last optimizer step
        self._known: set[int] = set()
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def take(self) -> tuple[int, int, int]:
        """Return the work since the last call: all-reduced backward passes, local ones, and optimizer steps."""
        reduced = held = 0
        for replica in self._replicas:
            reduced, held = reduced + replica.reduced, held + replica.held
        before, self._before = self._before, (reduced, held, self._stepped)
        stepped = self._stepped - before[2]
        self._waited = 0 if stepped else self._waited + 1
        return reduced - before[0], held - before[1], stepped

    @property
    def is_idle(self) -> bool:
        """True if nothing was done since the last `take`: no backward, no optimizer step, and no gradients exist."""
        passes = sum(replica.reduced + replica.held for replica in self._replicas)
        return passes == sum(self._before[:2]) and self._stepped == self._before[2] and not self._has_gradients

    @property
    def is_pending(self) -> bool:
        """True if gradients of earlier steps wait for their optimizer."""
        return 0 < self._waited <= MAX_PENDING and self._has_gradients

    @property
    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None
            for optimizer in self._protected.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._known:
            self._protected.check_trainer(optimizer)
            self._known.add(id(optimizer))
        for replica in self._replicas:
            if replica.holds_back:
                _check_summed(optimizer, replica)
        self._stepped += 1


def _check_summed(optimizer: Optimizer, replica: Replica) -> None:
    """Refuse an optimizer step with the gradients of one rank: from then on the ranks' weights would differ."""
    local = {id(parameter) for parameter in replica.ddp.parameters()}
    if any(id(parameter) in local for group in optimizer.param_groups for parameter in group["params"]):
        raise BadInput(
            f"{type(optimizer).__name__} stepped before the gradients of all ranks were summed: with micro_batches, step "
            "only where batch.is_last is true."
        )


class LoggedLoss:
    """The loss that the script logged for the current step; of several, the last."""

    def __init__(self) -> None:
        self._loss: float | None = None

    def log(self, loss: float) -> None:
        """Keep `loss` until the step is recorded."""
        self._loss = float(loss)

    def take(self) -> float | None:
        """Return the logged loss, if there is one, and forget it."""
        loss, self._loss = self._loss, None
        return loss


@dataclass(slots=True, eq=False)
class StepRecorder:
    """Follows a step from the moment its batch is handed out until the script asks for the next one."""

    log: StepLog
    work: WorkDone
    loss: LoggedLoss
    live: LiveRecovery | None
    observer: StepObserver | None  # in a rehearsal
    now: Callable[[], Moment]
    _begun: BegunStep | None = None

    def begin(self, step: int, at: Position, request: LoadRequest, parts: list[Any], data: float, stall: float) -> None:
        """Note that a step begins, after `data` seconds for its samples and `stall` seconds for a save."""
        self._begun = (step, at, request.samples, data, stall, self.now())
        if self.observer:
            self.observer.begins(step, at.epoch, request.ids, parts)

    def end(self) -> None:
        """Record the step: the script is done with it."""
        if self.observer:
            self.observer.ends()
        assert self._begun is not None
        self.log.add(self._begun, (self.now(), self._take_work(self._begun[0]), self.loss.take()))

    def _take_work(self, step: int) -> tuple[int, int, int]:
        reduced, held, stepped = self.work.take()
        if self.live:
            self.live.end_step(stepped)
            if self.live.is_dropped(step):
                return reduced, held, 0  # its optimizers had no gradients to step with
        return reduced, held, stepped
