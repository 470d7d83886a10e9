"""New values for blocks that are lost before their first save, computed by the workload from the surviving blocks.

The checkpoint has only the initial value of such a block. If that is random, the surviving blocks must unlearn it,
which can cost more than starting over.
"""

from typing import Protocol, cast

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays, Workload


class Reinitializable(Protocol):
    """A workload that can compute new values for lost blocks that no checkpoint contains."""

    def survivors(self, ids: Ids, held: Arrays) -> Arrays:
        """Summarize a node's surviving blocks `ids` with values `held`; the summaries of all nodes are then added."""

    def fresh(self, ids: Ids, summary: Arrays, iteration: int, stream: int) -> Arrays:
        """Return new values for the lost blocks `ids`; `summary` is the sum of `survivors` over all nodes.

        `iteration` and the run's seed `stream` seed the random numbers."""


def has_rule(workload: Workload) -> bool:
    return hasattr(workload, "survivors") and hasattr(workload, "fresh")


def rule_of(workload: Workload) -> Reinitializable:
    """Return `workload` if it can compute new values for lost blocks, otherwise raise BadInput."""
    if not has_rule(workload):
        raise BadInput(
            f"{workload.name} has no rule for blocks that were never saved. Use --restore partial, or give the model the "
            "functions survivors(ids, held) and fresh(ids, summary, iteration, stream)."
        )
    return cast(Reinitializable, workload)


def renewed(workload: Workload, live: Arrays, lost: Ids, ids: Ids, iteration: int, stream: int) -> Arrays:
    """Return new values for the blocks `ids`, computed from the blocks of the state `live` that are not in `lost`.

    `iteration` and the run's seed `stream` seed the random numbers."""
    rule, blocks = rule_of(workload), workload.blocks
    left = np.setdiff1d(np.arange(len(blocks)), lost)
    summary = rule.survivors(left, {name: np.asarray(value) for name, value in blocks.pack(live, left).items()})
    return rule.fresh(ids, summary, iteration, stream)


def added(summaries: list[Arrays]) -> Arrays:
    filled = [summary for summary in summaries if summary]
    return {name: np.sum([summary[name] for summary in filled], axis=0) for name in (filled[0] if filled else ())}
