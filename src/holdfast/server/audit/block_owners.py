"""Who holds which block at every round of a served run: one owner each, from the first map on."""

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.sampler.digest import Samples
from holdfast.server.partition import PartitionMap

Owners: TypeAlias = npt.NDArray[np.int64]
Blocks: TypeAlias = npt.NDArray[np.int64]
NOBODY = -1


class Tenure:
    """Who holds what from a round on, and the version of the map that says so."""

    def __init__(self, start: int, version: int, owners: Owners) -> None:
        self.start, self.version, self.owners = start, version, owners

    @cached_property
    def held(self) -> dict[int, Samples]:
        """By node, the blocks that it holds."""
        return {node: Samples.of(self.blocks([node])) for node in np.unique(self.owners).tolist() if node != NOBODY}

    @cache  # noqa: B019  # a tenure lives as long as its audit
    def together(self, nodes: tuple[int, ...]) -> Samples:
        """The blocks of these nodes together, without listing them."""
        return Samples.total(self.held[node] for node in nodes)

    def blocks(self, nodes: Iterable[int]) -> Blocks:
        """The blocks of these nodes together."""
        return np.flatnonzero(np.isin(self.owners, list(nodes)))


def first_owners(blocks: int, nodes: Iterable[int], seed: int) -> Owners:
    """Who holds which block at the start, drawn as the controller draws it."""
    drawn = PartitionMap.random(blocks, sorted(nodes), np.random.default_rng((seed, 0)))
    return drawn.owners.astype(np.int64)


def in_force(tenures: Sequence[Tenure], number: int) -> Tenure:
    """The tenure under which the round of this number was applied."""
    return next(tenure for tenure in reversed(tenures) if tenure.start <= number)


def by_map(tenures: Sequence[Tenure], version: int) -> Tenure:
    """The tenure that the map of this version, or the last one before it that changed anything, says."""
    return next((tenure for tenure in reversed(tenures) if tenure.version <= version), tenures[0])


def numbers(blocks: Sequence[int], count: int) -> Blocks | None:
    """These blocks as an array; None if one of them does not exist or stands there twice."""
    ids = np.asarray(blocks, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= count or len(np.unique(ids)) < len(ids)):
        return None
    return ids
