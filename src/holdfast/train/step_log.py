"""The record of every step: its samples, times, backward passes and optimizer steps, its loss, and a state fingerprint.

On a GPU the result of a step is known a little after the step's boundary. And the records of several steps are written
together, because each write would delay a loop of short steps. So the last steps before a kill may be missing from a
history: they are lost in any case, and trained again. Before a save, every step that it covers is written.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias

import torch
import xxhash
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import progress
from holdfast.errors import BadInput
from holdfast.events import Seconds, Step
from holdfast.live.recovery import LiveRecovery
from holdfast.processor_wait import OwnWaits
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position
from holdfast.train.data.loader import LoadRequest
from holdfast.train.observe.observer import StepObserver
from holdfast.train.replicate import Replica
from holdfast.train.state.attempt import Recorder
from holdfast.train.state.protect_checks import check_trainer
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import is_dtensor, local

MAX_WAITING = 64  # steps that wait to be written
MAX_DELAY = 0.1  # seconds that a step waits to be written, if another follows
MAX_PENDING = 1000  # steps without an optimizer step after which the state is saved although gradients wait
PARTS = 48  # tensors that are sampled, spread over all of them
VALUES = 8  # of each, spread over it
Copy: TypeAlias = tuple[bytes, list[torch.Tensor]]  # values from host memory, and values on their way from a device
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NOTHING = xxhash.xxh3_64_hexdigest(b"")
Moment = float | torch.cuda.Event
"""A point in time: a clock reading of the process, or an event in a device's queue.

A process only launches work on a device and continues long before the device is done, so its own clock would measure
only the launch.
"""
# Tuples and not classes: objects of a class take longer to make while training waits (1 % of a 2 ms step, benchmarks/steady).
BegunStep: TypeAlias = tuple[int, Position, Samples, float, float, Moment]
"""(step, position in the data, samples, seconds waited for data, seconds waited for a save, time of the start)."""
EndedStep: TypeAlias = tuple[Moment, tuple[int, int, int], float | None, Moment | None]
"""(time of the end, counts as `WorkDone.take` returns them, loss, time at which this rank's gradients were computed).

The last time is earlier by the seconds for which this rank waited for a processor in the step."""


def clock_of(device: torch.device) -> Callable[[], Moment]:
    """Return a clock: a function that returns the current time or, on a CUDA device, an event in the device's stream."""
    if device.type != "cuda":
        return perf_counter

    def now() -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return now


def seconds_between(earlier: Moment, later: Moment) -> float:
    """Return the seconds between two clock readings. If they are CUDA events, first wait until `later` has happened."""
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000
    assert isinstance(earlier, float)
    assert isinstance(later, float)
    return later - earlier


class Sample:
    """A copy of a few values of the training state. A copy from a GPU may still be in progress."""

    def __init__(self, copies: Sequence[Copy], arrived: torch.cuda.Event | None) -> None:
        self._copies, self._arrived = copies, arrived

    @property
    def has_arrived(self) -> bool:
        """True if the values have arrived in host memory."""
        return self._arrived is None or self._arrived.query()

    def digest(self) -> str:
        """Return a digest of 32 hex digits: 16 for parameters that all ranks share, and 16 for shards and buffers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return "".join([_digest(*copy) for copy in self._copies])


class Fingerprints:
    """A source of fingerprints of the training state, to compare ranks, or repetitions of a step, with each other.

    A fingerprint covers a few values of the protected models, or the whole protected state if there is no model."""

    def __init__(self, protected: Protected | None) -> None:
        models = protected.models if protected else []
        self._whole = protected if protected and not models else None
        parameters = [tensor for model in models for tensor in model.parameters()]
        shared = [parameter for parameter in parameters if not is_dtensor(parameter)]
        shards = [parameter.to_local() for parameter in parameters if is_dtensor(parameter)]
        own = shards + [local(tensor) for model in models for tensor in model.buffers()]
        self._parts = (_Part(shared), _Part(own))
        self._devices = {part.device for part in (*shared, *own) if part.is_cuda}

    def take(self) -> Sample:
        """Start to copy a sample of the protected values. From a GPU, the copy completes in the background."""
        if self._whole is not None:
            # State that is not a model is mostly small, and any part of it may change.
            return Sample([(self._whole.digest().encode(), []), (b"", [])], None)
        copies = [part.copy() for part in self._parts]
        return Sample(copies, _recorded(self._devices) if self._devices else None)


class _Part:
    """A few values of `tensors`, chosen once, that are copied after every step to detect changes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensors[i] for i in _spread(len(tensors), PARTS) if tensors[i].numel()]
        self._places: list[int] = []
        self._pointers = [tensor.data_ptr for tensor in self._tensors]
        self._here: list[memoryview] = []
        self._there: list[list[torch.Tensor]] = []

    def copy(self) -> Copy:
        """Return a copy of these values in host memory. A copy from a GPU may still be in progress."""
        if not self._pointers:
            return b"", []
        places = [place() for place in self._pointers]
        if places != self._places:  # tensors have new memory, for example after `model.half()`
            self._places = places
            self._look()
        # Without numpy or torch, whose code has left the CPU caches by the end of a step: saves 11 us (benchmarks/steady).
        here = b"".join(map(memoryview.tobytes, self._here))
        return here, [_to_host(torch.cat(views)) for views in self._there]

    def _look(self) -> None:
        kinds: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for tensor in self._tensors:
            kinds[tensor.dtype, tensor.device].append(_few(tensor))  # tensors of one kind are copied together
        self._there = [views for views in kinds.values() if views[0].is_cuda]
        here = (views for views in kinds.values() if not views[0].is_cuda)
        self._here = [view.numpy().data for views in here for view in views]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few evenly spaced values of `tensor`, as integers with the same bits."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    count = min(VALUES, values.numel())
    # By memory, not by index: that works for any dense tensor, whatever its strides.
    return values.as_strided((count,), (values.numel() // count,)).view(_BITS[values.element_size()])


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0..count-1, evenly spread and including the first and the last."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)  # from torch's cache after the first time
    return host.copy_(values, non_blocking=True)


def _recorded(devices: Iterable[torch.device]) -> torch.cuda.Event:
    (device, *_) = devices  # a rank trains on one
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event


def _digest(here: bytes, arrived: Sequence[torch.Tensor]) -> str:
    if arrived:
        here += b"".join(copy.numpy().tobytes() for copy in arrived)
    return xxhash.xxh3_64_hexdigest(here) if here else _NOTHING


@dataclass(slots=True, eq=False)
class RankPlacement:
    """This worker's rank and the world size, to divide each step's samples. Both change if workers are lost or join.

    The ranks of a tensor-parallel group train one share of the samples."""

    rank: int
    world_size: int
    tensor_parallel: int = 1

    @property
    def share(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def shares(self) -> int:
        return self.world_size // self.tensor_parallel


@dataclass(slots=True, eq=False)
class StepLog:
    """A log of one rank's steps. It writes each step to the rank's history, in order, once the device has computed it."""

    record: Recorder
    fingerprints: Fingerprints
    attempt: int
    place: RankPlacement
    _waiting: deque[tuple[float, BegunStep, EndedStep, Sample]] = field(default_factory=deque)
    _flushed: float = 0.0

    def add(self, begun: BegunStep, ended: EndedStep) -> None:
        """Add a trained step. From time to time, also write the steps that the device has completed to the history."""
        waiting, now = self._waiting, time.time()
        if isinstance(ended[3], float):
            _report_own_time(begun, ended[3])
        waiting.append((now, begun, ended, self.fingerprints.take()))
        if len(waiting) >= MAX_WAITING or not 0 <= now - self._flushed < MAX_DELAY:
            while len(waiting) >= MAX_WAITING:
                self._write_first()
            self.write_known()
            self.record.flush()
            self._flushed = now

    def write_known(self) -> None:
        """Append the steps that the device has completed to the history. Do not wait for other steps, and do not flush."""
        waiting = self._waiting
        while waiting:
            _, _, (end, *_), sample = waiting[0]
            if not ((isinstance(end, float) or end.query()) and sample.has_arrived):
                return
            self._write_first()

    def write_all(self) -> None:
        """Write every step that was trained so far, and wait for the device if necessary."""
        while self._waiting:
            self._write_first()
        self.record.flush()

    def _write_first(self) -> None:
        time, begun, (end, work, loss, computed), sample = self._waiting.popleft()
        step, at, samples, data, stall, began = begun
        # To the microsecond: no clock of a training loop is better, and a segment stores such times in two bytes.
        compute = round(seconds_between(began, end), 6)
        seconds = Seconds(round(data, 6), compute, stall and round(stall, 6), not isinstance(end, float))
        place = (self.attempt, self.place.world_size, self.place.rank, at.epoch, at.cursor, step)
        self.record.append(Step(*place, samples, seconds, sample.digest(), *work, loss), round(time, 6))
        if isinstance(computed, torch.cuda.Event):
            _report_own_time(begun, computed)


def _report_own_time(begun: BegunStep, computed: Moment) -> None:
    """Report to the supervisor how long this rank loaded and computed in a step, until its gradients were `computed`."""
    progress.here.report_own_time(begun[0], _own_seconds(begun, computed))


def _own_seconds(begun: BegunStep, computed: Moment) -> float:
    _, _, _, data, _, began = begun
    return data + seconds_between(began, computed)


class WorkDone:
    """A counter of backward passes and optimizer steps.

    A step counts as trained only if it did such work. State is saved only while no gradients wait for an optimizer
    step, because snapshots do not hold gradients."""

    def __init__(self, replicas: Iterable[Replica], protected: Protected) -> None:
        self._replicas, self._protected = list(replicas), protected
        self._stepped = 0
        self._before = (0, 0, 0)
        self._waited = 0  # steps of the run since the last optimizer step
        self._known: dict[int, Optimizer] = {}  # that have stepped, by `id()`
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def take(self) -> tuple[int, int, int]:
        """Return three counts since the last call: backward passes with all-reduce and without it, and optimizer steps."""
        reduced = held = 0
        for replica in self._replicas:
            reduced, held = reduced + replica.reduced, held + replica.held
        before, self._before = self._before, (reduced, held, self._stepped)
        stepped = self._stepped - before[2]
        self._waited = 0 if stepped else self._waited + 1
        return reduced - before[0], held - before[1], stepped

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer has stepped since the last `take`."""
        return self._stepped > self._before[2]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped so far."""
        return [*self._known.values()]

    @property
    def stepped(self) -> int:
        """The number of optimizer steps so far."""
        return self._stepped

    @property
    def is_idle(self) -> bool:
        """True if there was no backward or optimizer step since the last `take`, and no parameter has a gradient."""
        passes = sum(replica.reduced + replica.held for replica in self._replicas)
        return passes == sum(self._before[:2]) and self._stepped == self._before[2] and not self._has_gradients

    @property
    def is_pending(self) -> bool:
        """True if gradients of earlier steps wait for an optimizer step."""
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
        """Remove the optimizer hook, so that nothing more is counted."""
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._known:
            check_trainer(self._protected, optimizer)
            self._known[id(optimizer)] = optimizer
        for replica in self._replicas:
            if replica.holds_back:
                _check_summed(optimizer, replica)
        self._stepped += 1


def _check_summed(optimizer: Optimizer, replica: Replica) -> None:
    """Raise BadInput if `optimizer` trains the model of `replica`, whose gradients are not yet summed over the ranks."""
    local = {id(parameter) for parameter in replica.ddp.parameters()}
    if any(id(parameter) in local for group in optimizer.param_groups for parameter in group["params"]):
        raise BadInput(
            f"{type(optimizer).__name__} stepped before the gradients of all ranks were summed: with micro_batches, step "
            "only where batch.is_last is true."
        )


class LoggedLoss:
    """The last loss that the script logged in the current step."""

    def __init__(self) -> None:
        self._loss: float | None = None

    def log(self, loss: float) -> None:
        """Keep `loss` until the current step is recorded."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def take(self) -> float | None:
        """Return the logged loss and forget it; None if no loss was logged."""
        loss, self._loss = self._loss, None
        return loss


@dataclass(slots=True, eq=False)
class StepRecorder:
    """A recorder of steps. A step begins when the script gets its batch, and ends when it asks for the next batch."""

    log: StepLog
    work: WorkDone
    loss: LoggedLoss
    live: LiveRecovery | None
    observer: StepObserver | None  # in a rehearsal
    now: Callable[[], Moment]
    waits: OwnWaits  # not used on CUDA devices, which compute what was launched before while the thread waits
    _begun: BegunStep | None = None
    _computed: Moment | None = None
    _bad_loss: int | None = None

    def request(self) -> None:
        """Note that the script has asked for the next batch: the rank's own part of a step begins."""
        self.waits.begin()

    def begin(self, step: int, at: Position, request: LoadRequest, parts: list[Any], data: float, stall: float) -> None:
        """Record the start of `step`, at position `at` in the data.

        `request` has the ids of the step's samples, and `parts` are its micro-batches. Loading them took `data`
        seconds, and a save before the step took `stall` seconds."""
        self._begun = (step, at, request.samples, data, stall, self.now())
        if self.observer:
            self.observer.begins(step, at.epoch, request.ids, parts)

    def reach_last_gradient(self) -> None:
        """Note the time at which this rank's own gradients are computed: from here on it only waits for other ranks."""
        if self._computed is None:  # with several models, the first of them: later ones include waits for other ranks
            self._computed = self._without_waits(self.now())

    def end(self) -> None:
        """Record the step, because the script has asked for the next batch."""
        if self.observer:
            self.observer.ends()
        assert self._begun is not None
        computed, self._computed = self._computed, None
        loss = self.loss.take()
        if loss is not None and self._bad_loss is None and not math.isfinite(loss):
            self._bad_loss = self._begun[0]
        now = self.now()
        if self.live and isinstance(now, float) and (waited := self.live.take_waited()) is not None:
            # As if this rank had waited for the others at the end of the step.
            computed = self._without_waits(now - waited)
        self.log.add(self._begun, (now, self._take_work(self._begun[0]), loss, computed))

    def _without_waits(self, moment: Moment) -> Moment:
        """Return the time at which this rank would have reached `moment`, had it never waited for a processor in the step."""
        if self._begun is None or not isinstance(moment, float):
            return moment
        return moment - self.waits.end(_own_seconds(self._begun, moment))

    def take_bad_loss(self) -> int | None:
        """Return the first step since the last call whose logged loss was infinite or NaN; None if there was none."""
        step, self._bad_loss = self._bad_loss, None
        return step

    def _take_work(self, step: int) -> tuple[int, int, int]:
        reduced, held, stepped = self.work.take()
        if self.live:
            self.live.end_step(stepped)
            if self.live.is_dropped(step):
                return reduced, held, 0  # its optimizers had no gradients to step with
        return reduced, held, stepped
