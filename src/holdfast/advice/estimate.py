"""Uncertain numbers: the expected value, the 90 % interval, and the source of the number.

Published figures and results of our benchmarks, with their sources, are used for what the events of a run do not show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.advice.question import DAY

# Where a number comes from.
MEASURED = "measured in this run"
INFERRED = "inferred from this run"
BENCHMARK = "from our benchmarks"
PUBLISHED = "published"
GIVEN = "given"

NORMAL = 1.6449  # nine tenths of a normal distribution lie within this many standard deviations of the mean
# The prior: nine of ten recoveries of one kind lie within a factor of 2, as restarts do between an idle and a busy
# machine (benchmarks/restart: 0.28 to 1.12 s around 0.49 s). It counts as much as WORTH observed recoveries.
SCATTER = math.log(2) / NORMAL
WORTH = 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """An uncertain number: the expected `value`, the 90 % interval from `low` to `high`, and its source (`basis`)."""

    value: float
    low: float
    high: float
    basis: str

    @classmethod
    def exact(cls, value: float, basis: str) -> "Estimate":
        """Return an estimate whose interval is only `value`; `basis` is the source of the value, such as `GIVEN`."""
        return cls(value, value, value, basis)

    @property
    def is_seen(self) -> bool:
        """True if the number was measured in the run or inferred from it."""
        return self.basis in (MEASURED, INFERRED)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def times(self, factor: float) -> "Estimate":
        return replace(self, value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def __add__(self, other: "Estimate") -> "Estimate":
        """Return the sum of two independent estimates.

        If their bases differ, the basis of the sum is that of the larger part, or `INFERRED` if that part was given or
        measured, because the sum was not."""
        value = self.value + other.value
        below = math.hypot(self.value - self.low, other.value - other.low)
        above = math.hypot(self.high - self.value, other.high - other.value)
        basis = max(self, other, key=lambda part: part.value).basis
        if self.basis != other.basis and basis in (GIVEN, MEASURED):
            basis = INFERRED
        return Estimate(value, max(0.0, value - below), value + above, basis)


def next_of(values: Sequence[float], basis: str = MEASURED) -> Estimate:
    """Predict the next value of the log-normal sample `values`, with a 90 % interval that is wider for few values."""
    logs = np.log(np.maximum(np.asarray(values, dtype=np.float64), 1e-6))
    count, middle = len(logs), float(logs.mean())
    freedom = WORTH + count - 1
    spread = math.sqrt((WORTH * SCATTER**2 + float(np.sum((logs - middle) ** 2))) / freedom)
    half = student(freedom) * spread * math.sqrt(1 + 1 / count)
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), basis)


def mean_of(values: Sequence[float], basis: str = MEASURED) -> Estimate:
    """Estimate the mean of `values` with a 90 % interval. For one value, it is from half to twice the value."""
    sample = np.asarray(values, dtype=np.float64)
    middle = float(sample.mean())
    if len(sample) < 2:
        return Estimate(middle, min(middle / 2, 2 * middle), max(middle / 2, 2 * middle), basis)
    half = student(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return Estimate(middle, max(min(0.0, middle), middle - half), middle + half, basis)


def spread_of(values: Sequence[float], basis: str = MEASURED) -> Estimate:
    """Return the median of `values`, with the range from their 5th to their 95th percentile as interval."""
    low, middle, high = (float(value) for value in np.percentile(np.asarray(values, dtype=np.float64), (5, 50, 95)))
    return Estimate(middle, low, high, basis)


def student(freedom: int) -> float:
    """Approximate the 95 % quantile of Student's t distribution with `freedom` degrees of freedom."""
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


HOUR = 3600.0


# One worker is one GPU. Meta's clusters have 6.5 failures per thousand days of a node of 8 GPUs (the rate behind 1.8 h at
# 16,384 GPUs and 14 min at 131,072); jobs of 1,024 GPUs failed every 7.9 h; Llama 3 had 419 unexpected interruptions in
# 54 days on 16,384 GPUs.
_PER_NODE_DAY, _GPUS = 6.5 / 1000, 8
OF_A_WORKER = Estimate(_GPUS / _PER_NODE_DAY * DAY, 7.9 * HOUR * 1024, 54 * DAY / 419 * 16384, PUBLISHED)


def mtbf(workers: int) -> Estimate:
    """Estimate the mean seconds between failures of a job with `workers` GPUs from published failure rates."""
    return OF_A_WORKER.times(1 / workers)


# From a SIGKILL to the start of new workers: it is noticed within 20 ms, and the other workers are ended.
NOTICE = Estimate(0.1, 0.03, 0.5, BENCHMARK)
# From a SIGKILL to the end of the next step, less one step: 0.04 to 0.3 s over processors, GPUs and loads.
REGROUP = Estimate(0.15, 0.02, 0.7, BENCHMARK)
# The part of the random strikes that ended in a restart (benchmarks/live-recovery). Partial was not measured.
FALLS_BACK = {"replay": 29 / 319, "partial": 29 / 319, "forward": 10 / 283, "skip": 6 / 378}
# The delay of a save, if a history has none: 0.003 s on a GPU to 1 s with torch.save (benchmarks/checkpoint).
STALL = Estimate(0.04, 0.003, 1.0, BENCHMARK)
SOURCES = {
    "mtbf": "published for jobs of 1,024 to 16,384 GPUs (arXiv 2410.21680, 2407.21783)",
    "notice": "0.1 s to notice a failure (benchmarks/restart)",
    "regroup": "0.02 to 0.7 s to form a new group (benchmarks/live-recovery)",
}
