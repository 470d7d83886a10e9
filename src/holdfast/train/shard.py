"""A rank's part of a data set that is evaluated: contiguous, and the parts of all ranks are the whole.

Where a run recovers live the ranks may change between two evaluations, so the parts are found anew whenever somebody
asks how long ours is, as a DataLoader does before every pass. Where ours begins lies in shared memory: processes that
load for an earlier pass read the new place.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset

from holdfast import progress
from holdfast.train.data.loader import Dataset, divided, size


class Shard(TorchDataset[Any]):
    """This rank's part of a data set, itself one: for a DataLoader, or to go through."""

    def __init__(self, dataset: Dataset, place: Callable[[], tuple[int, int]]) -> None:
        self._dataset, self._samples = dataset, size(dataset)
        self._place: Callable[[], tuple[int, int]] | None = place
        self._owner = os.getpid()
        self._bounds = torch.zeros(2, dtype=torch.int64).share_memory_()  # the first of ours, and how many there are
        self._divide()

    def __len__(self) -> int:
        self._divide()
        return int(self._bounds[1])

    def __getitem__(self, index: int) -> Any:
        progress.here.evaluates()
        return self._dataset[self._number(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        progress.here.evaluates()
        numbers = [self._number(index) for index in indices]
        several = getattr(self._dataset, "__getitems__", None)
        return list(several(numbers)) if several else [self._dataset[number] for number in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": None}  # for a process that is not forked: it is told where ours begins

    def _divide(self) -> None:
        if self._place and os.getpid() == self._owner:
            rank, of = self._place()
            ours = divided(self._samples, of)[rank]
            self._bounds[0], self._bounds[1] = ours.start, len(ours)

    def _number(self, index: int) -> int:
        first, count = self._bounds.tolist()
        if not -count <= index < count:
            raise IndexError(f"there is no sample {index} in a part of {count}")
        return int(first + index % count)
