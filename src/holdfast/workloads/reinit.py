"""What becomes of a block that is lost before it was ever saved, by a rule of the workload's own.

All that a checkpoint has of such a block is its first value. Where that is random, survivors that have moved on must
unlearn it, which can cost more than to start over. A workload knows better: zero, or what survivors have in common.

What survivors say is added up, so that nodes of a parameter server, each with some of the blocks, come to the same rule.
"""

from typing import Protocol, cast

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays, Workload


class Fresh(Protocol):
    """A workload with a rule for lost blocks that were never saved."""

    def survivors(self, ids: Ids, held: Arrays) -> Arrays:
        """What there is to say of surviving blocks, packed; sayings of two nodes are added up, array by array."""

    def fresh(self, ids: Ids, said: Arrays, iteration: int, stream: int) -> Arrays:
        """New values of lost blocks, packed, from what survivors say; `iteration` is the next one of this stream."""


def has_rule(workload: Workload) -> bool:
    """Whether a workload has such a rule; asked of the object, since a model from a file hands on what it is asked for."""
    return hasattr(workload, "survivors") and hasattr(workload, "fresh")


def rule_of(workload: Workload) -> Fresh:
    """The rule of a workload, which must have one."""
    if not has_rule(workload):
        raise BadInput(
            f"{workload.name} has no rule for blocks that were never saved: choose recovery partial, or give the model "
            "the functions survivors(ids, held) and fresh(ids, said, iteration, stream)"
        )
    return cast(Fresh, workload)


def renewed(workload: Workload, live: Arrays, lost: Ids, ids: Ids, iteration: int, stream: int) -> Arrays:
    """New values of some of the lost blocks, packed, from what is left of a state that is here as a whole."""
    rule, blocks = rule_of(workload), workload.blocks
    left = np.setdiff1d(np.arange(len(blocks)), lost)
    said = rule.survivors(left, {name: np.asarray(value) for name, value in blocks.pack(live, left).items()})
    return rule.fresh(ids, said, iteration, stream)


def added(sayings: list[Arrays]) -> Arrays:
    """What all survivors say; nodes that hold nothing say nothing."""
    told = [each for each in sayings if each]
    return {name: np.sum([each[name] for each in told], axis=0) for name in (told[0] if told else ())}
