"""Figures of others and of our own benchmarks, for what a history cannot tell; each with where it comes from."""

from dataclasses import dataclass

from holdfast.advice.durations import DAY
from holdfast.advice.estimate import BENCHMARK, PUBLISHED, Estimate

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
