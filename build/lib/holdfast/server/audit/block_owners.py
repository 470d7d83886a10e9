"""The owner of every block in every round of a run, reconstructed from the history."""

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import chain, combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.partition_map import PartitionMap
from holdfast.sampler.digest import Samples

Owners: TypeAlias = npt.NDArray[np.int64]
Blocks: TypeAlias = npt.NDArray[np.int64]
NOBODY = -1


class Tenure:
    """A period in which every block stays on the same server node.

    It begins with round `start` of updates. `version` is the number of the table that assigns blocks to nodes."""

    def __init__(self, start: int, version: int, owners: Owners) -> None:
        self.start, self.version, self.owners = start, version, owners

    @cached_property
    def held(self) -> dict[int, Samples]:
        """The number of blocks that each node holds, and a digest of their ids, by the number of the node."""
        return {node: Samples.of(self.blocks([node])) for node in np.unique(self.owners).tolist() if node != NOBODY}

    @cache  # noqa: B019  # a tenure lives as long as its audit
    def together(self, nodes: tuple[int, ...]) -> Samples:
        return Samples.total(self.held[node] for node in nodes)

    def blocks(self, nodes: Iterable[int]) -> Blocks:
        return np.flatnonzero(np.isin(self.owners, list(nodes)))


class Ownership:
    """The node that owns each block at the current point of a replayed history, and all earlier owners."""

    def __init__(self, blocks: int) -> None:
        self.tenures: list[Tenure] = []
        self.owners = np.full(blocks, NOBODY)
        self.is_declared_lost = np.zeros(blocks, bool)
        self.has_come_back = np.ones(blocks, bool)  # False where full recovery still has to restore a block
        self.version = 0
        self.open_round = 0
        self._changed = False

    @property
    def orphans(self) -> int:
        return int(np.count_nonzero(self.owners == NOBODY)) if self.tenures else 0

    def deal(self, nodes: Iterable[int], seed: int) -> None:
        """Assign all blocks to `nodes` at random with `seed`, exactly as the controller did at the start of the run."""
        drawn = PartitionMap.random(len(self.owners), sorted(nodes), np.random.default_rng((seed, 0)))
        self.owners = drawn.owners.astype(np.int64)
        self.tenures.append(Tenure(0, 0, self.owners.copy()))

    def restore(self, node: int, ids: Blocks, version: int) -> None:
        """Make `node`, which restored the blocks `ids`, their owner; `version` is the number of the table of owners."""
        self.owners[ids] = node
        self.is_declared_lost[ids] = False
        self.has_come_back[ids] = True
        self.version, self._changed = max(version, self.version), True

    def move(self, node: int, ids: Blocks, version: int, open_round: int) -> None:
        """Make the server node `node` the owner of the blocks `ids`, from round `open_round` of updates on.

        `version` is the number of the table that assigns blocks to nodes."""
        self.owners[ids] = node
        self.version, self._changed, self.open_round = version, True, open_round

    def close(self, *, keep_all: bool) -> None:
        """Begin a new `Tenure` (a period in which blocks keep their owners), if a block has changed its owner.

        If the model was not updated in the period before, the new period replaces it, unless `keep_all` is True."""
        self.has_come_back[:] = True
        if self._changed:
            if self.tenures[-1].start == self.open_round and not keep_all:
                self.tenures.pop()
            self.tenures.append(Tenure(self.open_round, self.version, self.owners.copy()))
            self._changed = False


def in_force(tenures: Sequence[Tenure], number: int) -> Tenure:
    return next(tenure for tenure in reversed(tenures) if tenure.start <= number)


def by_map(tenures: Sequence[Tenure], version: int) -> Tenure:
    return next((tenure for tenure in reversed(tenures) if tenure.version <= version), tenures[0])


def numbers(blocks: Sequence[int], count: int) -> Blocks | None:
    """Return the block ids `blocks` as an array, or None if an id is repeated, negative, or not below `count`."""
    ids = np.asarray(blocks, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= count or len(np.unique(ids)) < len(ids)):
        return None
    return ids


def adds_up(total: Samples, always: Iterable[Samples], perhaps: Iterable[Samples]) -> bool:
    """Return True if `total` equals all block sets in `always` together with some, all or no sets in `perhaps`."""
    rest, others = Samples.total(always), list(perhaps)
    subsets = chain.from_iterable(combinations(others, size) for size in range(len(others) + 1))
    return any(Samples.total((rest, *some)) == total for some in subsets)
