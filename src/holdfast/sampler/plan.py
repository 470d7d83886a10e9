"""Which samples belong to which step: windows of a keyed shuffle, computed from a position alone.

Window `cursor` of `epoch` is the same for any number of workers; they divide it among themselves. To go on anywhere
costs the window, not the epoch. What does not fill a window at the end of an epoch waits for the next shuffle.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.sampler.shuffle import LARGEST, mixed, permuted

SEEDS = 1 << 64
LENGTH = ("epochs", "limit")  # the fields that say how long a training is, and not which samples come in which order


class Position(NamedTuple):  # not a dataclass: an audit makes, hashes and compares many, and a tuple is quick at it
    """A place in the training: window `cursor` of `epoch`, both counted from 0."""

    epoch: int = 0
    cursor: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch} cursor {self.cursor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """The plan of a training: so many samples, so many of them a step, so many times, in the order of a seed.

    With a `limit` it ends after so many steps, which may be in the middle of its last epoch.
    """

    samples: int
    batch: int
    epochs: int
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int and not (field.name == "limit" and value is None):
                raise BadInput(f"{field.name} must be a whole number, not {value!r:.80}")
        if self.batch < 1:
            raise BadInput(f"a global batch of {self.batch} samples trains nothing: give 1 or more")
        if self.samples < self.batch:
            raise BadInput(f"{self.samples} samples do not fill one global batch of {self.batch}: make it smaller")
        if self.samples > LARGEST:
            raise BadInput(f"{self.samples} samples are more than can be shuffled: give at most {LARGEST}")
        if self.epochs < 1:
            raise BadInput(f"{self.epochs} epochs train nothing: give 1 or more")
        if self.limit is not None and -(-self.limit // self.steps_per_epoch) != self.epochs:
            raise BadInput(
                f"{self.limit} steps do not end in the last of {self.epochs} epochs of {self.steps_per_epoch}"
            )
        if not 0 <= self.seed < SEEDS:
            raise BadInput(f"the seed {self.seed} does not fit 64 bits: give 0 to {SEEDS - 1}")

    @classmethod
    def planned(cls, *, samples: int, batch: int, epochs: int | None, steps: int | None, seed: int) -> "SamplePlan":
        """The plan of so many epochs, or of so many steps, whichever is given."""
        if (epochs is None) == (steps is None):
            raise BadInput("Give either num_epochs=N or steps=N: one of them says how long to train.")
        if steps is None or batch < 1 or samples < batch:  # what is wrong with it, the plan itself says
            return cls(samples=samples, batch=batch, epochs=1 if epochs is None else epochs, seed=seed)
        if type(steps) is not int or steps < 1:
            raise BadInput(f"{steps!r:.80} steps train nothing: give a whole number, 1 or more")
        length = samples // batch
        whole = steps % length == 0
        return cls(samples=samples, batch=batch, epochs=-(-steps // length), seed=seed, limit=None if whole else steps)

    @property
    def steps_per_epoch(self) -> int:
        """Whole windows in an epoch."""
        return self.samples // self.batch

    @property
    def steps(self) -> int:
        """Windows in the whole training."""
        return self.epochs * self.steps_per_epoch if self.limit is None else self.limit

    @property
    def length(self) -> str:
        """How long it is, in words."""
        windows = f"{self.epochs} epochs of {self.steps_per_epoch} windows"
        return windows if self.limit is None else f"{self.limit} steps, in {windows}"

    def end_of(self, epoch: int) -> int:
        """The number of the window after the last one of an epoch."""
        return min((epoch + 1) * self.steps_per_epoch, self.steps)

    def __contains__(self, at: Position) -> bool:
        """Whether there is a window at this position."""
        inside = at.epoch >= 0 and 0 <= at.cursor < self.steps_per_epoch
        return inside and at.epoch * self.steps_per_epoch + at.cursor < self.steps

    def position(self, step: int) -> Position:
        """The position of the window with this number; that of number `steps` is the end."""
        if not 0 <= step <= self.steps:
            raise BadInput(f"step {step} is not in 0..{self.steps}, the steps of this training and its end")
        return Position(*divmod(step, self.steps_per_epoch))

    def following(self, at: Position) -> Position:
        """The position after this one; after the last it is the end."""
        epoch, cursor = at
        return Position(epoch, cursor + 1) if cursor + 1 < self.steps_per_epoch else Position(epoch + 1, 0)

    def step(self, at: Position) -> int:
        """The number of the window at this position; the end has number `steps`."""
        if at not in self and at != self.position(self.steps):
            raise BadInput(f"{at} is not in this training of {self.length}")
        return at.epoch * self.steps_per_epoch + at.cursor

    def window(self, at: Position) -> Ids:
        """The ids of the samples trained at this position, in their order."""
        return self._ids(at, range(self.batch))

    def share(self, at: Position, rank: int, world: int) -> Ids:
        """The part of the window that this rank of so many trains; only this part is computed."""
        return self._ids(at, self.places(rank, world))

    def share_size(self, rank: int, world: int) -> int:
        """How many samples of every window this rank trains; ranks differ by at most one."""
        return len(self.places(rank, world))

    def places(self, rank: int, world: int) -> range:
        """Which places of every window this rank trains."""
        if not 1 <= world <= self.batch:
            raise BadInput(f"a global batch of {self.batch} samples cannot be divided among {world} workers")
        if not 0 <= rank < world:
            raise BadInput(f"there is no rank {rank} among {world} workers: ranks are 0 to {world - 1}")
        return range(rank * self.batch // world, (rank + 1) * self.batch // world)

    def windows(self, steps: npt.ArrayLike, places: range | None = None) -> Ids:
        """The windows with these numbers, or these places of each, one in each row; cheaper than one by one."""
        numbers = np.asarray(steps, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.steps:
            raise BadInput(f"steps {numbers.min()} to {numbers.max()} are not all in 0..{self.steps - 1}")
        epochs, cursors = np.divmod(numbers[:, None], self.steps_per_epoch)
        wanted = range(self.batch) if places is None else places
        return self._shuffled(epochs, cursors * self.batch + np.arange(wanted.start, wanted.stop))

    def to_json(self) -> dict[str, int]:
        """The geometry as JSON values; a limit only where there is one."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, value: object) -> "SamplePlan":
        """The geometry that `to_json` wrote; other fields beside its own are left to others."""
        needed = [field.name for field in fields(cls) if field.name != "limit"]
        if not isinstance(value, Mapping) or (missing := [name for name in needed if name not in value]):
            lacking = f" lacks {', '.join(missing)}" if isinstance(value, Mapping) else ""
            raise BadInput(f"not the geometry of a training: {value!r:.80}{lacking}")
        return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})

    def _ids(self, at: Position, places: range) -> Ids:
        if at not in self:
            raise BadInput(f"there is no window {at} in {self.length}")
        start = at.cursor * self.batch
        return self._shuffled(np.array([at.epoch]), np.arange(start + places.start, start + places.stop))

    def _shuffled(self, epochs: Ids, places: Ids) -> Ids:
        """The samples at these places of the shuffles of these epochs, which are broadcast to the places."""
        # For one seed, different epochs have different keys, because adding and mixing are one-to-one.
        keys = mixed(mixed(self.seed) + epochs.astype(np.uint64))
        return permuted(places, self.samples, keys)
