"""State divided into blocks: how to divide it, which blocks to save, and which to restore after a failure.

`whole`, `along`, `ragged` and `by_row` divide a dict of arrays or tensors into numbered `Blocks`. A `Policy` chooses
the blocks to save at a step. A recovery (`full`, `partial` or `fresh`) chooses the blocks to restore.
"""

from holdfast.blocks.division import Blocks, Norm, along, by_row, euclidean, partition, ragged, whole
from holdfast.blocks.partition_map import PartitionMap
from holdfast.blocks.policy import BlockChoice, BlockInfo, Policy
from holdfast.blocks.recoveries import Recovery, fresh, full, partial, recover, recovery

__all__ = [
    "BlockChoice",
    "BlockInfo",
    "Blocks",
    "Norm",
    "PartitionMap",
    "Policy",
    "Recovery",
    "along",
    "by_row",
    "euclidean",
    "fresh",
    "full",
    "partial",
    "partition",
    "ragged",
    "recover",
    "recovery",
    "whole",
]
