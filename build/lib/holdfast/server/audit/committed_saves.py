"""The newest committed save of every block, and the blocks that nodes chose for each save."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.events import Chosen, Restored, What
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import NOBODY, Blocks, Owners


class SaveChoice(NamedTuple):
    """The blocks that each node chose for a save (`by_node`), and the node of every block at that time (`owners`)."""

    owners: Owners
    by_node: Mapping[int, Samples]


class RecordedChoices:
    """The blocks chosen for saves and the blocks restored, as the controller and as each node recorded them."""

    def __init__(self, lines: Sequence[What], nodes: Mapping[int, Sequence[What]]) -> None:
        self.chosen = {what.iteration for what in lines if isinstance(what, Chosen)}
        self.restored = {(what.node, what.version) for what in lines if isinstance(what, Restored)}
        self.chosen_by: defaultdict[tuple[int, int], list[Samples]] = defaultdict(list)  # by node and iteration
        self.restores_of: defaultdict[int, list[Restored]] = defaultdict(list)
        for node, own in nodes.items():
            for what in own:
                if isinstance(what, Chosen):
                    self.chosen_by[node, what.iteration].append(what.blocks)
                elif isinstance(what, Restored):
                    self.restores_of[node].append(what)


class CommittedSaves:
    """The iteration of the newest committed save of every block, computed by replaying the controller's history."""

    def __init__(self, count: int) -> None:
        self.saved_at = np.full(count, NOBODY)
        self.choices: dict[int, SaveChoice] = {}
        self.committed: set[int] = set()
        self.commits = 0
        self.unclear: int | None = None  # the first save whose blocks are not recorded
        self._waiting: dict[int, set[int]] = {}  # by iteration, nodes whose part must still be committed

    def choose(self, iteration: int, choice: SaveChoice, lost: Iterable[int] = ()) -> None:
        """Record the blocks chosen for the save after `iteration`; blocks of the `lost` nodes need not be committed."""
        self.choices[iteration] = choice
        self._waiting[iteration] = {node for node, blocks in choice.by_node.items() if blocks.count} - set(lost)

    def lose(self, node: int) -> None:
        for waiting in self._waiting.values():
            waiting.discard(node)

    def waiting(self) -> tuple[int, int] | None:
        """Return the iteration and node of a save that was chosen but not committed, or None if there is none."""
        return next(((iteration, min(nodes)) for iteration, nodes in self._waiting.items() if nodes), None)

    def commit(self, iteration: int, ids: Blocks) -> str | None:
        """Record a save of the blocks `ids` after `iteration`; return an error message if other blocks were chosen."""
        choice = self.choices.get(iteration)
        self.committed.add(iteration)
        if choice is None:
            return f"a save of iteration {iteration} was committed, but no blocks were chosen for it"
        owners = choice.owners[ids]
        if len(orphans := ids[owners == NOBODY]):
            return f"the save of iteration {iteration} has block {orphans[0]}, which had no owner at the choice"
        for node in np.unique(owners).tolist():
            if Samples.of(ids[owners == node]) != choice.by_node.get(node, Samples()):
                return f"the save of iteration {iteration} has other blocks of node-{node} than node-{node} chose"
            self._waiting.get(iteration, set()).discard(node)
        self.saved_at[ids] = np.maximum(self.saved_at[ids], iteration)
        return None

    def commit_unclear(self, iteration: int) -> None:
        self._waiting.pop(iteration, None)
        self.unclear = iteration if self.unclear is None else self.unclear
