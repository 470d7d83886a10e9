"""The iterators of a script: the batches of a run, in one loop or epoch by epoch.

Both draw from one generator, `Loop.run`. An epoch ends without asking the generator for more. So the code that a script
runs after the batches of an epoch comes before the step boundary, and its effects are saved with the epoch. A script
leaves a loop by dropping the generator, so only the script's iterator keeps a reference to it.
"""

import dataclasses
import weakref
from collections.abc import Generator, Iterator, KeysView, Mapping
from typing import Any

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.progress import restart_needed
from holdfast.sampler.plan import SamplePlan
from holdfast.train.data.dataset import MapDataset

WAY = "for epoch in run.epochs(dataset, ...): for batch in epoch: ..., then the work at the end of the epoch"


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """The samples to train next: this rank's share of a step, or one micro-batch of that share.

    `weight` is the micro-batch's fraction of the share: mean losses times their weights add up to the mean over the
    share. The optimizer steps after the batch with `is_last`. A batch is used like the data it carries: `x, y = batch`,
    `batch["input_ids"]`, `model(**batch)`; `batch.to(device)` returns a copy with its tensors on the device."""

    data: Any
    ids: Ids
    weight: float
    is_last: bool
    epoch: int
    cursor: int
    step: int

    def to(self, *args: Any, **options: Any) -> "Batch":
        """Return a copy of the batch with every tensor in its data, however nested, moved by `Tensor.to`."""
        return dataclasses.replace(self, data=moved(self.data, *args, **options))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def keys(self) -> KeysView[Any]:
        """Return the keys of the data if it is a dict, so that `model(**batch)` works."""
        if not isinstance(self.data, Mapping):
            raise BadInput(f"the batch holds a {type(self.data).__name__}, which has no keys: use batch.data.")
        return self.data.keys()


def moved(value: Any, *args: Any, **options: Any) -> Any:
    """Return a copy of the nested structure with every tensor moved by `Tensor.to`; other values stay as they are."""
    if hasattr(value, "to"):  # a tensor, or an object that knows how to move what it holds
        return value.to(*args, **options)
    if isinstance(value, Mapping):
        return type(value)({key: moved(item, *args, **options) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, *args, **options) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(item, *args, **options) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: moved(item, *args, **options) for name, item in fields.items()})
    return value


@dataclasses.dataclass(slots=True, eq=False)
class EpochStart:
    """A marker that precedes the batches of `epoch`. `step` is the first step of the epoch that is not trained yet."""

    epoch: int
    step: int


Turns = Generator[Batch | EpochStart]


class Batches:
    """An iterator over the batches of a run that are not trained yet; it can be used once.

    Its length counts all batches of the run, including those that earlier attempts have trained. `tqdm(batches,
    initial=batches.initial)` starts at the right place.
    """

    def __init__(self, turns: Turns, dataset: MapDataset, plan: SamplePlan, micro_batches: int, start: int) -> None:
        self.dataset = dataset
        self.steps_per_epoch = plan.steps_per_epoch
        self.initial = start * micro_batches
        """The number of batches that earlier attempts have trained."""
        self._length = plan.steps * micro_batches
        self._turns: Turns | None = turns

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        turns, self._turns = self._turns, None
        if turns is None:
            raise BadInput(f"a run has one loop, over all its epochs, and its batches come once: write {WAY}.")
        return (_batch(turn) for turn in turns)

    def __next__(self) -> Batch:
        if self._turns is None:
            raise BadInput("these batches are iterated over already: ask that iterator for the next one.")
        return _batch(next(self._turns))


class Epochs:
    """An iterable over the epochs of a run that are not completely trained yet; it can be used once."""

    def __init__(self, turns: Turns, dataset: MapDataset, plan: SamplePlan, micro_batches: int, start: int) -> None:
        self.dataset = dataset
        self.steps_per_epoch = plan.steps_per_epoch
        self.initial = start // plan.steps_per_epoch
        """The number of epochs that earlier attempts have trained to their end."""
        self._plan, self._micro_batches = plan, micro_batches
        self._turns: Turns | None = turns

    def __len__(self) -> int:
        return self._plan.epochs

    def __iter__(self) -> Iterator["Epoch"]:
        turns, self._turns = self._turns, None
        if turns is None:
            raise BadInput("a run has one loop over its epochs: they come once.")
        return self._epochs(turns)

    def _epochs(self, turns: Turns) -> Iterator["Epoch"]:
        while (opening := next(turns, None)) is not None:
            assert isinstance(opening, EpochStart)
            epoch = Epoch(turns, self.dataset, self._plan, self._micro_batches, opening)
            yield epoch
            epoch.check_trained()


class Epoch:
    """One epoch of a run: an iterable over its batches that are not trained yet.

    Its length counts all batches of the epoch, including those trained before a restart. `tqdm(epoch,
    initial=epoch.initial)` starts at the right place."""

    def __init__(
        self, turns: Turns, dataset: MapDataset, plan: SamplePlan, micro_batches: int, opening: EpochStart
    ) -> None:
        self.dataset = dataset
        self.number = opening.epoch
        self.steps_per_epoch = plan.steps_per_epoch
        first = opening.epoch * plan.steps_per_epoch
        self.initial = (opening.step - first) * micro_batches
        """The number of batches of this epoch that earlier attempts have trained."""
        self._end = plan.end_of(opening.epoch)
        self._length = (self._end - first) * micro_batches
        self._turns = weakref.ref(turns)
        self._next = opening.step  # the step whose batches come next
        self._is_begun = self._is_over = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        turns = self._turns()
        if turns is None:
            raise BadInput(f"the loop over the epochs was left, so epoch {self.number} has no more batches.")
        if self._is_begun:
            raise BadInput(
                f"the batches of epoch {self.number} come once: a second loop over them would train nothing."
            )
        self._is_begun = True
        return self._batches(turns)

    def _batches(self, turns: Turns) -> Iterator[Batch]:
        for batch in turns:
            if isinstance(batch, EpochStart) or batch.epoch != self.number:
                # The worker was suspended, and missed what its script does at the end of the epoch.
                raise restart_needed(f"this worker was suspended in epoch {self.number} and resumed in another one")
            self._next = batch.step + batch.is_last
            self._is_over = self._next == self._end
            yield batch
            if self._is_over:
                return
        self._is_over = True  # the run was stopped

    def check_trained(self) -> None:
        """Raise BadInput if the script asks for the next epoch before all batches of this one are trained."""
        if not self._is_over:
            left = self._end - self._next
            raise BadInput(
                f"the next epoch was asked for, and epoch {self.number} has {left} step{'s' * (left != 1)} to train: "
                "iterate over all its batches. To end the run early call run.stop()."
            )


def _batch(turn: Batch | EpochStart) -> Batch:
    assert isinstance(turn, Batch)
    return turn
