"""Check that the history of a finished served run accounts for every iteration, block and round."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from holdfast import events
from holdfast.history.log import read_history
from holdfast.sampler.digest import Samples


def unaccounted(out: Path) -> list[str]:
    """Return a sentence for everything that the history in `out` does not account for."""
    recorded = [event.what for event in read_history(out / "history").events]
    begun = next(what for what in recorded if isinstance(what, events.Serve))
    done = next((what for what in recorded if isinstance(what, events.Done)), None)
    if done is None:
        return ["no event says that the run is done"]
    iterations = [what.iteration for what in recorded if isinstance(what, events.Iterate)]
    wrong = (
        [] if iterations == list(range(done.step)) else [f"recorded iterations: {iterations}, but {done.step} are done"]
    )
    return wrong + _blocks(recorded) + _rounds(recorded, begun.blocks, done.step * begun.rounds)


def _blocks(recorded: list[events.What]) -> list[str]:
    lost: set[int] = set()
    for what in recorded:
        if isinstance(what, events.Lost):
            lost |= set(what.blocks)
        elif isinstance(what, events.Restored):
            lost -= set(what.blocks)
    return [f"{len(lost)} lost blocks never came back"] if lost else []


def _rounds(recorded: list[events.What], blocks: int, rounds: int) -> list[str]:
    applied: dict[tuple[int, int], list[Samples]] = defaultdict(list)
    dropped: dict[tuple[int, int], list[Samples]] = defaultdict(list)
    for what in recorded:
        if isinstance(what, events.Applied):
            applied[what.iteration, what.round].append(what.blocks)
        elif isinstance(what, events.Dropped):
            dropped[what.iteration, what.round].append(what.blocks)
    wrong = [] if len(applied) == rounds else [f"{len(applied)} rounds were applied, not {rounds}"]
    everything = Samples.of(np.arange(blocks))
    for when, shares in applied.items():
        changed, missing = Samples.total(shares), Samples.total(dropped[when])
        if changed.count > blocks:
            wrong.append(f"round {when} was applied to {changed.count} of {blocks} blocks")
        elif changed != everything and changed.count + missing.count < blocks:
            wrong.append(f"round {when} was applied to {changed.count} blocks, {missing.count} dropped, of {blocks}")
    return wrong
