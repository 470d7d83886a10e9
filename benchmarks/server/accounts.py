"""Whether the history of a served run that is done accounts for everything: what is missing, in words."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from holdfast import events
from holdfast.history.log import read_history
from holdfast.sampler.digest import Samples


def unaccounted(out: Path) -> list[str]:
    """Every block's every round, every iteration once, every lost block."""
    told = [event.what for event in read_history(out / "history").events]
    begun = next(what for what in told if isinstance(what, events.Serve))
    done = next((what for what in told if isinstance(what, events.Done)), None)
    if done is None:
        return ["nobody said that the run is done"]
    iterations = [what.iteration for what in told if isinstance(what, events.Iterate)]
    wrong = [] if iterations == list(range(done.step)) else [f"iterations told: {iterations}, but {done.step} are done"]
    return wrong + _blocks(told) + _rounds(told, begun.blocks, done.step * begun.rounds)


def _blocks(told: list[events.What]) -> list[str]:
    lost: set[int] = set()
    for what in told:
        if isinstance(what, events.Lost):
            lost |= set(what.blocks)
        elif isinstance(what, events.Restored):
            lost -= set(what.blocks)
    return [f"{len(lost)} lost blocks never came back"] if lost else []


def _rounds(told: list[events.What], blocks: int, rounds: int) -> list[str]:
    applied: dict[tuple[int, int], list[Samples]] = defaultdict(list)
    dropped: dict[tuple[int, int], list[Samples]] = defaultdict(list)
    for what in told:
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
