"""The process group that DDP is given where a run recovers live: what it reduces can be finished by the survivors.

DDP posts a sum for every bucket of gradients while backward goes on, and gets the link's own operations back: in the
good case nothing is copied and nobody waits. When members are lost DDP's backward raises, once all gradients are
computed; then a bucket holds either its sum or nothing of use, and `param.grad` still holds what this rank computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions

from holdfast.distributed.gloo_link import CompletedWork, Link, ended


@dataclass(slots=True, eq=False)
class Sum:
    """One bucket of the backward under way."""

    values: torch.Tensor
    work: Any
    is_done: bool | None = None  # not known before the work has ended

    def settle(self) -> None:
        """What became of it; its work has ended, and frees its memory: pinning as much again for the next takes long."""
        if self.is_done is None:
            self.is_done, self.work = not _has_failed(self.work), CompletedWork([])


class RecoverableGroup(dist.ProcessGroup):
    """What DDP takes for a process group of a fixed size: it always divides by that, and `factor` mends it.

    Every call from torch's own code into Python holds a small step up, so there is one a bucket and no other: its rank
    and size torch knows by itself.
    """

    def __init__(self, link: Link, rank: int, size: int, all_posted: Callable[[], None]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # there is such a form
        self._link, self._size, self._all_posted = link, size, all_posted
        self.factor = 1.0
        self.sums: list[Sum] = []
        self._spent: list[Sum] = []
        self.given: dict[int, torch.Tensor] = {}
        """Sums that others had before we came: of the next backward, by the number of the bucket."""
        self._buckets: list[list[torch.Tensor]] = []
        self.watch: Callable[[Sequence[Any], int], None] | None = None  # as a replica's `watch` has it

    def getBackendName(self) -> str:
        return "holdfast"

    def lay_out(self, buckets: list[list[torch.Tensor]]) -> None:
        """Which parameters DDP's buckets hold, from now on."""
        self._buckets = buckets

    def empty(self, number: int) -> torch.Tensor:
        """Memory for the values of a bucket."""
        parameters = self._buckets[number]
        return parameters[0].new_empty(sum(each.numel() for each in parameters))

    def begin(self) -> None:
        """A backward comes whose gradients are summed."""
        self.sums = []

    def end(self) -> None:
        """The backward has all its sums.

        To free them takes its time, so on the host they are freed while the next ones are under way; those of a device
        at once, because gloo holds pinned memory for each.
        """
        self._spent, self.sums = [] if self.sums[0].values.is_cuda else self.sums, []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # as DDP calls it
        (values,) = tensors
        if self.watch and not self.sums:
            self.watch([], len(self._buckets))
        if self.given and (given := self.given.pop(len(self.sums), None)) is not None:
            self.sums.append(Sum(values.copy_(given), CompletedWork([values]), is_done=True))
        else:
            if self.factor != 1.0:
                values.mul_(self.factor)
            self.sums.append(Sum(values, self._link.post("allreduce", tensors, opts or AllreduceOptions())))
        work = self.sums[-1].work
        if self.watch:
            self.watch([each.work for each in self.sums], len(self._buckets))
        if len(self.sums) == len(self._buckets):
            self._spent = []
            self._all_posted()
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._link.post("broadcast", tensors, opts or BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._link.post("allgather", outputs, inputs)

    def has_failed(self) -> bool:
        """Whether a sum of the backward under way did not come."""
        return any(_has_failed(each.work) for each in self.sums)

    def drop(self, *, is_scaled: bool) -> None:
        """Leave the optimizer nothing to do: no gradients, or for a gradient scaler, which needs some, infinite ones.

        It takes these for an overflow: it keeps the optimizer from stepping, and scales less from then on.
        """
        for parameter in (each for bucket in self._buckets for each in bucket):
            if is_scaled and parameter.grad is not None:
                parameter.grad.fill_(torch.inf)
            else:
                parameter.grad = None

    def drain(self) -> None:
        """Wait for the end of every sum on a broken link, and see which were done."""
        ended([each.work for each in self.sums if each.is_done is None])
        for each in self.sums:
            each.settle()

    @torch.no_grad()
    def pack(self, number: int) -> None:
        """Put this rank's own gradients back into a bucket, as DDP and the factor made them."""
        for parameter, view in self._views(number):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1.0 / self._size, out=view)
        if self.factor != 1.0:
            self.sums[number].values.mul_(self.factor)

    def post_again(self, number: int) -> None:
        """Sum a bucket once more, among the members that there are now."""
        values = self.sums[number].values
        self.sums[number] = Sum(values, self._link.post("allreduce", [values]))

    @torch.no_grad()
    def unpack(self) -> None:
        """Put the sums into the gradients, as DDP would have."""
        for number in range(len(self.sums)):
            for parameter, view in self._views(number):
                if parameter.grad is not None:
                    parameter.grad.copy_(view)

    def _views(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters of a bucket, and where each lies in it: DDP keeps the strides of those that are dense."""
        place, values = 0, self.sums[number].values
        for parameter in self._buckets[number]:
            flat = values.narrow(0, place, parameter.numel())
            place += parameter.numel()
            dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
            yield (
                parameter,
                torch.as_strided(flat, parameter.shape, parameter.stride(), flat.storage_offset())
                if dense
                else flat.view(parameter.shape),
            )


def _has_failed(work: Any) -> bool:
    try:
        future = work.get_future()
        if future.done():
            future.value()
    except RuntimeError:
        return True
    return False
