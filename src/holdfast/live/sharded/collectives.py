"""The collectives of a sharded run, numbered within each step, so that a lost worker's part of a step can be repeated.

All ranks make the same collectives in the same order, and a collective completes on no rank before all ranks have begun
it. So after a loss, the survivors are in the same collective or one apart. The worker that replaces the lost worker
computes the step from its beginning. The survivors wait in a collective and serve the replacement until it has reached
that collective: they send it the results of the earlier collectives of the step, as the lost worker had received them.

gloo computes a reduce-scatter as an all-reduce, so this module uses the all-reduce, with the same bits. Every rank then
also has the reduced gradients of the previous rank, which that rank's replacement needs. Tensors on a GPU pass through
host memory.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, GatherOptions, ReduceOp

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken, Link

_REDUCIBLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
}


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks as a ring, in which each rank keeps a copy of the previous rank's shards."""

    rank: int
    size: int

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size


class Operation(Protocol):
    """One collective of a step."""

    def run(self, link: Link, ring: Ring) -> None:
        """Carry out the collective together with all ranks."""

    def run_again(self, link: Link, ring: Ring) -> bool:
        """Repeat a collective that this rank has completed; return False if the result differs from the first one."""

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        """Send the result of this completed collective to the ranks `needy`. All ranks call this, including `needy`."""

    def release(self) -> None:
        """Free the memory that only `run_again` needs. Called when all ranks have completed the collective."""


class Gather:
    """An all-gather of the 1-D tensor `contribution`, whose values must not change during the step, into `output`."""

    def __init__(self, output: torch.Tensor, contribution: torch.Tensor) -> None:
        self._output: torch.Tensor | None = output
        self._contribution = contribution

    def run(self, link: Link, ring: Ring) -> None:
        assert self._output is not None
        if self._output.is_contiguous() and not self._output.is_cuda:
            link.do("_allgather_base", self._output.view(-1), self._contribution)
        else:
            self._output.copy_(self._gathered(link, ring).view_as(self._output))

    def run_again(self, link: Link, ring: Ring) -> bool:
        self._gathered(link, ring)
        return True

    def _gathered(self, link: Link, ring: Ring) -> torch.Tensor:
        gathered = self._contribution.new_empty(ring.size * self._contribution.numel())
        link.do("_allgather_base", gathered, self._contribution)
        return gathered

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        for root in needy:
            options = GatherOptions()
            options.rootRank = root
            parts = list(self._contribution.new_empty(ring.size, self._contribution.numel()).unbind())
            link.do("gather", [parts] if ring.rank == root else [], [self._contribution], options)
            if ring.rank == root:
                assert self._output is not None
                self._output.copy_(torch.cat(parts).view_as(self._output))

    def release(self) -> None:
        self._output = None


class Reduce:
    """A reduce-scatter of `values` into `output`. It keeps the results of this rank and of the previous rank."""

    def __init__(self, output: torch.Tensor, values: torch.Tensor, op: Any) -> None:
        self._output: torch.Tensor | None = output
        self._values: torch.Tensor | None = values
        self._op = op
        self._own: torch.Tensor | None = None
        self._previous: torch.Tensor | None = None

    def run(self, link: Link, ring: Ring) -> None:
        assert self._output is not None
        self._own, self._previous = self._reduced(link, ring)
        self._output.copy_(self._own.view_as(self._output))

    def run_again(self, link: Link, ring: Ring) -> bool:
        own, previous = self._reduced(link, ring)
        assert self._own is not None
        assert self._previous is not None
        return _same_bits(own, self._own) and _same_bits(previous, self._previous)

    def _reduced(self, link: Link, ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._values is not None
        total = self._values.to("cpu", copy=True)
        link.do("allreduce", [total], _allreduce_options(self._op))
        chunks = total.view(ring.size, -1)
        return chunks[ring.rank].clone(), chunks[ring.previous].clone()

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        for rank in needy:
            place = Ring(rank, ring.size)
            if ring.rank == rank:
                self._receive(link, place)
            if ring.rank == place.next:
                link.do("send", [self._previous], rank, 0)
            if ring.rank == place.previous:
                link.do("send", [self._own], rank, 0)

    def _receive(self, link: Link, ring: Ring) -> None:
        assert self._output is not None
        self._own, self._previous = (torch.empty_like(self._output, device="cpu").flatten() for _ in range(2))
        link.do("recv", [self._own], ring.next, 0)
        link.do("recv", [self._previous], ring.previous, 0)
        self._output.copy_(self._own.view_as(self._output))

    def release(self) -> None:
        self._output = self._values = None


class AllReduce:
    """An all-reduce of `tensors` in place."""

    def __init__(self, tensors: Sequence[torch.Tensor], op: Any) -> None:
        if unknown := {tensor.dtype for tensor in tensors} - _REDUCIBLE:
            raise RuntimeError(f"gloo cannot all-reduce tensors of dtype {unknown.pop()}")
        self._tensors, self._op = tensors, op
        self._before = [tensor.to("cpu", copy=True) for tensor in tensors]
        self._results: list[torch.Tensor] = []

    def run(self, link: Link, ring: Ring) -> None:
        self._results = self._reduced(link)
        self._write()

    def run_again(self, link: Link, ring: Ring) -> bool:
        again = self._reduced(link)
        return all(_same_bits(result, before) for result, before in zip(again, self._results, strict=True))

    def _reduced(self, link: Link) -> list[torch.Tensor]:
        totals = [before.clone() for before in self._before]
        for total in totals:
            link.do("allreduce", [total], _allreduce_options(self._op))
        return totals

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = min(rank for rank in range(ring.size) if rank not in needy), 0
        self._results = self._results or [torch.empty_like(before) for before in self._before]
        for result in self._results:
            link.do("broadcast", [result], options)
        if ring.rank in needy:
            self._write()

    def _write(self) -> None:
        for tensor, result in zip(self._tensors, self._results, strict=True):
            tensor.copy_(result)

    def release(self) -> None:
        self._before = []
        self._tensors = ()


@dataclass(slots=True, eq=False)
class Collectives:
    """The collectives of one rank. When a collective fails, `recover` is called, and then the collective is repeated."""

    link: Link
    ring: Ring
    recover: Callable[[], None]
    log: list[Operation] = field(default_factory=list)  # completed in this step, in order
    last: Operation | None = None  # the newest completed one, which a rank behind may need again
    optimizer_steps: int = 0  # in this step
    _contributions: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _completed: Mapping[int, int] = field(default_factory=dict)  # by needy rank: collectives it had completed
    _until: int = 0  # the number of collectives of this step that are served to needy ranks

    def begin_step(self) -> None:
        """Forget the collectives of the previous step."""
        self.log, self.optimizer_steps, self._until = [], 0, 0
        self._contributions.clear()

    def end_updates(self) -> None:
        """Count an optimizer step: from here on, parameters differ from those at the beginning of the step."""
        self.optimizer_steps += 1
        self._contributions.clear()

    @property
    def is_catching_up(self) -> bool:
        """True if this rank replaces a lost worker, and has not reached the collective in which other ranks wait."""
        return self.ring.rank in self._completed and len(self.log) < self._until

    def gather(self, output: torch.Tensor, values: torch.Tensor, key: Hashable = None) -> None:
        """All-gather `values` of all ranks into `output`. Calls with the same `key` in a step pass the same values."""
        contribution = None if key is None else self._contributions.get(key)
        if contribution is None:
            contribution = values.detach().to("cpu", copy=True).reshape(-1)
            if key is not None:
                self._contributions[key] = contribution
        self.run(Gather(output, contribution))

    def run(self, operation: Operation) -> None:
        """Carry out the next collective. If a worker is lost meanwhile, recover first."""
        progress.here.count_post()
        while True:
            try:
                self._carry_out(operation)
                break
            except GroupBroken:
                self.recover()
        if self.last is not None:
            self.last.release()
        self.last = operation
        self.log.append(operation)

    def _carry_out(self, operation: Operation) -> None:
        if self.is_catching_up:
            operation.serve(self.link, self.ring, self._needy(len(self.log)))
        else:
            operation.run(self.link, self.ring)

    def _needy(self, number: int) -> list[int]:
        return sorted(rank for rank, completed in self._completed.items() if completed <= number)

    def serve(self, completed: Mapping[int, int], until: int) -> None:
        """Send the needy ranks the results of this step's collectives that this rank has completed, up to `until`.

        `completed` has the number of collectives that each needy rank has completed in this step."""
        self._completed, self._until = completed, until
        for number in range(min(len(self.log), until)):
            if needy := self._needy(number):
                self.log[number].serve(self.link, self.ring, needy)

    def repeat_last(self) -> bool:
        """Repeat the last collective, because another rank has not completed it; return False if the result differs."""
        assert self.last is not None
        return self.last.run_again(self.link, self.ring)


def _allreduce_options(op: Any) -> Any:
    options: Any = AllreduceOptions()
    options.reduceOp = op if op is not None else ReduceOp.SUM
    return options


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
