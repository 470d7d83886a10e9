"""Code that the adapters share: the run's steps as a trainer's loader, and numbers that differ between ranks as state."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast import progress
from holdfast.errors import BadInput
from holdfast.train.data.loader import Collate, MapDataset, divided, size
from holdfast.train.iterators import Batch, Batches
from holdfast.train.run import Run


def unsupported(name: str, reason: str) -> BadInput:
    """Return the error for an option of a trainer that prevents exact recovery."""
    return BadInput(f"a protected Trainer does not support {name}: {reason}.")


class RunLoader:
    """A loader over the steps of a run for a trainer that owns its loop; it is iterated over once per epoch.

    Nothing is fetched ahead: the boundary after a step comes when the trainer asks for the next batch, after all that it
    does at the end of a step or of an epoch, and is saved with it.
    """

    def __init__(self, dataset: MapDataset, global_batch: int, parts: int = 1) -> None:
        self.dataset, self.global_batch = dataset, global_batch
        self.parts = parts
        """Batches per step; the trainer steps its optimizer after this number."""
        samples = size(dataset)
        self.steps_per_epoch = samples // global_batch
        if not self.steps_per_epoch:
            raise BadInput(f"{samples} samples do not fill one global batch of {global_batch}: make it smaller.")
        self.last: Batch | None = None
        """The step that is being trained."""
        self._batches: Batches | None = None
        self._gather: Callable[[], None] | None = None

    def begin(self, batches: Batches, gather: Callable[[], None]) -> None:
        """Hand out `batches` from now on, and call `gather` before every boundary."""
        self._batches, self._gather = batches, gather

    def collate(self, collate: Collate) -> Collate:
        """Return a collate function that splits a rank's share of a step into `parts` batches."""
        return CollateParts(collate, self.parts)

    def end(self, run: Run) -> None:
        """Pass the boundary after the last step of the trainer; a trainer that stops early ends the run here."""
        if self._batches is not None and self.last is not None and self.last.step + 1 < len(self._batches):
            run.stop()
        self._next()

    def __len__(self) -> int:
        return self.steps_per_epoch * self.parts

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._next()) is not None:
            yield from batch.data
            if batch.cursor + 1 == self.steps_per_epoch:
                return

    def _next(self) -> Batch | None:
        if self._batches is not None and self._gather is not None:
            self._gather()
            self.last = next(self._batches, None)
        return self.last


class CollateParts:
    """Collates samples into `parts` batches. A class, so that it can be sent to loader processes."""

    def __init__(self, collate: Collate, parts: int) -> None:
        self._collate, self._parts = collate, parts

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [self._collate(samples[part.start : part.stop]) for part in divided(len(samples), self._parts)]


class RankNumbers:
    """Numbers that differ between ranks, such as a running loss, gathered at every boundary.

    Rank 0 writes the snapshot, so these few numbers are gathered before it is taken, in one small collective per step. On
    a resume each rank gets its own back; with another number of ranks, the mean of all.
    """

    def __init__(self, rank: int, world_size: int, take: Callable[[], torch.Tensor]) -> None:
        self._rank, self._world_size, self._take = rank, world_size, take
        self._all = torch.zeros(world_size, 0, dtype=torch.float64)

    def gather(self) -> None:
        """Gather the numbers of all ranks."""
        own = self._take().to(torch.float64)
        if self._world_size == 1 or not dist.is_initialized():
            self._all = own[None].clone()
            return
        progress.here.count_post()  # from here on this rank can only wait for its peers
        rows = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(rows, own)
        self._all = torch.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of all ranks at the boundary, one row per rank."""
        return {"all": self._all}

    def own(self, state: Mapping[str, Any]) -> torch.Tensor:
        """Return the numbers with which this rank resumes."""
        rows: torch.Tensor = state["all"]
        return rows[self._rank] if len(rows) == self._world_size else rows.mean(dim=0)
