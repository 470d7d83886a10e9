"""The events of a run from which its cost is computed, read in memory that does not grow with the number of ranks.

The steps of the ranks on the critical path are kept, in blocks where they were folded. Of the steps of the other ranks
only the shortest compute time of each step is kept.
"""

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.cost.shortest_steps import ShortestSteps
from holdfast.cost.step_block import Item, blocks_of
from holdfast.cost.timeline import RANK_0
from holdfast.events import Event, Regroup, Step, rank_of
from holdfast.history.folded import StepRun
from holdfast.history.log import Where, files_of, stream_blocks


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of a run in the order of time, and the shortest steps of its ranks other than rank 0."""

    items: Sequence[Item]
    shortest: ShortestSteps
    ranks: Collection[int]
    of_rank: Callable[[int], Iterable[Item]]  # returns the events of a rank, and all of its steps

    @property
    def events(self) -> list[Event]:
        """The events, without steps that were folded."""
        return [item for item in self.items if isinstance(item, Event)]


def of_history(history: Sequence[Event]) -> RunEvents:
    """Return the events of a `history` that is in memory."""
    shortest = ShortestSteps()
    for event in history:
        _add(shortest, event)
    ranks = {rank for event in history if (rank := rank_of(event.who)) is not None}
    return RunEvents(history, shortest, ranks, lambda rank: (e for e in history if e.who == f"rank-{rank}"))


def read_events(path: Where) -> RunEvents:
    """Read the history at `path`: a file, a folder of files, the folder of a run, or a sequence of these."""
    files = files_of(path)
    files.sort(key=lambda file: rank_of(file.stem) is not None)
    shortest, read, moments = ShortestSteps(), dict[Path, list[Item]](), list[float]()
    for file in files:
        read[file] = list(_items(file, {RANK_0}, shortest, moments))
        moments += [item.time for item in read[file] if rank_of(item.who) is None]
    leaders = leading_ranks(item for items in read.values() for item in items)
    for file in files:
        if file.stem in leaders:
            read[file] = list(_items(file, leaders, ShortestSteps(), moments))
    of_ranks = {rank: file for file in files if (rank := rank_of(file.stem)) is not None}

    def of_rank(rank: int) -> Iterable[Item]:
        return _items(of_ranks[rank], {f"rank-{rank}"}, ShortestSteps(), ())

    return RunEvents(list(heapq.merge(*read.values(), key=lambda item: item.time)), shortest, of_ranks.keys(), of_rank)


def leading_ranks(items: Iterable[Item]) -> set[str]:
    """Return the names of the ranks that were the lowest of a group that formed after a loss, other than rank 0."""
    regroups = (item.what for item in items if isinstance(item.what, Regroup))
    return {f"rank-{min(regroup.members)}" for regroup in regroups if regroup.members} - {RANK_0}


def _items(file: Path, kept: Container[str], shortest: ShortestSteps, moments: Sequence[float]) -> Iterator[Item]:
    """Yield the items of one file, but the steps only of the ranks `kept`; add the steps of ranks to `shortest`."""
    for _, item in stream_blocks(file, []):
        _add(shortest, item)
        if isinstance(item, StepRun):
            yield from blocks_of(item, np.sort(np.array(moments))) if item.who in kept else ()
        elif not isinstance(item.what, Step) or item.who in kept:
            yield item


def _add(shortest: ShortestSteps, item: Event | StepRun) -> None:
    if not (rank := rank_of(item.who)):  # rank 0 waits for the others
        return
    if isinstance(item, StepRun):
        shortest.add(rank, item.panel.attempt, item.first, item.column("compute"))
    elif isinstance(item.what, Step):
        shortest.add_one(rank, item.what.attempt, item.what.step, item.what.seconds.compute)
