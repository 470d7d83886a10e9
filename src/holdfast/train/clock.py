"""How long a step took: by the clock of the process, or on a device by events in its own queue.

A process only hands work to a device, and may be done with that long before the device is: what it would measure is the
time to launch. Events are marks in the device's queue; nobody waits for them.
"""

from collections.abc import Callable
from time import perf_counter

import torch

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
