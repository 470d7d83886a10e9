"""The assignment of blocks to nodes as an immutable, versioned map; every change returns a new map."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids, partition
from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, eq=False)
class PartitionMap:
    """An immutable map that says which node of the parameter server holds which block.

    `without` and `with_node` return a new map, whose `version` is one higher."""

    version: int
    owners: npt.NDArray[np.int32]
    nodes: tuple[int, ...]

    @classmethod
    def random(cls, count: int, nodes: Sequence[int], rng: np.random.Generator) -> "PartitionMap":
        """Return a map of version 0 that assigns `count` blocks to `nodes` at random, as evenly as possible."""
        _require_enough(count, len(nodes))
        chosen = np.array(sorted(nodes), np.int32)
        return cls(0, _frozen(chosen[partition(count, len(nodes), rng)]), tuple(chosen.tolist()))

    def held_by(self, node: int) -> Ids:
        """Return the numbers of the blocks that `node` holds, in ascending order."""
        return np.flatnonzero(self.owners == node)

    def split(self, ids: Ids) -> dict[int, Ids]:
        """Return the blocks `ids` grouped by the node that holds them. Each group keeps the order of `ids`."""
        owners = self.owners[ids]
        parts = {node: ids[owners == node] for node in self.nodes}
        return {node: part for node, part in parts.items() if len(part)}

    def without(self, lost: Collection[int], rng: np.random.Generator) -> "PartitionMap":
        """Return the next version of the map, in which the other nodes hold the blocks of the `lost` nodes, evenly spread."""
        left = tuple(node for node in self.nodes if node not in lost)
        if not left:
            nodes = ", ".join(map(str, self.nodes))
            raise BadInput(f"all of the nodes {nodes} are lost, so no node can take their blocks.")
        orphans = np.flatnonzero(np.isin(self.owners, [node for node in self.nodes if node in lost]))
        owners = self.owners.copy()
        owners[rng.permutation(orphans)] = np.repeat(left, _evened(self._sizes(left), len(orphans), rng))
        return PartitionMap(self.version + 1, _frozen(owners), left)

    def with_node(self, node: int, rng: np.random.Generator) -> "PartitionMap":
        """Return the next version of the map, in which the new `node` holds an equal share of the blocks."""
        if node in self.nodes:
            raise BadInput(f"node {node} has already joined: give the new node another number.")
        _require_enough(len(self.owners), len(self.nodes) + 1)
        share = len(self.owners) // (len(self.nodes) + 1)
        owners = self.owners.copy()
        for donor, count in zip(self.nodes, _evened(-self._sizes(self.nodes), share, rng), strict=True):
            owners[rng.choice(self.held_by(donor), count, replace=False)] = node
        return PartitionMap(self.version + 1, _frozen(owners), tuple(sorted((*self.nodes, node))))

    def _sizes(self, nodes: Sequence[int]) -> Ids:
        counts = np.bincount(self.owners, minlength=max(self.nodes) + 1)
        return counts[list(nodes)]


def _evened(sizes: Ids, more: int, rng: np.random.Generator) -> Ids:

    def needed(level: int) -> int:
        return int(np.maximum(level - sizes, 0).sum())

    lowest = int(sizes.min())
    level = lowest + bisect_right(range(lowest, lowest + more + 1), more, key=needed) - 1
    given = np.maximum(level - sizes, 0)
    given[rng.permutation(np.flatnonzero(sizes <= level))[: more - needed(level)]] += 1
    return given


def _require_enough(blocks: int, nodes: int) -> None:
    if nodes > blocks:
        raise BadInput(f"{nodes} nodes are more than the {blocks} blocks: use {blocks} or fewer.")


def _frozen(owners: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    owners.flags.writeable = False
    return owners
