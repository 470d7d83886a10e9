"""Monte Carlo simulation of a large job with failures: the share of its wall clock that is spent on training.

Training alternates between work and saves. After a failure, either all workers restart from the newest save, or the
surviving workers pause and then continue without the lost workers, until the lost workers are replaced. Another failure
may happen before that. Simulations of published jobs are compared with the reported figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from holdfast.advice import estimate as published
from holdfast.advice.estimate import GIVEN, INFERRED, NORMAL, PUBLISHED, Estimate
from holdfast.advice.prices import (
    Price,
    fallback_share,
    lost_part,
    node_returns,
    prices,
    restart_time,
    save_delay,
    saving_of,
)
from holdfast.advice.question import DAY, Question, in_words
from holdfast.advice.run_costs import RunCosts
from holdfast.advice.saving import SaveCosts, best_interval
from holdfast.advice.shard_costs import shard_costs
from holdfast.blocks.division import Floats
from holdfast.errors import BadInput

REPLICATIONS = 200
NOTHING = Estimate.exact(0.0, GIVEN)
MOST = 20_000  # failures in a replication; a longer job is cut to this many


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The parameters of a simulated training job: length, failures, and the seconds that saves and restarts take."""

    mtbf: float  # mean time between failures
    length: float
    work: float  # training between two saves
    stall: Estimate  # delay of training by a save
    durable: float  # from the start of a save until it is durable
    restart: Estimate  # from a failure to training again, if all workers restart
    goes_back: float = 1.0  # fraction of the failures after which all workers restart
    live: Estimate = NOTHING  # pause after the other failures
    absent: float = 0.0  # how long the lost workers are then missing
    lost: float = 0.0  # fraction of the workers that is lost

    def __post_init__(self) -> None:
        if not (self.mtbf > 0 and self.length > 0 and self.work > 0):
            raise BadInput("the length, the work and the time between failures of a job must be greater than 0.")

    @property
    def simulated(self) -> float:
        """The seconds to simulate: the length of the job, limited to `MOST` times its mean time between failures."""
        return min(self.length, MOST * self.mtbf)


def training_shares(job: Job, replications: int = REPLICATIONS, seed: int = 0) -> Floats:
    """Simulate the job `replications` times; return for each simulation the fraction of time spent training."""
    rng = np.random.default_rng(seed)
    stall, restart, live = (_draw(estimate, replications, rng) for estimate in (job.stall, job.restart, job.live))
    cycle, end = job.work + stall, job.simulated
    now, done, since = np.zeros((3, replications))  # seconds: the clock, durable work, uptime since the last save
    stop, missing = np.zeros((2, replications))  # seconds left of the pause, and without the lost part
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
    """Return the mean of the simulated `shares`, and their 5th to 95th percentile as interval."""
    low, high = (float(share) for share in np.percentile(shares, (5, 95)))
    return Estimate(float(shares.mean()), low, high, basis)


def _draw(estimate: Estimate, count: int, rng: np.random.Generator) -> Floats:
    """Draw `count` log-normal random values, so that 90 % of them lie in the interval of `estimate`."""
    if not (0 < estimate.low < estimate.high):
        return np.full(count, estimate.value)
    drawn = rng.standard_normal(count) / NORMAL
    below, above = np.log(estimate.value / estimate.low), np.log(estimate.high / estimate.value)
    return np.asarray(estimate.value * np.exp(np.where(drawn < 0, drawn * below, drawn * above)))


@dataclass(frozen=True, slots=True)
class LargeJob:
    """The result of simulating a job of `workers` workers under each recovery strategy."""

    workers: int
    shares: Mapping[str, Estimate]  # of the wall clock that is spent on training
    every: Mapping[str, int]  # steps between two saves
    assumed: tuple[str, ...]  # sentences


def simulate_large_job(costs: RunCosts, question: Question, mtbf: float) -> LargeJob:
    """Simulate the job in `question` under each recovery strategy with its best save interval; `mtbf` is in seconds."""
    price_of = prices(costs, question)
    every = {name: best_interval(saving_of(costs, question, mtbf, name)).best for name in price_of}
    shares = {
        name: summary(training_shares(job_of(costs, question, mtbf, price, every[name]), seed=question.seed), INFERRED)
        for name, price in price_of.items()
    }
    if shards := shard_costs(costs, question):
        shares = {name: share.times(1 / shards.slower(name)) for name, share in shares.items()}
    return LargeJob(question.workers or costs.workers, shares, every, tuple(_assumed(costs, question, mtbf)))


def job_of(costs: RunCosts, question: Question, mtbf: float, price: Price, every: int) -> Job:
    """Return the parameters to simulate a job that recovers by `price.recovery` and saves every `every` steps."""
    live = price.recovery != "restart"
    leaves = price.recovery in ("forward", "skip")
    restart = restart_time(costs, question)
    returns = node_returns(costs, question)
    return Job(
        mtbf=mtbf / (1 + returns),  # failures and returns of nodes
        length=question.length,
        work=every * costs.step.value,
        stall=save_delay(costs, question),
        durable=costs.durable.value if costs.durable else 0.0,
        restart=restart,
        goes_back=(fallback_share(price.recovery, costs, question) + returns) / (1 + returns),
        live=price.stands + price.iterations.times(costs.step.value) if live else Estimate.exact(0.0, INFERRED),
        absent=restart.value if leaves else 0.0,
        lost=float(lost_part(costs, question)) if leaves else 0.0,
    )


def _assumed(costs: RunCosts, question: Question, mtbf: float) -> list[str]:
    shares = (
        f"{name} {fallback_share(name, costs, question):.1%}" for name in prices(costs, question) if name != "restart"
    )
    return [
        f"Failures are independent, come every {in_words(mtbf)} on average, and each takes "
        f"{lost_part(costs, question)} of the workers.",
        f"The share of failures that end in a restart under live recovery: {', '.join(shares) or 'all'}.",
        f"{in_words(question.length)} of wall clock, {REPLICATIONS} replications; nine of ten lie in the interval.",
    ]


MINUTE = 60.0
# 405 B parameters at 16 bytes (weights, gradients in float32, Adam's moments) or, at most, 4 GB on each of 16,384 GPUs,
# written at 2 TB/s.
LLAMA_SAVE = Estimate(10.3, 405e9 * 16 / 2e12, 16384 * 4e9 / 2e12, PUBLISHED)
SYNCHRONOUS = 10 * MINUTE  # from a failure to training again at O(100K) GPUs


@dataclass(frozen=True, slots=True)
class PublishedJob:
    """A large training job that a publication describes, to compare its reported training time with a simulation."""

    name: str
    source: str
    says: str  # the publication, about `figure`
    figure: float  # the published fraction of effective training time
    job: Job
    assumed: str  # where the publication gives no number


def _saved_best(
    mtbf: float, length: float, restart: float, save: Estimate, *, goes_back: float = 1.0, live: float = 0.0
) -> Job:
    """Return a job that saves at the best interval, each time with a delay of `save` seconds.

    A fraction `goes_back` of the failures restarts all workers in `restart` seconds. The other failures pause training
    for `live` seconds."""
    interval = best_interval(SaveCosts(step=1.0, stall=save.value, mtbf=mtbf / goes_back, restart=restart))
    return Job(
        mtbf=mtbf,
        length=length,
        work=float(interval.best),
        stall=save,
        durable=0.0,
        restart=Estimate.exact(restart, PUBLISHED),
        goes_back=goes_back,
        live=Estimate.exact(live, PUBLISHED),
        absent=SYNCHRONOUS,
        lost=1 / 16,
    )


def _published_jobs() -> tuple[PublishedJob, ...]:
    per_gpu = published.OF_A_WORKER.value
    llama, meta, byte = 54 * DAY / 419, per_gpu / 100_000, per_gpu / 9_600
    return (
        PublishedJob(
            "Llama 3, 16,384 GPUs",
            "arXiv 2407.21783",
            "more than 90 %",
            0.90,
            _saved_best(llama, 54 * DAY, SYNCHRONOUS, LLAMA_SAVE),
            "the paper states 419 unexpected interruptions in 54 days, a storage of 2 TB/s, and saves of up to 4 GB for each "
            "GPU. We assume that it saves at the best interval, and that a restart takes 10 minutes, as arXiv "
            "2602.00277 reports for synchronous training",
        ),
        PublishedJob(
            "synchronous training, O(100K) GPUs",
            "arXiv 2602.00277",
            "44 %",
            0.44,
            _saved_best(meta, 30 * DAY, SYNCHRONOUS, LLAMA_SAVE),
            "the paper states 10 minutes from each failure to training again. We assume the failure rate of a GPU in arXiv "
            "2410.21680, and saves as expensive as those of Llama 3, at the best interval",
        ),
        PublishedJob(
            "FT-HSDP, O(100K) GPUs",
            "arXiv 2602.00277",
            "80 %",
            0.80,
            _saved_best(meta, 30 * DAY, SYNCHRONOUS, LLAMA_SAVE, goes_back=0.01, live=3 * MINUTE),
            "the paper states 3 minutes from each failure to training again. We assume that 1 of 16 replicas is then missing "
            "for 10 minutes, that 1 failure in 100 ends in a restart, and the failure rate and saves of the job above",
        ),
        PublishedJob(
            "ByteRobust, 9,600 GPUs",
            "arXiv 2509.16293",
            "97 %",
            0.97,
            _saved_best(byte, 90 * DAY, 5 * MINUTE, Estimate.exact(0.1, PUBLISHED)),
            "the paper states 9,600 GPUs and three months. We assume the failure rate of a GPU in arXiv 2410.21680, a stall "
            "of 0.1 s for each save, and 5 minutes from each failure to training again",
        ),
    )


def simulate_published_jobs(seed: int = 0) -> list[tuple[PublishedJob, Estimate]]:
    """Simulate every published job; return pairs of the job and its simulated fraction of effective training time."""
    return [(job, summary(training_shares(job.job, seed=seed), PUBLISHED)) for job in _published_jobs()]
