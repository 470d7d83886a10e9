"""Who holds which block at every round of a served run: one owner each, from the first map on.

Which save of every block is the newest one that was committed, and whether what was committed had been chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.partition import PartitionMap
from holdfast.sampler.digest import Samples

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


class SaveChoice(NamedTuple):
    """What nodes chose to save after an iteration, and who held which block then."""

    owners: Owners
    by_node: Mapping[int, Samples]


class RunningSaves:
    """The running checkpoint as the controller tells of it."""

    def __init__(self, count: int) -> None:
        self.saved_at = np.full(count, NOBODY)
        self.choices: dict[int, SaveChoice] = {}
        self.committed: set[int] = set()
        self.unclear: int | None = None  # the first save of which is not told which blocks it has
        self._waiting: dict[int, set[int]] = {}  # by iteration, nodes whose part must still be committed

    def choose(self, iteration: int, choice: SaveChoice, lost: Iterable[int] = ()) -> None:
        """Nodes have chosen; the part of those that are lost need not be committed."""
        self.choices[iteration] = choice
        self._waiting[iteration] = {node for node, blocks in choice.by_node.items() if blocks.count} - set(lost)

    def lose(self, node: int) -> None:
        """What this node had not written yet is gone with it."""
        for waiting in self._waiting.values():
            waiting.discard(node)

    def waiting(self) -> tuple[int, int] | None:
        """An iteration, and a node that lives, whose part of its save was never committed."""
        return next(((iteration, min(nodes)) for iteration, nodes in self._waiting.items() if nodes), None)

    def commit(self, iteration: int, ids: Blocks) -> str | None:
        """These blocks are saved as of an iteration; returns what is wrong with that."""
        choice = self.choices.get(iteration)
        self.committed.add(iteration)
        if choice is None:
            return f"a save of iteration {iteration} was committed, for which no blocks were chosen"
        owners = choice.owners[ids]
        if len(orphans := ids[owners == NOBODY]):
            return (
                f"the save of iteration {iteration} has block {orphans[0]}, which nobody held when blocks were chosen"
            )
        for node in np.unique(owners).tolist():
            if Samples.of(ids[owners == node]) != choice.by_node.get(node, Samples()):
                return f"the save of iteration {iteration} has other blocks of node-{node} than it chose"
            self._waiting.get(iteration, set()).discard(node)
        self.saved_at[ids] = np.maximum(self.saved_at[ids], iteration)
        return None

    def commit_unclear(self, iteration: int) -> None:
        """Something of this iteration is saved, and nobody says which blocks."""
        self._waiting.pop(iteration, None)
        self.unclear = iteration if self.unclear is None else self.unclear


def adds_up(total: Samples, always: Iterable[Samples], perhaps: Iterable[Samples]) -> bool:
    """Whether a total is that of some parts, and of some or none of others."""
    rest, others = Samples.total(always), list(perhaps)
    return any(
        Samples.total((rest, *some)) == total for size in range(len(others) + 1) for some in combinations(others, size)
    )
