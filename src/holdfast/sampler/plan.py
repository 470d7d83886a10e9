"""The samples of each step, computed from the seed and the number of the step, without stored state.

Each epoch shuffles the samples and cuts them into windows, one per step. Window `cursor` of `epoch` is the same for any
number of workers, which divide it among themselves. Resuming anywhere costs the computation of one window, not of an
epoch. Samples that do not fill a window at the end of an epoch are left out of that epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.sampler.shuffle import LARGEST, mixed, permuted

SEEDS = 1 << 64
LENGTH = ("epochs", "limit")  # the fields that determine the length of a training, but not the order of its samples
_NUMBERS = ("samples", "batch", "epochs", "seed", "limit")


class Position(NamedTuple):  # not a dataclass: an audit hashes and compares many
    """A position in the training: step number `cursor` of `epoch`, both counted from 0."""

    epoch: int = 0
    cursor: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch} cursor {self.cursor}"


class EpochOrders(Protocol):
    """The order of the samples in each epoch, as determined by a sampler of the script."""

    @property
    def digest(self) -> str:
        """A digest of the order of epoch 0, to detect that a resumed script uses another sampler."""

    def of(self, epoch: int) -> Ids:
        """Return the ids of all samples of `epoch` in training order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """The plan of a training on `samples` samples, shuffled by `seed`, with a global batch of `batch` samples per step.

    The training lasts `epochs` epochs, but with a `limit` at most that many steps. With `orders`, a sampler determines
    the order of each epoch, and `samples` is the number of ids that it returns per epoch."""

    samples: int
    batch: int
    epochs: int
    seed: int = 0
    limit: int | None = None
    orders: EpochOrders | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not int and not (name == "limit" and value is None):
                raise BadInput(f"{name} must be an integer (got {value!r:.80}).")
        if self.batch < 1:
            raise BadInput(f"global_batch must be at least 1 (got {self.batch}).")
        if self.samples < self.batch:
            raise BadInput(f"{self.samples} samples do not fill one global batch of {self.batch}: make it smaller.")
        if self.samples > LARGEST:
            raise BadInput(f"{self.samples} samples are more than can be shuffled: give at most {LARGEST}.")
        if self.epochs < 1:
            raise BadInput(f"The number of epochs must be at least 1 (got {self.epochs}).")
        if self.limit is not None and -(-self.limit // self.steps_per_epoch) != self.epochs:
            raise BadInput(
                f"{self.limit} steps do not end in the last of {self.epochs} epochs of {self.steps_per_epoch} steps."
            )
        if not 0 <= self.seed < SEEDS:
            raise BadInput(f"The seed {self.seed} does not fit 64 bits: give 0 to {SEEDS - 1}.")

    @classmethod
    def planned(
        cls,
        *,
        samples: int,
        batch: int,
        epochs: int | None,
        steps: int | None,
        seed: int,
        orders: EpochOrders | None = None,
    ) -> "SamplePlan":
        """Return the plan for `epochs` epochs or for `steps` steps. Exactly one of the two must be given."""
        if (epochs is None) == (steps is None):
            raise BadInput("Give either num_epochs=N or steps=N: one of them says how long to train.")
        if steps is None or batch < 1 or samples < batch:  # the constructor raises what is wrong
            return cls(samples=samples, batch=batch, epochs=1 if epochs is None else epochs, seed=seed, orders=orders)
        if type(steps) is not int or steps < 1:
            raise BadInput(f"steps must be an integer of at least 1 (got {steps!r:.80}).")
        length = samples // batch
        limit = None if steps % length == 0 else steps
        return cls(samples=samples, batch=batch, epochs=-(-steps // length), seed=seed, limit=limit, orders=orders)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch. Samples that do not fill a last batch are left out."""
        return self.samples // self.batch

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch if self.limit is None else self.limit

    def end_of(self, epoch: int) -> int:
        """Return the number of the first step after `epoch`."""
        return min((epoch + 1) * self.steps_per_epoch, self.steps)

    def position(self, step: int) -> Position:
        """Return the position of `step`, which may also be the end of the training (step number `steps`)."""
        if not 0 <= step <= self.steps:
            raise BadInput(f"Step {step} is not in 0..{self.steps}, the steps of this training and its end.")
        return Position(*divmod(step, self.steps_per_epoch))

    def step(self, at: Position) -> int:
        """Return the number of the step at position `at`; at the end of the training this is `steps`."""
        step = at.epoch * self.steps_per_epoch + at.cursor
        if not (0 <= at.cursor < self.steps_per_epoch and 0 <= step <= self.steps):
            raise BadInput(f"{at} is not in this training of {self.steps} steps, {self.steps_per_epoch} in an epoch.")
        return step

    def window(self, at: Position) -> Ids:
        """Return the ids of all samples that the step at position `at` trains, in the shuffled order."""
        return self.windows([self.step(at)]).ravel()

    def share(self, at: Position, rank: int, world: int) -> Ids:
        """Return the ids of the samples that `rank` of `world` ranks trains in the step at position `at`."""
        return self.windows([self.step(at)], self.places(rank, world)).ravel()

    def share_size(self, rank: int, world: int) -> int:
        """Return how many samples `rank` of `world` ranks trains in each step; ranks differ by at most one."""
        return len(self.places(rank, world))

    def places(self, rank: int, world: int) -> range:
        """Return the range of indexes, within the samples of each step, that `rank` of `world` ranks trains."""
        if not 1 <= world <= self.batch:
            raise BadInput(f"A global batch of {self.batch} samples cannot be divided among {world} workers.")
        if not 0 <= rank < world:
            raise BadInput(f"There is no rank {rank} among {world} workers: ranks are 0 to {world - 1}.")
        return range(rank * self.batch // world, (rank + 1) * self.batch // world)

    def windows(self, steps: npt.ArrayLike, places: range | None = None) -> Ids:
        """Return the sample ids of `steps`, one row per step. `places` selects a range of indexes within each step."""
        numbers = np.asarray(steps, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.steps:
            raise BadInput(f"Steps {numbers.min()} to {numbers.max()} are not all in 0..{self.steps - 1}.")
        epochs, cursors = np.divmod(numbers[:, None], self.steps_per_epoch)
        wanted = range(self.batch) if places is None else places
        return self._shuffled(epochs, cursors * self.batch + np.arange(wanted.start, wanted.stop))

    def to_json(self) -> dict[str, int | str]:
        """Return the plan as a JSON object, without fields that are None, and with a digest in place of the orders."""
        numbers = {name: getattr(self, name) for name in _NUMBERS if getattr(self, name) is not None}
        return numbers | ({"sampler": self.orders.digest} if self.orders else {})

    @classmethod
    def from_json(cls, value: object, orders: EpochOrders | None = None) -> "SamplePlan":
        """Return the plan that `to_json` wrote, with sample `orders`, which the JSON lacks. Ignore unknown fields."""
        needed = [name for name in _NUMBERS if name != "limit"]
        if not isinstance(value, Mapping) or (missing := [name for name in needed if name not in value]):
            lacking = f" lacks {', '.join(missing)}" if isinstance(value, Mapping) else ""
            raise BadInput(f"Not the plan of a training: {value!r:.80}{lacking}.")
        return cls(**{name: value[name] for name in _NUMBERS if name in value}, orders=orders)

    def _shuffled(self, epochs: Ids, places: Ids) -> Ids:
        if self.orders:
            return _taken(self.orders, np.broadcast_to(epochs, places.shape), places)
        # For one seed, different epochs have different keys, because adding and mixing are one-to-one.
        keys = mixed(mixed(self.seed) + epochs.astype(np.uint64))
        return permuted(places, self.samples, keys)


def _taken(orders: EpochOrders, epochs: Ids, places: Ids) -> Ids:
    """Return, for each i, the sample id at index `places[i]` in the order of epoch `epochs[i]`."""
    ids = np.empty(places.shape, np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        ids[here] = orders.of(epoch)[places[here]]
    return ids
