"""Large jobs that were published, simulated from what was said of them: does the simulation give their figures?"""

from dataclasses import dataclass

from holdfast.advice import published
from holdfast.advice.durations import DAY
from holdfast.advice.estimate import PUBLISHED, Estimate
from holdfast.advice.saving import Saving, best_interval
from holdfast.advice.scale import Job, effective, summary

MINUTE = 60.0
# 405 B parameters at 16 bytes (weights, gradients in float32, Adam's moments) or, at most, 4 GB on each of 16,384 GPUs,
# written at 2 TB/s.
LLAMA_SAVE = Estimate(10.3, 405e9 * 16 / 2e12, 16384 * 4e9 / 2e12, PUBLISHED)
SYNCHRONOUS = 10 * MINUTE  # from a failure to training again at O(100K) GPUs


@dataclass(frozen=True, slots=True)
class Published:
    """A job, the share of its time that is said to have been effective, how, and what we had to assume."""

    name: str
    source: str
    says: str
    figure: float
    job: Job
    assumed: str


def _saved_best(
    mtbf: float, length: float, restart: float, save: Estimate, *, goes_back: float = 1.0, live: float = 0.0
) -> Job:
    """A job that saves as often as is best for it; where few failures go back, one of 16 replicas is away after others."""
    found = best_interval(Saving(step=1.0, stall=save.value, mtbf=mtbf / goes_back, restart=restart))
    return Job(
        mtbf=mtbf,
        length=length,
        work=float(found.best),
        stall=save,
        durable=0.0,
        restart=Estimate.exact(restart, PUBLISHED),
        goes_back=goes_back,
        live=Estimate.exact(live, PUBLISHED),
        absent=SYNCHRONOUS,
        lost=1 / 16,
    )


def _jobs() -> tuple[Published, ...]:
    often = published.OF_A_WORKER.estimate.value
    llama, meta, byte = 54 * DAY / 419, often / 100_000, often / 9_600
    return (
        Published(
            "Llama 3, 16,384 GPUs",
            "arXiv 2407.21783",
            "more than 90 %",
            0.90,
            _saved_best(llama, 54 * DAY, SYNCHRONOUS, LLAMA_SAVE),
            "419 unexpected interruptions in 54 days, 2 TB/s of storage and up to 4 GB a GPU are the paper's; it gives "
            "neither how often it saves (taken: as often as is best) nor what a restart takes (taken: the 10 minutes that "
            "FT-HSDP gives for synchronous training)",
        ),
        Published(
            "synchronous training, O(100K) GPUs",
            "arXiv 2602.00277",
            "44 %",
            0.44,
            _saved_best(meta, 30 * DAY, SYNCHRONOUS, LLAMA_SAVE),
            "10 minutes a failure are the paper's; failures as often as arXiv 2410.21680 gives them for a GPU, saves as dear "
            "as Llama 3's and as often as is best are taken",
        ),
        Published(
            "FT-HSDP, O(100K) GPUs",
            "arXiv 2602.00277",
            "80 %",
            0.80,
            _saved_best(meta, 30 * DAY, SYNCHRONOUS, LLAMA_SAVE, goes_back=0.01, live=3 * MINUTE),
            "3 minutes a failure are the paper's; that 1 of 16 replicas is away for 10 minutes and 1 failure in 100 ends "
            "in a restart is taken, the rest as above",
        ),
        Published(
            "ByteRobust, 9,600 GPUs",
            "arXiv 2509.16293",
            "97 %",
            0.97,
            _saved_best(byte, 90 * DAY, 5 * MINUTE, Estimate.exact(0.1, PUBLISHED)),
            "9,600 GPUs and three months are the paper's; failures as often as arXiv 2410.21680 gives them, saves that "
            "hardly stall (0.1 s) and 5 minutes a failure are taken",
        ),
    )


def checked(seed: int = 0) -> list[tuple[Published, Estimate]]:
    """Every published job, and the share of its time that is effective in the simulation."""
    return [(each, summary(effective(each.job, seed=seed), PUBLISHED)) for each in _jobs()]
