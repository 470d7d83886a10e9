"""The windows of a run as the loader of a trainer that owns its loop: iterated once an epoch, batch by batch.

Nothing is fetched ahead: the boundary after a step comes when the trainer asks for the next batch, after all that it
does at the end of a step or of an epoch, and is saved with it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import BadInput
from holdfast.train.data.loader import Collate, MapDataset, divided, size
from holdfast.train.iterators import Batch, Batches
from holdfast.train.run import Run


class Windows:
    """Has the length of an epoch; every iteration hands out what is left of one. `begin` says from which loop."""

    def __init__(self, dataset: MapDataset, global_batch: int, parts: int = 1) -> None:
        self.dataset, self.global_batch = dataset, global_batch
        self.parts = parts
        """Batches per window; the trainer steps its optimizer after this number."""
        samples = size(dataset)
        self.steps_per_epoch = samples // global_batch
        if not self.steps_per_epoch:
            raise BadInput(f"{samples} samples do not fill one global batch of {global_batch}: make it smaller")
        self.last: Batch | None = None
        """The window that is being trained."""
        self._batches: Iterator[Batch] = iter(())
        self._steps = 0
        self._before: Callable[[], None] = _nothing

    def begin(self, batches: Batches, before: Callable[[], None]) -> None:
        """Hand out these from now on; at every boundary first do what must be done before the state is saved."""
        self._batches, self._steps, self._before = batches, len(batches), before

    def collate(self, collate: Collate) -> Collate:
        """Return a collate function that splits a share of a window into `parts` batches."""
        return Parts(collate, self.parts)

    def end(self, run: Run) -> None:
        """The boundary after the last step of the trainer; one that stops early ends the run here."""
        if self.last is not None and self.last.step + 1 < self._steps:
            run.stop()
        self._before()
        next(self._batches, None)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.parts

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._next()) is not None:
            yield from batch.data
            if batch.cursor + 1 == self.steps_per_epoch:
                return

    def _next(self) -> Batch | None:
        self._before()
        self.last = next(self._batches, None)
        return self.last


class Parts:
    """Collates samples into `parts` batches. A class, so that it can be sent to loader processes."""

    def __init__(self, collate: Collate, parts: int) -> None:
        self._collate, self._parts = collate, parts

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [self._collate(samples[part.start : part.stop]) for part in divided(len(samples), self._parts)]


def _nothing() -> None:
    pass
