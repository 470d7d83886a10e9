"""Code that the trainer adapters share: a loader that yields a run's batches, and per-rank numbers in snapshots."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast import progress
from holdfast.errors import BadInput
from holdfast.train.data.dataset import MapDataset, size
from holdfast.train.data.loader import Collate, divided
from holdfast.train.iterators import Batch, Batches
from holdfast.train.run import Run


def unsupported(name: str, reason: str) -> BadInput:
    """Return the error that a protected Trainer does not support the option `name`, with the reason."""
    return BadInput(f"a protected Trainer does not support {name}: {reason}.")


def check_recovery(run: Run) -> None:
    """Raise BadInput if `run` recovers without restarting the survivors, which a protected Trainer does not support."""
    if run.is_live:
        raise unsupported("live recovery", "survivors cannot repair its collectives; choose --recovery restart")


class RunLoader:
    """A data loader that gives a trainer the batches of a run; the trainer iterates over it once per epoch.

    It never prefetches. The trainer asks for the next batch only when all its work for a step or an epoch is done, so
    each request marks a step boundary, at which a snapshot may be saved."""

    def __init__(self, dataset: MapDataset, global_batch: int, parts: int = 1) -> None:
        self.dataset, self.global_batch = dataset, global_batch
        self.parts = parts  # batches per optimizer step
        samples = size(dataset)
        self.steps_per_epoch = samples // global_batch
        if not self.steps_per_epoch:
            raise BadInput(f"{samples} samples do not fill one global batch of {global_batch}: make it smaller.")
        self.last: Batch | None = None  # the step that is being trained; None before the first and after the last
        self._batches: Batches | None = None
        self._gather: Callable[[], None] | None = None

    def begin(self, batches: Batches, gather: Callable[[], None]) -> None:
        """Take batches from `batches` from now on. Before each, call `gather`, which collects the numbers of all ranks."""
        self._batches, self._gather = batches, gather

    def end(self, run: Run) -> None:
        """Tell the run that the trainer's last step is complete. If planned steps are left, also stop the run."""
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
    """A picklable collate function that splits the samples of a step into `parts` batches, one per backward pass."""

    def __init__(self, collate: Collate, parts: int) -> None:
        self._collate, self._parts = collate, parts

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [self._collate(samples[part.start : part.stop]) for part in divided(len(samples), self._parts)]


class RankNumbers:
    """Numbers that differ between ranks, such as a running loss, saved as part of a snapshot.

    Only rank 0 saves such numbers, so `gather` collects the results of `take` from all ranks, with one small all-gather
    per step. After a resume each rank gets its own numbers back, or the mean if the world size changed."""

    def __init__(self, rank: int, world_size: int, take: Callable[[], torch.Tensor]) -> None:
        self._rank, self._world_size, self._take = rank, world_size, take
        self._all = torch.zeros(world_size, 0, dtype=torch.float64)
        self._is_restored = False  # no step was trained since the numbers were restored

    def gather(self) -> None:
        """Collect the numbers of all ranks, such as running losses, with one all-gather.

        The first call after a restore keeps the restored numbers, which may come from more or fewer ranks."""
        if self._is_restored:
            self._is_restored = False
            return
        own = self._take().to(torch.float64)
        if self._world_size == 1 or not dist.is_initialized():
            self._all = own[None].clone()
            return
        progress.here.count_post()  # from here on this rank can only wait for its peers
        rows = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(rows, own)
        self._all = torch.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers that the last `gather` collected, such as running losses, with one row per rank."""
        return {"all": self._all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved numbers of all ranks."""
        self._all, self._is_restored = state["all"], True

    def own(self) -> torch.Tensor:
        """Return this rank's row of the restored numbers, or the mean of all rows if the world size changed."""
        return self._all[self._rank] if len(self._all) == self._world_size else self._all.mean(dim=0)
