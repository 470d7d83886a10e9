"""The limits of live recovery: the backend and the number of workers decide whether a lost worker restarts the job."""

from holdfast.advice.prices import is_larger
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts

NODE = 8  # workers: a job of more is assumed to have several nodes with GPUs, which communicate over NCCL
MESH = 64  # workers connected each to each over gloo; live recovery was not tried with more (docs/scale.md)


def why_restart(costs: RunCosts, question: Question) -> str | None:
    """Return the reason why every loss restarts the job, or None if live recovery is possible."""
    workers = question.workers or costs.workers
    if question.backend == "nccl" or (question.backend is None and _is_larger_than_a_node(costs, question)):
        source = "given" if question.backend else "assumed for a job larger than a node"
        limit = "replay and partial need gloo" if costs.sharded else "live recovery was not tried over NCCL"
        effect = "every loss is a restart" if costs.sharded else "take every loss for a restart"
        otherwise = "" if question.backend else " Give --backend gloo if the job uses gloo."
        return f"{limit}; over NCCL ({source}) {effect}.{otherwise}"
    if workers > MESH:
        return (
            f"over gloo, live recovery connects each of the {workers} workers with all others, which was not tried with more "
            f"than some tens of workers, so every loss is taken for a restart (docs/scale.md)."
        )
    return None


def _is_larger_than_a_node(costs: RunCosts, question: Question) -> bool:
    if not is_larger(costs, question):
        return False
    return (question.workers or 0) > NODE if question.nodes is None else question.nodes > 1
