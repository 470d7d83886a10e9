"""The plan of a whole run: its phases, such as pretraining and finetuning, one after another.

Steps and epochs are counted through all phases. Most runs have one phase.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.sampler.plan import Position, SamplePlan

LATER = "later_phases"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The sample plans of all phases (training loops) of a run.

    `first_steps` and `first_epochs` have the first step and the first epoch of each phase, counted through the run."""

    phases: tuple[SamplePlan, ...]
    first_steps: tuple[int, ...] = field(init=False)
    first_epochs: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, lengths in (("steps", [p.steps for p in self.phases]), ("epochs", [p.epochs for p in self.phases])):
            object.__setattr__(self, f"first_{name}", (0, *accumulate(lengths[:-1])))

    @property
    def steps(self) -> int:
        return self.first_steps[-1] + self.phases[-1].steps

    def index(self, step: int) -> int:
        """Return the index of the phase (training loop) of `step`; the end of the run belongs to the last phase."""
        return bisect_right(self.first_steps, step) - 1

    def phase(self, step: int) -> tuple[SamplePlan, int]:
        """Return the plan of the phase (training loop) of `step`, and the number of the step within that phase."""
        index = self.index(step)
        return self.phases[index], step - self.first_steps[index]

    def position(self, step: int) -> Position:
        """Return the position of `step`, which may be beyond the end. Epochs are counted through all phases."""
        index = self.index(step)
        epoch, cursor = divmod(step - self.first_steps[index], self.phases[index].steps_per_epoch)
        return Position(self.first_epochs[index] + epoch, cursor)

    def positions(self, steps: Ids) -> tuple[Ids, Ids]:
        """Return two arrays: the epoch of each step in `steps`, and the number of each step within its epoch."""
        if len(self.phases) == 1:  # NumPy divides by one number several times as fast as by an array
            epochs = steps // self.phases[0].steps_per_epoch
            return epochs, steps - epochs * self.phases[0].steps_per_epoch
        phases = np.searchsorted(self.first_steps, steps, side="right") - 1
        lengths = np.array([phase.steps_per_epoch for phase in self.phases])[phases]
        epochs, cursors = np.divmod(steps - np.array(self.first_steps)[phases], lengths)
        return epochs + np.array(self.first_epochs)[phases], cursors

    def window(self, step: int) -> Ids:
        phase, local = self.phase(step)
        return phase.window(phase.position(local))

    def share(self, step: int, rank: int, world: int) -> Ids:
        phase, local = self.phase(step)
        return phase.share(phase.position(local), rank, world)

    def share_size(self, step: int, rank: int, world: int) -> int:
        return self.phase(step)[0].share_size(rank, world)

    def batch(self, step: int) -> int:
        return self.phase(step)[0].batch

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the first phase, to which a list of the later phases is added if there are any."""
        first, *later = (phase.to_json() for phase in self.phases)
        return {**first, LATER: later} if later else dict(first)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RunPlan":
        """Return the plan that `to_json` wrote, without the `orders` that samplers determined."""
        return cls(tuple(SamplePlan.from_json(phase) for phase in phases_of(value)))


def phases_of(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return one JSON object for each phase from `value`, a plan that `RunPlan.to_json` wrote."""
    later = value.get(LATER, ())
    return [{name: item for name, item in value.items() if name != LATER}, *later]
