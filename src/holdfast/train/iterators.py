"""The iterators of a script: the batches of a run, in one loop or epoch by epoch.

Both kinds of iterator draw from one generator, `Loop.run`. An epoch ends without asking the generator for more. So the
code that a script runs after the batches of an epoch comes before the step boundary, and its effects are saved with the
epoch. A script leaves a loop by dropping the generator, so only the script's iterator keeps a reference to it.
"""

import dataclasses
import weakref
from collections.abc import Callable, Generator, Iterator, KeysView, Mapping
from typing import Any

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.progress import restart_needed
from holdfast.sampler.plan import SamplePlan
from holdfast.train.data.dataset import MapDataset

WAY = "for epoch in run.epochs(dataset, ...): for batch in epoch: ..., then the work at the end of the epoch"


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """The samples that the script trains next: this rank's samples of one step, or one micro-batch of these samples.

    Use a batch like the data that it contains: `x, y = batch`, `batch["input_ids"]` or `model(**batch)`. A batch has
    these attributes:

    - `data`: what the dataset and `collate_fn` returned.
    - `ids`: the indices of the samples in the dataset.
    - `weight`: with `micro_batches`, the micro-batch's fraction of this rank's samples of the step. Multiply a mean loss
      by `weight`, so that the losses of all micro-batches add up to the mean loss of the rank's samples.
    - `is_last`: True for the last micro-batch of a step. Step the optimizer after this batch.
    - `step`, `epoch`, `cursor`: the number of the step, of the epoch, and of the step within the epoch, all from 0."""

    data: Any
    ids: Ids
    weight: float
    is_last: bool
    epoch: int
    cursor: int
    step: int

    def to(self, *args: Any, **options: Any) -> "Batch":
        """Return a copy of the batch with every tensor moved, for example to a device. See `torch.Tensor.to`."""
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
    """Return a copy of the nested structure `value` with every tensor moved. The arguments are those of `Tensor.to`."""
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
    """A marker that the loop yields before the batches of `epoch`. `step` is the epoch's first untrained step."""

    epoch: int
    step: int


@dataclasses.dataclass(slots=True, eq=False)
class PhaseStart:
    """A marker that the loop yields before the batches of phase number `phase` (a training loop of the script)."""

    phase: int


LoopItems = Generator[Batch | EpochStart | PhaseStart]


class SharedLoop:
    """The generator of a run's training loop, from which the script's loops (phases) take batches one after another.

    `begin` is called when the first phase is iterated over. It returns the generator and the number of phases."""

    def __init__(self, begin: Callable[[], tuple[LoopItems, int]]) -> None:
        self._begin = begin
        self._items: LoopItems | None = None
        self._phases = 0
        self._next: PhaseStart | None = None
        self._open: int | None = None  # the phase that is being trained

    def enter(self, phase: int) -> LoopItems | None:
        """Return the generator, advanced to the first untrained step of `phase`; None if all its steps are trained."""
        if self._items is None:
            self._items, self._phases = self._begin()
        if self._open is not None:
            raise BadInput(
                f"loop {self._open + 1} of this run is not trained to its end, and loop {phase + 1} was begun: iterate over "
                "each loop to its end, in the order in which they were made. To end a run early call run.stop()."
            )
        if self._next is None:
            start = next(self._items, None)
            assert start is None or isinstance(start, PhaseStart)
            self._next = start
        if self._next is None or self._next.phase > phase:
            return None
        if self._next.phase < phase:
            raise BadInput(
                f"loop {phase + 1} of this run was begun before loop {self._next.phase + 1} was trained: iterate over the loops in "
                "the order in which they were made with run.batches or run.epochs."
            )
        self._next, self._open = None, phase
        return self._items

    def leave(self) -> None:
        """Mark the phase (training loop of the script) that was entered last as finished."""
        self._open = None

    def is_last(self, phase: int) -> bool:
        return phase + 1 == self._phases


@dataclasses.dataclass(slots=True, eq=False)
class PhaseItems:
    """The batches of one phase (training loop of the script), taken from the run's common loop.

    `start` is the first step of the phase that is not trained yet."""

    loop: SharedLoop
    phase: int
    plan: SamplePlan
    start: int

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the phase. After them, the run's common loop stays open for the next phase."""
        items = self.loop.enter(self.phase)
        for item in items or ():
            batch = _batch(item)
            yield batch
            if batch.is_last and batch.step + 1 == self.plan.steps and not self.loop.is_last(self.phase):
                break
        self.loop.leave()


class Batches:
    """An iterator over the batches of a run that are not trained yet. A script can iterate over it once.

    `len(batches)` is the number of all batches that this rank trains in this loop, including the batches trained before
    a restart. Each micro-batch counts as a batch. For a progress bar use `tqdm(batches, initial=batches.initial)`."""

    def __init__(self, items: PhaseItems, dataset: MapDataset, micro_batches: int) -> None:
        self.dataset = dataset
        self.steps_per_epoch = items.plan.steps_per_epoch
        self.initial = items.start * micro_batches
        """The number of batches that were trained before the last restart, and that this iterator leaves out."""
        self._length = items.plan.steps * micro_batches
        self._batches: Iterator[Batch] | None = items.batches()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        batches, self._batches = self._batches, None
        if batches is None:
            raise BadInput(f"a loop is over all its epochs, and its batches come once: write {WAY}.")
        return batches

    def __next__(self) -> Batch:
        if self._batches is None:
            raise BadInput("these batches are iterated over already: ask that iterator for the next one.")
        return next(self._batches)


class Epochs:
    """An iterable over the epochs of a run that are not completely trained yet. A script can iterate over it once."""

    def __init__(self, items: PhaseItems, dataset: MapDataset, micro_batches: int) -> None:
        self.dataset = dataset
        self.steps_per_epoch = items.plan.steps_per_epoch
        self.initial = items.start // items.plan.steps_per_epoch
        """The number of epochs that were completely trained before the last restart, and that are left out."""
        self._length, self._micro_batches = items.plan.epochs, micro_batches
        self._items: PhaseItems | None = items

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator["Epoch"]:
        items, self._items = self._items, None
        if items is None:
            raise BadInput("a run has one loop over its epochs: they come once.")
        return self._epochs(items)

    def _epochs(self, own: PhaseItems) -> Iterator["Epoch"]:
        items = own.loop.enter(own.phase)
        while items is not None and (opening := next(items, None)) is not None:
            assert isinstance(opening, EpochStart)
            epoch = Epoch(items, self.dataset, own.plan, self._micro_batches, opening)
            yield epoch
            epoch.check_trained()
            if epoch.number + 1 == own.plan.epochs and not own.loop.is_last(own.phase):
                break
        own.loop.leave()


class Epoch:
    """One epoch of a run: an iterable over the batches of the epoch that are not trained yet.

    `len(epoch)` is the number of all batches of the epoch, including the batches trained before a restart. For a
    progress bar use `tqdm(epoch, initial=epoch.initial)`."""

    def __init__(
        self, items: LoopItems, dataset: MapDataset, plan: SamplePlan, micro_batches: int, opening: EpochStart
    ) -> None:
        self.dataset = dataset
        self.number = opening.epoch
        self.steps_per_epoch = plan.steps_per_epoch
        first = opening.epoch * plan.steps_per_epoch
        self.initial = (opening.step - first) * micro_batches
        """The number of batches of this epoch that were trained before the last restart, and that are left out."""
        self._end = plan.end_of(opening.epoch)
        self._length = (self._end - first) * micro_batches
        self._items = weakref.ref(items)
        self._next = opening.step  # the step whose batches come next
        self._is_begun = self._is_over = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        items = self._items()
        if items is None:
            raise BadInput(f"the loop over the epochs was left, so epoch {self.number} has no more batches.")
        if self._is_begun:
            raise BadInput(
                f"the batches of epoch {self.number} come once: a second loop over them would train nothing."
            )
        self._is_begun = True
        return self._batches(items)

    def _batches(self, items: LoopItems) -> Iterator[Batch]:
        for batch in items:
            if not isinstance(batch, Batch) or batch.epoch != self.number:
                # The worker was suspended, and missed what its script does at the end of the epoch.
                raise restart_needed(f"this worker was suspended in epoch {self.number} and resumed in another one")
            self._next = batch.step + batch.is_last
            self._is_over = self._next == self._end
            yield batch
            if self._is_over:
                return
        self._is_over = True  # the run was stopped

    def check_trained(self) -> None:
        """Raise `holdfast.BadInput` if some batches of this epoch are not trained yet.

        The run calls this method before the next epoch, so a script does not have to call it."""
        if not self._is_over:
            left = self._end - self._next
            raise BadInput(
                f"the next epoch was asked for, and epoch {self.number} has {left} step{'s' * (left != 1)} to train: "
                "iterate over all its batches. To end the run early call run.stop()."
            )


def _batch(item: Batch | EpochStart | PhaseStart) -> Batch:
    if isinstance(item, PhaseStart):
        # The worker was suspended, and missed what its script does between the two phases.
        raise restart_needed("this worker was suspended in one phase and resumed in another one")
    assert isinstance(item, Batch)
    return item
