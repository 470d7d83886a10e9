"""The same training as a large job: what share of its wall clock would train under each recovery, simulated.

A large job as a chain of failures, many times over: the share of its wall clock that trains.

Training goes in cycles of work and a save. A failure either makes all workers start again from the newest committed save,
or is survived by the others, who stand still for a while and then go on with a part missing until it is replaced. A
failure may strike while the one before is still being mended. The replications are simulated side by side.

Large jobs that were published, simulated from what was said of them: does the simulation give their figures?
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.advice import estimate as published
from holdfast.advice.estimate import FALLS_BACK, GIVEN, INFERRED, NORMAL, PUBLISHED, Estimate
from holdfast.advice.measured import RunCosts
from holdfast.advice.prices import LARGE, Price, lost_part, prices, replacement, saving_of, stall
from holdfast.advice.question import DAY, Question, in_words
from holdfast.advice.saving import SaveCosts, best_interval
from holdfast.blocks.division import Floats
from holdfast.errors import BadInput

REPLICATIONS = 200
NOTHING = Estimate.exact(0.0, GIVEN)
MOST = 20_000  # failures in a replication: beyond, a shorter stretch of the job tells as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Seconds of a job: between failures, of its whole length, of work between saves, and what a failure takes.

    `goes_back` is the part of the failures after which all start again from a save, and stand still for `restart`. After
    the others training stands still for `live`, and for `absent` the part `lost` of the workers is missing.
    """

    mtbf: float
    length: float
    work: float
    stall: Estimate
    durable: float
    restart: Estimate
    goes_back: float = 1.0
    live: Estimate = NOTHING
    absent: float = 0.0
    lost: float = 0.0

    def __post_init__(self) -> None:
        if not (self.mtbf > 0 and self.length > 0 and self.work > 0):
            raise BadInput("no job is without length, work or time between its failures: give more than 0")

    @property
    def simulated(self) -> float:
        """The seconds that are simulated of it."""
        return min(self.length, MOST * self.mtbf)


def effective(job: Job, replications: int = REPLICATIONS, seed: int = 0) -> Floats:
    """The share of the wall clock that trains what counts, in each replication."""
    rng = np.random.default_rng(seed)
    stall, restart, live = (_drawn(each, replications, rng) for each in (job.stall, job.restart, job.live))
    cycle, end = job.work + stall, job.simulated
    now, done, since = np.zeros((3, replications))  # seconds; work that is safe; uptime since the state that is
    stop, missing = np.zeros((2, replications))  # seconds yet to stand still, and to be without the lost part
    while (now < end).any():
        until = np.minimum(now + rng.exponential(job.mtbf, replications), end)
        up = np.maximum(0.0, until - now - stop)
        since += up - job.lost * np.minimum(up, missing)
        saves = np.maximum(0.0, np.floor((since - job.durable) / cycle))
        since -= saves * cycle
        done += saves * job.work
        failed = until < end
        back = failed & (rng.random(replications) < job.goes_back)
        since = np.where(back, 0.0, since)
        missing = np.where(back, 0.0, np.where(failed, job.absent, 0.0))
        stop = np.where(back, restart, live)
        now = until
    return np.asarray((done + since * job.work / cycle) / end)


def summary(shares: Floats, basis: str) -> Estimate:
    """The mean over the replications, and where nine of ten lie."""
    low, high = (float(each) for each in np.percentile(shares, (5, 95)))
    return Estimate(float(shares.mean()), low, high, basis)


def _drawn(estimate: Estimate, count: int, rng: np.random.Generator) -> Floats:
    """What a cost may be, once for each replication: on a logarithmic scale, nine of ten within the interval."""
    if not (0 < estimate.low < estimate.high):
        return np.full(count, estimate.value)
    drawn = rng.standard_normal(count) / NORMAL
    below, above = np.log(estimate.value / estimate.low), np.log(estimate.high / estimate.value)
    return np.asarray(estimate.value * np.exp(np.where(drawn < 0, drawn * below, drawn * above)))


@dataclass(frozen=True, slots=True)
class Large:
    """A job of so many workers: by recovery the share that trains and the steps between saves, and what was assumed."""

    workers: int
    shares: Mapping[str, Estimate]
    every: Mapping[str, int]
    assumed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
        return {
            "workers": self.workers,
            "shares": {name: each.to_json() for name, each in self.shares.items()},
            "every": dict(self.every),
            "assumed": list(self.assumed),
        }


def large(costs: RunCosts, question: Question, mtbf: float) -> Large:
    """The job that the question is about, simulated under every recovery, each with its best save interval."""
    made = prices(costs, question)
    every = {name: best_interval(saving_of(costs, question, mtbf, name)).best for name in made}
    shares = {
        name: summary(effective(job_of(costs, question, mtbf, price, every[name]), seed=question.seed), INFERRED)
        for name, price in made.items()
    }
    return Large(question.workers or costs.workers, shares, every, tuple(_assumed(costs, question, mtbf)))


def job_of(costs: RunCosts, question: Question, mtbf: float, price: Price, every: int) -> Job:
    """The job as the simulation takes it."""
    live = price.recovery != "restart"
    leaves = price.recovery in ("forward", "skip")
    again = replacement(costs, question)
    return Job(
        mtbf=mtbf,
        length=question.length,
        work=every * costs.step.value,
        stall=stall(costs, question),
        durable=costs.durable.value if costs.durable else 0.0,
        restart=again,
        goes_back=FALLS_BACK.value if live else 1.0,
        live=price.stands + price.iterations.times(costs.step.value) if live else Estimate.exact(0.0, INFERRED),
        absent=again.value if leaves else 0.0,
        lost=float(lost_part(costs, question)) if leaves else 0.0,
    )


def _assumed(costs: RunCosts, question: Question, mtbf: float) -> list[str]:
    workers = question.workers or costs.workers
    again = replacement(costs, question)
    lines = [
        f"{workers} workers train a step in {in_words(costs.step.value)}, as {costs.workers} do in this run.",
        f"Failures are independent of each other and come every {in_words(mtbf)} on average; each takes "
        f"{lost_part(costs, question)} of the workers.",
        f"A restart takes {in_words(again.value)} ({again.basis}), a save makes training "
        f"{in_words(stall(costs, question).value)} later ({stall(costs, question).basis}). On a large job both take longer: "
        "give --restart and --stall.",
        f"Of failures that are survived live {FALLS_BACK.value:.1%} end in a restart all the same ({FALLS_BACK.basis}).",
        f"{in_words(question.length)} of wall clock, {REPLICATIONS} replications; the interval is where "
        "nine of ten of them lie.",
    ]
    if workers > LARGE:
        lines.append("Survivors find together in 3 minutes, as FT-HSDP (arXiv 2602.00277) reports for O(100K) GPUs.")
    return lines


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
    found = best_interval(SaveCosts(step=1.0, stall=save.value, mtbf=mtbf / goes_back, restart=restart))
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
