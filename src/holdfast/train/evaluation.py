"""Evaluation on all ranks: each rank's part of a dataset, and sums and weighted means over the ranks.

Numbers go through the workers' store and not through a collective: they are few, and a rank that waits for a lost rank
finds out. Floats are added without rounding in between, so a sum does not depend on the order of the ranks.

With live recovery the ranks may change between two evaluations. So a part is computed again whenever its length is asked
for, as a DataLoader does before every pass. Its bounds are in shared memory, where loader processes of an earlier pass
read them.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import Dataset as TorchDataset

from holdfast import progress
from holdfast.distributed.ranks import Changed, Ranks
from holdfast.errors import BadInput
from holdfast.live.recovery import LiveRecovery
from holdfast.progress import restart_needed
from holdfast.train.data.loader import MapDataset, divided, size


class DatasetShard(TorchDataset[Any]):
    """This rank's contiguous part of a dataset, itself a dataset."""

    def __init__(self, dataset: MapDataset, place: Callable[[], tuple[int, int]]) -> None:
        self._dataset, self._samples = dataset, size(dataset)
        self._place: Callable[[], tuple[int, int]] | None = place
        self._owner = os.getpid()
        self._bounds = torch.zeros(2, dtype=torch.int64).share_memory_()  # the first of ours, and how many there are
        self._divide()

    def __len__(self) -> int:
        self._divide()
        return int(self._bounds[1])

    def __getitem__(self, index: int) -> Any:
        progress.here.count_evaluation()
        return self._dataset[self._number(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        progress.here.count_evaluation()
        numbers = [self._number(index) for index in indices]
        get_items = getattr(self._dataset, "__getitems__", None)
        return list(get_items(numbers)) if get_items else [self._dataset[number] for number in numbers]

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


MOST = 1 << 16  # numbers at once: the store is for words, not for gradients
Number = int | float
Leaf = Number | list[Number]


class Together:
    """Combines numbers of all ranks; all ranks make the same calls, in the same order."""

    def __init__(self, world: Ranks, live: LiveRecovery | None) -> None:
        self._world, self._live = world, live
        self._at, self._calls = -2, 0
        self._own: Store | None = None
        self._told: deque[tuple[int, str]] = deque()
        self._division: tuple[int, tuple[int, ...]] | None = None  # when data were divided last, and among whom

    @property
    def members(self) -> tuple[int, ...]:
        """The members that take part now."""
        return self._live.members if self._live else tuple(range(self._world.size))

    def place(self) -> tuple[int, int]:
        """Return the rank and world size by which datasets are divided for evaluation now."""
        if self._is_in_reserve:
            return 0, 1  # until this worker is a member; the data are divided again before they are evaluated
        self._division = progress.here.boundaries, self.members
        return self.members.index(self._me), len(self.members)

    def sum(self, value: Any) -> Any:
        """Return the sum over all ranks of a number, a tensor, or each of them in a structure."""
        return self._combined(value, 1.0, lambda number, _: number, lambda total, _: total)

    def mean(self, value: Any, weight: float) -> Any:
        """Return the mean over all ranks, weighted by `weight`."""
        if not weight >= 0 or math.isinf(weight):
            raise BadInput(f"a rank cannot have the weight {weight} in a mean: give how many samples its value is of")
        return self._combined(value, float(weight), _weighed, lambda total, weights: total / weights)

    def _combined(
        self,
        value: Any,
        weight: float,
        part: Callable[[Number, float], Number],
        whole: Callable[[Number, float], Number],
    ) -> Any:
        leaves, form = tree_flatten(value)
        message = json.dumps([str(form), weight, [_spoken(leaf) for leaf in leaves]])
        totals = json.loads(self._exchanged(message, lambda messages: json.dumps(_added(messages, part, whole))))
        return tree_unflatten([_as(leaf, total) for leaf, total in zip(leaves, totals, strict=True)], form)

    def _exchanged(self, message: str, combine: Callable[[list[str]], str]) -> str:
        """Return what the first member computes with `combine` from the values of all members."""
        members, me = self.members, self._me
        if self._live and self._division and self._division[0] == progress.here.boundaries != 0:
            self._check_division(self._division[1])
        topic = self._topic()
        progress.here.count_evaluation()
        if self._is_in_reserve:  # the others did this long ago, before the first window
            return replace(self._world, store=self._store).wait_for(f"{topic}/all")
        progress.here.count_post()  # the first waits for all, and all for it
        self._tell(f"{topic}/{me}", message)
        if me == members[0]:
            total = combine([self._hear(f"{topic}/{member}", member) for member in members])
            self._tell(f"{topic}/all", total)
            return total
        return self._hear(f"{topic}/all", members[0])

    def _check_division(self, members: tuple[int, ...]) -> None:
        if members != self.members:
            raise restart_needed("a rank was lost or joined while its part of a data set was evaluated")

    def _topic(self) -> str:
        """Return the key of this call: the step and the number of the call in it, so that joining ranks agree on it."""
        at = -1 if progress.here.step is None else progress.here.step
        self._calls = self._calls + 1 if at == self._at else 1
        self._at = at
        while self._told and self._told[0][0] < at - 1:  # no rank reads these any more, not even a joining one
            self._store.delete_key(self._told.popleft()[1])
        return f"together/{at}/{self._calls}"

    def _tell(self, key: str, value: str) -> None:
        self._store.set(key, value)
        if self._at >= 0:  # a joining rank reads the results from before the first step
            self._told.append((self._at, key))

    def _hear(self, key: str, member: int) -> str:
        """Wait for the value of a member; a restart is needed if the member was lost before it posted one."""
        try:
            return replace(self._world, store=self._store, has_changed=lambda: self._is_lost(member)).wait_for(key)
        except Changed as error:
            raise restart_needed(
                "a rank is lost that has not said what came out of its part of an evaluation"
            ) from error

    def _is_lost(self, member: int) -> bool:
        if self._live is None:
            return False
        coordination = self._live.coordination
        return coordination.newest.number > coordination.number and coordination.newest.has_lost([member])

    @property
    def _is_in_reserve(self) -> bool:
        return self._live is not None and self._live.is_joining

    @property
    def _me(self) -> int:
        return self._live.member if self._live else self._world.rank

    @property
    def _store(self) -> Store:
        if self._live is None:
            return self._world.store
        if self._own is None:  # that of the world is another one after every loss
            self._own = PrefixStore("evaluation", self._live.coordination.store())
        return self._own


def _added(
    messages: list[str], part: Callable[[Number, float], Number], whole: Callable[[Number, float], Number]
) -> list[Leaf]:
    ranks = [json.loads(message) for message in messages]
    if len({form for form, _, _ in ranks}) > 1 or len({json.dumps(_sizes(leaves)) for _, _, leaves in ranks}) > 1:
        raise BadInput("the ranks bring different things together: call run.sum and run.mean alike on all ranks")
    counting = [(weight, leaves) for _, weight, leaves in ranks if weight]
    if not counting:
        raise BadInput("no rank has a weight in this mean: give how many samples its value is of")
    weights = _exact([weight for weight, _ in counting])

    def combined(values: list[tuple[float, Number]]) -> Number:
        return whole(_exact([part(value, weight) for weight, value in values]), float(weights))

    total: list[Leaf] = []
    for number, leaf in enumerate(counting[0][1]):
        if isinstance(leaf, list):
            columns = range(len(leaf))
            total.append([combined([(weight, leaves[number][i]) for weight, leaves in counting]) for i in columns])
        else:
            total.append(combined([(weight, leaves[number]) for weight, leaves in counting]))
    return total


def _weighed(value: Number, weight: float) -> Number:
    return value * weight


def _sizes(leaves: list[Leaf]) -> list[int]:
    return [len(leaf) if isinstance(leaf, list) else -1 for leaf in leaves]


def _exact(values: list[Number]) -> Number:
    """Return the sum, rounded once."""
    if all(isinstance(value, int) for value in values):
        return sum(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or too large a number
        return sum(map(float, values))


def _spoken(leaf: Any) -> Leaf:
    """Return a number, or the numbers of a tensor, as JSON values, which keep every bit of a float."""
    if isinstance(leaf, torch.Tensor):
        if leaf.numel() > MOST:
            raise BadInput(
                f"a tensor of {leaf.numel()} numbers is too large to be brought together: give at most {MOST}"
            )
        if not leaf.is_complex():
            values: list[Number] = leaf.detach().flatten().tolist()
            return [int(value) if isinstance(value, bool) else value for value in values]
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, bool | int):
        return int(leaf)
    if isinstance(leaf, float):
        return leaf
    raise BadInput(f"a {type(leaf).__name__} cannot be brought together: give numbers or tensors of them")


def _as(leaf: Any, total: Leaf) -> Any:
    """Convert a combined value to the type of the caller's: a number, or a tensor of the same shape and device."""
    if not isinstance(leaf, torch.Tensor):
        return total
    assert isinstance(total, list)
    is_whole = not leaf.is_floating_point() and all(isinstance(value, int) for value in total)
    kind = leaf.dtype if leaf.is_floating_point() else torch.int64 if is_whole else torch.get_default_dtype()
    return torch.tensor(total, dtype=kind).reshape(leaf.shape).to(leaf.device)
