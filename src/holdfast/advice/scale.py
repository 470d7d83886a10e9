"""A large job as a chain of failures, many times over: the share of its wall clock that trains.

Training goes in cycles of work and a save. A failure either makes all workers start again from the newest committed save,
or is survived by the others, who stand still for a while and then go on with a part missing until it is replaced. A
failure may strike while the one before is still being mended. The replications are simulated side by side.
"""

from dataclasses import dataclass

import numpy as np

from holdfast.advice.estimate import GIVEN, NORMAL, Estimate
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
