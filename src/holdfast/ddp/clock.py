"""How long a step took: by the clock of the process, or on a device by events in its own queue.

A process only hands work to a device, and may be done with that long before the device is: what it would measure is the
time to launch. Events are marks in the device's queue; nobody waits for them.
"""

from time import perf_counter

import torch


class Mark:
    """A moment of the training: when everything queued before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._moment = perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_past(self) -> bool:
        """Whether it has come."""
        return self._event is None or self._event.query()

    @property
    def of_device(self) -> bool:
        """Whether it is a moment of a device."""
        return self._event is not None

    def since(self, earlier: "Mark") -> float:
        """Seconds from an earlier mark to this one; waits until it has come."""
        if self._event is None or earlier._event is None:
            return self._moment - earlier._moment
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000
