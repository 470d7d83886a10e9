"""The price of live recovery for a sharded model: memory and traffic in every step, and the steps that a lost shard costs.

P parameters are sharded over N ranks and trained with AdamW in float32. Under `replay` each rank keeps a copy of the
shard of the rank before it, weights and both moments, and may send its gradients to the next rank before each optimizer
step: it does unless the next rank can derive them, and this price assumes that it does. Under `partial` it keeps a copy of the weights only, as the last forward gathered them, and sends nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from holdfast.advice.estimate import BENCHMARK, GIVEN, INFERRED, Estimate
from holdfast.advice.question import Question, bytes_in_words, in_words
from holdfast.advice.run_costs import RunCosts

COPIED = 12  # bytes for each parameter of a copied shard: the weight and two moments
SENT = 4  # bytes of a gradient
KEPT = 4  # bytes of a gathered weight, or 2 if FSDP gathers bfloat16
BANDWIDTH = 1.25e9  # bytes in a second from a rank to the next: 10 Gbit/s, which is assumed if nothing is given
# Steps behind a run without failures if shards return with gathered weights and the moments of a snapshot, by the part of
# the ranks that is lost. The value is the mean, or 0 if the runs were ahead on average. The interval has the distance from
# 0 of nine of ten trials, because chance moves a run ahead as often as behind. A smaller part is assumed to cost as much as
# 1/8.
LAGS_FROM = "docs/results/sharded-tradeoff"
LAGS: Mapping[Fraction, Estimate] = {
    Fraction(1, 8): Estimate(0.0, 0.0, 15.7, BENCHMARK),
    Fraction(1, 4): Estimate(0.0, 0.0, 20.8, BENCHMARK),
    Fraction(1, 2): Estimate(0.0, 0.0, 16.8, BENCHMARK),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """The cost of `replay` and `partial` on each rank while nothing fails."""

    parameters: float
    ranks: int
    basis: str  # the source of the number of parameters
    bandwidth: float  # bytes in a second from a rank to the next
    step: float  # seconds
    in_step: bool = False  # the step was measured under replay, and contains its traffic

    @property
    def copy_bytes(self) -> float:
        """The memory on each rank for the copy of another rank's shard, under `replay`."""
        return COPIED * self.parameters / self.ranks

    @property
    def sent_bytes(self) -> float:
        """The bytes that each rank sends to the next rank in each step, under `replay`."""
        return SENT * self.parameters / self.ranks

    @property
    def kept_bytes(self) -> float:
        """The memory on each rank for another rank's gathered weights, under `partial`; half with bfloat16."""
        return KEPT * self.parameters / self.ranks

    @property
    def delay(self) -> float:
        """The seconds that `replay` adds to a step."""
        return 0.0 if self.in_step else self.sent_bytes / self.bandwidth

    def slower(self, recovery: str) -> float:
        """Return the time of a step under `recovery`, as a multiple of that of a step without live recovery."""
        return 1 + self.delay / self.step if recovery == "replay" else 1.0

    def lines(self, lost: Fraction) -> list[str]:
        """Return sentences on the costs, and on the time between failures below which `replay` costs less than `partial`."""
        again = ", which the steps of this run contain" if self.in_step else ", which is counted in full"
        share = f", {self.delay / self.step:.2g} of a step" if self.delay else ""
        lines = [
            f"The model is sharded, so forward and skip are not possible. It has {self.parameters:.3g} parameters ({self.basis}) "
            f"on {self.ranks} ranks. Replay keeps {bytes_in_words(self.copy_bytes)} on each rank, a copy of another rank's "
            f"weights and moments (AdamW in float32), and sends up to {bytes_in_words(self.sent_bytes)} from each rank to the next "
            f"in each step{again}: {in_words(self.sent_bytes / self.bandwidth)} at {bytes_in_words(self.bandwidth)}/s{share}. Partial "
            f"keeps {bytes_in_words(self.kept_bytes)}, half of it if FSDP gathers bfloat16, and sends nothing. With hybrid "
            "sharding the replicas are the copies, and replay costs neither."
        ]
        lag = lag_of(lost)
        if lag and self.delay:
            even = lag.high * self.step / (self.delay / self.step)
            lines.append(
                f"A lost shard costs {lag.value:.2g} steps on average under partial, and up to {lag.high:.3g} in nine of ten "
                f"cases ({LAGS_FROM}, 101 million parameters). Even at {lag.high:.3g}, replay, which repeats nothing, wastes less time "
                f"than partial only if failures come more often than every {in_words(even)}."
            )
        return lines


def shard_costs(costs: RunCosts, question: Question) -> ShardCosts | None:
    """Return the costs of live recovery for the sharded model of a run, or None if it is not sharded or its size unknown."""
    parameters = costs.parameters if question.parameters is None else question.parameters
    if not costs.sharded or parameters is None:
        return None
    as_run = question.workers in (None, costs.workers) and question.parameters is None and question.step is None
    return ShardCosts(
        parameters=parameters,
        ranks=question.workers or costs.workers,
        basis=INFERRED if question.parameters is None else GIVEN,
        bandwidth=question.bandwidth or BANDWIDTH,
        step=costs.step.value,
        in_step=as_run and costs.recovery == "replay",
    )


def lag_of(lost: Fraction) -> Estimate | None:
    """Return how many steps a run is behind after `partial`, if a failure loses `lost` of the ranks; None if unknown."""
    return next((lag for part, lag in sorted(LAGS.items()) if lost <= part), None)
