"""Measure what it costs a step to count how long its thread waits for a processor.

Run: python benchmarks/stragglers/cost.py. The counter is read at two places of a step. At the end of a rank's own part
the rank waits for others in any case. At its beginning, the read makes the step longer; there it is left out while the
thread does not wait. Each call comes after 2 ms of other work: code is slower when it has left the processor's caches.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from holdfast.processor_wait import OwnWaits, ProcessorWait

STEPS, STEP = 2000, 0.002


def main() -> None:
    torch.set_num_threads(1)
    values = torch.randn(512, 512)
    free, busy = OwnWaits(ProcessorWait()), OwnWaits(ProcessorWait())
    ends: dict[str, Callable[[], object]] = {"free": lambda: free.end(1e9), "busy": lambda: busy.end(-1.0)}
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "beginning, the thread does not wait": free.begin,
        "beginning, the thread waits": busy.begin,
        "end": ends["free"],
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(STEPS):
        ends["busy"]()
        for name, call in calls.items():
            began = time.perf_counter()
            while time.perf_counter() - began < STEP:
                values @ values
            began = time.perf_counter()
            call()
            taken[name].append(1e6 * (time.perf_counter() - began))
    cores = len(os.sched_getaffinity(0))
    print(
        f"{cores} cores, load {os.getloadavg()[0]:.1f}; python {platform.python_version()}, torch {torch.__version__}"
    )
    print("\n| | microseconds, median | 10 to 90 % |\n|---|---:|---:|")
    for name, times in taken.items():
        tenths = statistics.quantiles(times, n=10)
        print(f"| {name} | {statistics.median(times):.1f} | {tenths[0]:.1f} to {tenths[-1]:.1f} |")


if __name__ == "__main__":
    main()
