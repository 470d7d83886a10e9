"""Evaluation on all ranks: each rank's part of a dataset, and sums and weighted means over the ranks.

Numbers are exchanged through the workers' store and not by a collective: they are few, and a rank that waits for a lost
rank notices the loss. Floats are added exactly and rounded once, so a sum does not depend on the order of the ranks.

With live recovery the ranks may change between two evaluations. So a rank's part of a dataset is computed again
whenever its length is requested, as a DataLoader does before every pass. The bounds of the part are in shared memory,
where loader processes of an earlier pass can read them.

The ranks of a tensor-parallel group evaluate the same part together, and the value of the first of them counts.
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
from holdfast.distributed.ranks import Ranks, RanksChanged
from holdfast.errors import BadInput
from holdfast.live.recovery import LiveRecovery
from holdfast.progress import restart_needed
from holdfast.train.data.dataset import MapDataset, size
from holdfast.train.data.loader import divided


class DatasetShard(TorchDataset[Any]):
    """This rank's contiguous part of `dataset`. The function `place` returns the part's number, and that of all parts.

    `is_sharded` returns True if the models are, so that every forward needs all ranks, and all need as many batches."""

    def __init__(
        self, dataset: MapDataset, place: Callable[[], tuple[int, int]], is_sharded: Callable[[], bool]
    ) -> None:
        self._dataset, self._samples = dataset, size(dataset)
        self._place: Callable[[], tuple[int, int]] | None = place
        self._is_sharded: Callable[[], bool] | None = is_sharded
        self._owner = os.getpid()
        # The first sample of the part, its size, and the size that it may have with as many batches as on other ranks.
        self._bounds = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._divide()

    def __len__(self) -> int:
        self._divide()
        return int(self._bounds[1])

    def __getitem__(self, index: int) -> Any:
        progress.here.count_evaluation()
        return self._dataset[self._number(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        progress.here.count_evaluation()
        self._check_batch(indices)
        numbers = [self._number(index) for index in indices]
        get_all = getattr(self._dataset, "__getitems__", None)
        return list(get_all(numbers)) if get_all else [self._dataset[number] for number in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_place": None,
            "_is_sharded": None,
        }  # for a loader process that is not forked: it reads the bounds

    def _divide(self) -> None:
        if self._place and self._is_sharded and os.getpid() == self._owner:
            number, count = self._place()
            parts = divided(self._samples, count)
            fewest = min(map(len, parts)) if self._is_sharded() else len(parts[number])
            self._bounds[:] = torch.tensor([parts[number].start, len(parts[number]), fewest])

    def _check_batch(self, indices: list[int]) -> None:
        """Raise BadInput for a batch of one sample, if other ranks have one sample less: they have one batch less."""
        if len(indices) == 1 and (size := int(self._bounds[1])) > (fewest := int(self._bounds[2])):
            raise BadInput(
                f"this rank has {size} of {self._samples} samples and others have {fewest}, which makes one batch less: with a "
                "sharded model every forward needs all ranks, so this rank would wait forever. Give run.shard a multiple "
                "of the number of ranks, or choose another batch_size."
            )

    def _number(self, index: int) -> int:
        first, count, _ = self._bounds.tolist()
        if not -count <= index < count:
            raise IndexError(f"sample {index} is outside this part of {count} samples")
        return int(first + index % count)


MAX_NUMBERS = 1 << 16  # in one tensor: the store is for a few numbers, not for gradients
Number = int | float
Leaf = Number | list[Number]


class RankReducer:
    """A reducer that sums and averages numbers over all ranks. All ranks must make the same calls in the same order."""

    def __init__(self, ranks: Ranks, live: LiveRecovery | None) -> None:
        self._ranks, self._live = ranks, live
        self._step, self._calls = -2, 0
        self._own_store: Store | None = None
        self._posted: deque[tuple[int, str]] = deque()
        # The number of boundaries when a dataset was divided last, and the members then.
        self._division: tuple[int, tuple[int, ...]] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers that train now, and so take part in evaluations."""
        return self._live.members if self._live else tuple(range(self._ranks.size))

    def place(self) -> tuple[int, int]:
        """Return this worker's current part number and the number of parts, to divide a dataset for evaluation.

        The ranks of a tensor-parallel group have the same part."""
        if self._live is None:
            return self._ranks.share, self._ranks.shares
        if self._is_joining:
            return 0, 1  # until this worker is a member: the data are divided again before they are evaluated
        self._division = progress.here.boundaries, self.members
        return self.members.index(self._member), len(self.members)

    def sum(self, value: Any) -> Any:
        """Return the sum of `value`, a number, a tensor or a nested structure of these, over all ranks."""
        return self._reduce(value, 1.0, is_mean=False)

    def mean(self, value: Any, weight: float) -> Any:
        """Return the mean of `value` over all ranks, weighted by each rank's `weight`."""
        if not weight >= 0 or math.isinf(weight):
            raise BadInput(
                f"the weight of a rank in a mean must be 0 or more, and finite (got {weight}): give the number of samples "
                "behind its value."
            )
        return self._reduce(value, float(weight), is_mean=True)

    def _reduce(self, value: Any, weight: float, *, is_mean: bool) -> Any:
        leaves, structure = tree_flatten(value)
        message = json.dumps([str(structure), weight, [_to_json(leaf) for leaf in leaves]])
        reduced = json.loads(self._exchange(message, lambda messages: json.dumps(_reduced(messages, is_mean=is_mean))))
        return tree_unflatten([_like(leaf, result) for leaf, result in zip(leaves, reduced, strict=True)], structure)

    def _exchange(self, message: str, combine: Callable[[list[str]], str]) -> str:
        """Send `message` to the first worker, which calls `combine` on all messages; return the combined message."""
        members = self.members
        if self._live and self._division:
            boundaries, divided_among = self._division
            if boundaries == progress.here.boundaries != 0 and members != divided_among:
                raise restart_needed("a rank was lost or joined while its part of a dataset was evaluated")
        topic = self._topic()
        progress.here.count_evaluation()
        if self._is_joining:  # the members made this call before their first step
            return replace(self._ranks, store=self._store).wait_for(f"{topic}/all")
        progress.here.count_post()  # the first member waits for all members, and all of them for the first
        self._post(f"{topic}/{self._member}", message)
        if self._member == members[0]:
            messages = [self._wait_for(f"{topic}/{member}", member) for member in members]
            result = combine(messages[:: self._ranks.tensor_parallel])
            self._post(f"{topic}/all", result)
            return result
        return self._wait_for(f"{topic}/all", members[0])

    def _topic(self) -> str:
        step = -1 if progress.here.step is None else progress.here.step
        self._calls = self._calls + 1 if step == self._step else 1
        self._step = step
        while self._posted and self._posted[0][0] < step - 1:  # no rank reads these any more, not even a joining one
            self._store.delete_key(self._posted.popleft()[1])
        return f"evaluate/{step}/{self._calls}"

    def _post(self, key: str, value: str) -> None:
        self._store.set(key, value)
        if self._step >= 0:  # a joining worker reads what was posted before the first step, so that stays
            self._posted.append((self._step, key))

    def _wait_for(self, key: str, member: int) -> str:
        """Wait for the value that worker `member` posts under `key`; make the run restart if that worker is lost."""

        def is_lost() -> bool:
            if self._live is None:
                return False
            coordination = self._live.coordination
            return coordination.newest.number > coordination.number and coordination.newest.has_lost([member])

        try:
            return replace(self._ranks, store=self._store, has_changed=is_lost).wait_for(key)
        except RanksChanged as error:
            raise restart_needed("a rank was lost before it posted the result of its part of an evaluation") from error

    @property
    def _is_joining(self) -> bool:
        return self._live is not None and self._live.is_joining

    @property
    def _member(self) -> int:
        return self._live.member if self._live else self._ranks.rank

    @property
    def _store(self) -> Store:
        if self._live is None:
            return self._ranks.store
        if self._own_store is None:  # the store of `ranks` is another one after every loss
            self._own_store = PrefixStore("evaluation", self._live.coordination.store())
        return self._own_store


def _reduced(messages: list[str], *, is_mean: bool) -> list[Leaf]:
    """Return the sum or weighted mean of each number over all ranks' `messages`, without ranks of weight 0."""
    parts = [json.loads(message) for message in messages]
    shapes = {
        json.dumps([structure, [len(leaf) if isinstance(leaf, list) else -1 for leaf in leaves]])
        for structure, _, leaves in parts
    }
    if len(shapes) > 1:
        raise BadInput("the ranks called run.sum or run.mean with different values: make the same calls on all ranks.")
    weighted = [(weight, leaves) for _, weight, leaves in parts if weight]
    if not weighted:
        raise BadInput("all ranks have the weight 0 in this mean: give the number of samples behind each value.")
    total = float(_exact_sum([weight for weight, _ in weighted]))

    def reduce(values: list[Number]) -> Number:
        if not is_mean:
            return _exact_sum(values)
        return _exact_sum([value * weight for value, (weight, _) in zip(values, weighted, strict=True)]) / total

    results: list[Leaf] = []
    for ranks in zip(*(leaves for _, leaves in weighted), strict=True):  # the values of one leaf, by rank
        if isinstance(ranks[0], list):
            results.append([reduce(list(values)) for values in zip(*ranks, strict=True)])
        else:
            results.append(reduce(list(ranks)))
    return results


def _exact_sum(values: list[Number]) -> Number:
    if all(isinstance(value, int) for value in values):
        return sum(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or too large a number
        return sum(map(float, values))


def _to_json(leaf: Any) -> Leaf:
    """Convert a number, or a tensor (to a flat list), to values that JSON represents exactly."""
    if isinstance(leaf, torch.Tensor):
        if leaf.numel() > MAX_NUMBERS:
            raise BadInput(f"run.sum and run.mean take tensors of at most {MAX_NUMBERS} numbers (got {leaf.numel()}).")
        if not leaf.is_complex():
            values: list[Number] = leaf.detach().flatten().tolist()
            return [int(value) if isinstance(value, bool) else value for value in values]
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, bool | int):
        return int(leaf)
    if isinstance(leaf, float):
        return leaf
    raise BadInput(f"run.sum and run.mean take numbers and tensors of real numbers (got a {type(leaf).__name__}).")


def _like(leaf: Any, result: Leaf) -> Any:
    """Return `result` as a number or, if `leaf` is a tensor, as a tensor of the same shape and device."""
    if not isinstance(leaf, torch.Tensor):
        return result
    assert isinstance(result, list)
    is_whole = not leaf.is_floating_point() and all(isinstance(value, int) for value in result)
    dtype = leaf.dtype if leaf.is_floating_point() else torch.int64 if is_whole else torch.get_default_dtype()
    return torch.tensor(result, dtype=dtype).reshape(leaf.shape).to(leaf.device)
