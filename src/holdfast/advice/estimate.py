"""Numbers that are not known exactly: what is expected, where nine of ten cases lie, and how that is known.

Figures of others and of our own benchmarks, for what a history cannot tell; each with where it comes from.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holdfast.advice.question import DAY

# How a number is known.
MEASURED = "measured in this run"
INFERRED = "inferred from this run"
BENCHMARK = "from our benchmarks"
PUBLISHED = "published"
GIVEN = "given"

NORMAL = 1.6449  # of a normal distribution nine tenths lie within so many standard deviations of the mean
# What is taken as known before anything was seen: recoveries of one kind scatter by a factor of 2 (nine of ten of them),
# as restarts do between a quiet and a busy machine (benchmarks/restart: 0.28 to 1.12 s around 0.49 s). That counts as
# much as so many recoveries that were seen.
SCATTER = math.log(2) / NORMAL
WORTH = 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of 0 or more: `value` is expected, and nine of ten cases lie between `low` and `high`."""

    value: float
    low: float
    high: float
    basis: str

    @classmethod
    def exact(cls, value: float, basis: str) -> "Estimate":
        """A number that does not vary."""
        return cls(value, value, value, basis)

    @property
    def is_seen(self) -> bool:
        """Whether it comes from the run itself."""
        return self.basis in (MEASURED, INFERRED)

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high

    def times(self, factor: float) -> "Estimate":
        """So many times it."""
        return replace(self, value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def __add__(self, other: "Estimate") -> "Estimate":
        """The sum of two that vary independently; its basis is the weaker of the two."""
        value = self.value + other.value
        below = math.hypot(self.value - self.low, other.value - other.low)
        above = math.hypot(self.high - self.value, other.high - other.value)
        return Estimate(value, max(0.0, value - below), value + above, max(self.basis, other.basis, key=_weakness))

    def to_json(self) -> dict[str, Any]:
        """The estimate as JSON values."""
        return asdict(self)


def next_of(values: Sequence[float], basis: str = MEASURED) -> Estimate:
    """Where the next of some positive values of one kind will lie: logarithms are taken to be normal.

    A single one says nothing of how they scatter, so what is known of that beforehand counts too.
    """
    logs = np.log(np.maximum(np.asarray(values, dtype=np.float64), 1e-6))
    count, middle = len(logs), float(logs.mean())
    freedom = WORTH + count - 1
    spread = math.sqrt((WORTH * SCATTER**2 + float(np.sum((logs - middle) ** 2))) / freedom)
    half = student(freedom) * spread * math.sqrt(1 + 1 / count)
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), basis)


def mean_of(values: Sequence[float], basis: str = MEASURED) -> Estimate:
    """Where the mean of some values lies; not below 0 if it is not itself."""
    found = np.asarray(values, dtype=np.float64)
    middle = float(found.mean())
    if len(found) < 2:
        return Estimate(middle, min(middle / 2, 2 * middle), max(middle / 2, 2 * middle), basis)
    half = student(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return Estimate(middle, max(min(0.0, middle), middle - half), middle + half, basis)


def spread_of(values: Sequence[float], basis: str = MEASURED) -> Estimate:
    """The median of many values, and where nine of ten of them lie."""
    low, middle, high = (float(each) for each in np.percentile(np.asarray(values, dtype=np.float64), (5, 50, 95)))
    return Estimate(middle, low, high, basis)


def student(freedom: int) -> float:
    """Student's t at 95 %, by the first terms of its expansion around the normal quantile; within 1 % from 4 on."""
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _weakness(basis: str) -> int:
    return (GIVEN, MEASURED, INFERRED, PUBLISHED, BENCHMARK).index(basis)


HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Cited:
    """An estimate, and where it was published."""

    estimate: Estimate
    source: str


# One worker is one GPU. Meta's clusters have 6.5 failures in a thousand days of a node of 8 GPUs (the rate behind 1.8 h at
# 16,384 GPUs and 14 min at 131,072); jobs of 1,024 GPUs failed every 7.9 h; Llama 3 had 419 unexpected interruptions in
# 54 days on 16,384 GPUs.
_PER_NODE_DAY, _GPUS = 6.5 / 1000, 8
OF_A_WORKER = Cited(
    Estimate(_GPUS / _PER_NODE_DAY * DAY, 7.9 * HOUR * 1024, 54 * DAY / 419 * 16384, PUBLISHED),
    "Kokolis et al. 2024 (arXiv 2410.21680): 1.8 h at 16,384 GPUs, 7.9 h measured at 1,024; Llama 3 (arXiv 2407.21783): "
    "419 unexpected interruptions in 54 days on 16,384 GPUs",
)


def mtbf(workers: int) -> Estimate:
    """The mean time between failures of a job of so many GPUs, in seconds: one of them fails as often as in OF_A_WORKER."""
    return OF_A_WORKER.estimate.times(1 / workers)


# From a SIGKILL to the moment at which new workers begin to start: seen within 20 ms, the others are ended.
NOTICE = Estimate(0.1, 0.03, 0.5, BENCHMARK)
# From a SIGKILL to the end of the next step, less one step: 0.04 to 0.3 s over processors, GPUs and loads.
REGROUP = Estimate(0.15, 0.02, 0.7, BENCHMARK)
# Of 322 random strikes on runs that recover live, 8 fell back to a restart.
FALLS_BACK = Estimate(8 / 322, 4 / 322, 14 / 322, BENCHMARK)
# What training loses by a save, where a history has none.
STALL = Estimate(0.04, 0.003, 1.0, BENCHMARK)
SOURCES = {
    "notice": "benchmarks/restart: a failed worker is seen within 20 ms, new ones have started after 0.13 to 0.5 s",
    "at_scale": "the 3 minutes that FT-HSDP (arXiv 2602.00277) reports for O(100K) GPUs",
    "regroup": "taken from benchmarks/live-recovery: 0.04 to 0.3 s on processors, 0.03 to 0.33 s on a GPU, from the kill to the next step",
    "falls_back": "benchmarks/live-recovery: 8 of 322 random strikes fell back to a restart",
    "stall": "benchmarks/checkpoint: 0.003 s on a GPU to 1 s with torch.save",
}
