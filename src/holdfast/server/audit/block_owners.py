"""The owner of every block at every round of a run, from the first partition map on."""

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
    """The owners of all blocks from round `start` on, and the version of the map that names them."""

    def __init__(self, start: int, version: int, owners: Owners) -> None:
        self.start, self.version, self.owners = start, version, owners

    @cached_property
    def held(self) -> dict[int, Samples]:
        """The blocks of each node."""
        return {node: Samples.of(self.blocks([node])) for node in np.unique(self.owners).tolist() if node != NOBODY}

    @cache  # noqa: B019  # a tenure lives as long as its audit
    def together(self, nodes: tuple[int, ...]) -> Samples:
        """Return the digest of all blocks of `nodes`, without listing them."""
        return Samples.total(self.held[node] for node in nodes)

    def blocks(self, nodes: Iterable[int]) -> Blocks:
        """Return the numbers of all blocks of `nodes`."""
        return np.flatnonzero(np.isin(self.owners, list(nodes)))


class Ownership:
    """The owners of blocks while a run is replayed: blocks are dealt out, lost, restored and moved.

    A change of owners becomes a tenure only when `close` is called, before the run continues.
    """

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
        """The number of blocks without an owner."""
        return int(np.count_nonzero(self.owners == NOBODY)) if self.tenures else 0

    def deal(self, nodes: Iterable[int], seed: int) -> None:
        """Give every block its first owner, drawn as the controller draws it."""
        drawn = PartitionMap.random(len(self.owners), sorted(nodes), np.random.default_rng((seed, 0)))
        self.owners = drawn.owners.astype(np.int64)
        self.tenures.append(Tenure(0, 0, self.owners.copy()))

    def restore(self, node: int, ids: Blocks, version: int) -> None:
        """Give blocks that came back from their saves to `node`."""
        self.owners[ids] = node
        self.is_declared_lost[ids] = False
        self.has_come_back[ids] = True
        self.version, self._changed = max(version, self.version), True

    def move(self, node: int, ids: Blocks, version: int, open_round: int) -> None:
        """Give blocks to a node that has joined."""
        self.owners[ids] = node
        self.version, self._changed, self.open_round = version, True, open_round

    def close(self, *, keep_all: bool) -> None:
        """Make a tenure of the changes so far; it replaces one without rounds, unless `keep_all`."""
        self.has_come_back[:] = True
        if self._changed:
            if self.tenures[-1].start == self.open_round and not keep_all:
                self.tenures.pop()
            self.tenures.append(Tenure(self.open_round, self.version, self.owners.copy()))
            self._changed = False


def in_force(tenures: Sequence[Tenure], number: int) -> Tenure:
    """Return the tenure under which round `number` was applied."""
    return next(tenure for tenure in reversed(tenures) if tenure.start <= number)


def by_map(tenures: Sequence[Tenure], version: int) -> Tenure:
    """Return the tenure of map `version`, or of the last map before it that changed an owner."""
    return next((tenure for tenure in reversed(tenures) if tenure.version <= version), tenures[0])


def numbers(blocks: Sequence[int], count: int) -> Blocks | None:
    """Return block numbers as an array, or None if one of them is listed twice or is not below `count`."""
    ids = np.asarray(blocks, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= count or len(np.unique(ids)) < len(ids)):
        return None
    return ids


def adds_up(total: Samples, always: Iterable[Samples], perhaps: Iterable[Samples]) -> bool:
    """Return True if `total` is the sum of all of `always` and of any subset of `perhaps`."""
    rest, others = Samples.total(always), list(perhaps)
    subsets = chain.from_iterable(combinations(others, size) for size in range(len(others) + 1))
    return any(Samples.total((rest, *some)) == total for some in subsets)
