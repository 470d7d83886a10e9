"""The time that shared storage of a given speed needs to write a snapshot, and to read it at a restart."""

from holdfast.advice.estimate import GIVEN, INFERRED, Estimate
from holdfast.advice.question import Question
from holdfast.advice.run_costs import BYTES_PER_PARAMETER, RunCosts
from holdfast.errors import BadInput


def snapshot_bytes(costs: RunCosts, question: Question) -> float:
    """Return the size of a snapshot of the job: 12 bytes for each given parameter, else as in the run."""
    if question.parameters is not None:
        return BYTES_PER_PARAMETER * question.parameters
    if costs.state_bytes is None:
        raise BadInput("--storage needs the size of a snapshot, and this run saved none: give --parameters.")
    return costs.state_bytes


def durable_time(costs: RunCosts, question: Question) -> Estimate | None:
    """Estimate the seconds from the start of a save until it is durable; None if neither seen nor given."""
    if question.storage is None:
        return costs.durable
    return Estimate.exact(snapshot_bytes(costs, question) / question.storage, GIVEN)


def reading_time(costs: RunCosts, question: Question) -> Estimate:
    """Estimate the seconds in which all workers read a snapshot at a restart.

    Without a given speed, reading takes about as long as writing. Otherwise the workers share it: of a sharded model
    each reads its part, and of a replicated one each reads everything."""
    if question.storage is None:
        written = costs.durable.value if costs.durable else 0.0
        return Estimate(written, 0.0, 2 * written, INFERRED)
    copies = 1 if costs.sharded else question.workers or costs.workers
    return Estimate.exact(copies * snapshot_bytes(costs, question) / question.storage, GIVEN)
