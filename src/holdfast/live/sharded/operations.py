"""The collectives of a step, and the results that each rank keeps of them for a replacement of a lost worker.

gloo computes a reduce-scatter as an all-reduce, so this module uses the all-reduce, with the same bits. Every rank then
also has the reduced gradients of the previous rank, which that rank's replacement needs. Tensors on a GPU pass through
host memory.

What a rank keeps of a result is copied while the next collective waits for other ranks.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, GatherOptions, ReduceOp

from holdfast.distributed.gloo_link import Link
from holdfast.live.sharded.host_memory import HostMemory
from holdfast.progress import restart_needed

_REDUCIBLE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
}


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks as a ring, in which each rank keeps a copy of the previous rank's shards.

    The next rank is `apart` ranks further. If that number has a common divisor with `size`, there are several rings."""

    rank: int
    size: int
    apart: int = 1

    def at(self, rank: int) -> "Ring":
        """Return the same ring as another `rank` sees it."""
        return Ring(rank, self.size, self.apart)

    @property
    def next(self) -> int:
        return (self.rank + self.apart) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - self.apart) % self.size


def ranks_apart(size: int, nodes: int) -> int:
    """Return how far from each rank the rank with a copy of its shards is: with `nodes` of equal size, on the next node."""
    return 1 if size % nodes else size // nodes if nodes > 1 else 1


@dataclass(frozen=True, slots=True, eq=False)
class Team:
    """Ranks that make collectives together over `link`. `ring` has this rank's place among the `members`."""

    members: tuple[int, ...]
    ring: Ring
    link: Link

    @property
    def name(self) -> str:
        return "-".join(map(str, self.members))


Meanwhile: TypeAlias = Callable[[Any], None]
"""A function that uses the time until a collective is completed. Its argument is the collective's `Work`."""


class Operation(Protocol):
    """One collective of a step. `ring` has the places of the ranks in the team that makes it, and so has `needy`."""

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        """Carry out the collective together with the team. Once it has begun, call `meanwhile` with its `Work`."""

    def run_again(self, link: Link, ring: Ring) -> bool:
        """Repeat a collective that this rank has completed; return False if the result differs from the first one."""

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        """Return True if the ranks other than `needy`, which have completed the collective, have the result of `needy`."""

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        """Send the result of this completed collective to the ranks `needy`. The team calls this, including `needy`."""

    def release(self) -> None:
        """Free the memory that only `run_again` needs. Called when the team has completed the collective."""


class Gather:
    """An all-gather of the 1-D tensor `values` into `output`.

    The values must not change during the step. `kept` has a copy of them, or gets one before the all-gather ends."""

    def __init__(self, output: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> None:
        self._output: torch.Tensor | None = output
        self._values, self._contribution = values, kept

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        output = self._output
        assert output is not None
        if output.is_cuda or not output.is_contiguous():
            self._keep()
            gathered = self._contribution.new_empty(output.numel())
        else:
            gathered = output.view(-1)
        work = link.post("_allgather_base", gathered, self._values)
        self._keep()
        meanwhile(work)
        link.wait(work)
        if gathered.data_ptr() != output.data_ptr():
            output.copy_(gathered.view_as(output))

    def _keep(self) -> None:
        if self._values is not self._contribution:
            self._contribution.copy_(self._values)
            self._values = self._contribution

    def run_again(self, link: Link, ring: Ring) -> bool:
        raise AssertionError("an all-gather can be served")

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        return True

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        self._keep()
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

    def __init__(self, output: torch.Tensor, values: torch.Tensor, op: Any, memory: HostMemory) -> None:
        self._output: torch.Tensor | None = output
        self._values: torch.Tensor | None = values
        self._op, self._memory = op, memory
        self.memory, self.start = output.untyped_storage().data_ptr(), int(output.storage_offset())
        """The address of the memory that has `output`, and where in it `output` begins."""
        self._total: torch.Tensor | None = None  # the results of all ranks, until `keep`
        self._place: Ring | None = None
        self._own: torch.Tensor | None = None
        self._previous: torch.Tensor | None = None

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        assert self._output is not None
        self._total, self._place = self._reduced(link, meanwhile), ring
        self._output.copy_(self._total.view(ring.size, -1)[ring.rank].view_as(self._output))

    @property
    def own(self) -> torch.Tensor:
        """The result of this rank, as it was reduced."""
        self.keep()
        assert self._own is not None
        return self._own

    @property
    def previous(self) -> torch.Tensor:
        """The result of the previous rank."""
        self.keep()
        assert self._previous is not None
        return self._previous

    def keep(self) -> None:
        """Keep the results of this rank and of the previous rank, and no others."""
        if self._total is None or self._place is None:
            return
        results = self._total.view(self._place.size, -1)
        self._own, self._previous = (self._memory.take(results.shape[1], results.dtype) for _ in range(2))
        self._own.copy_(results[self._place.rank])
        self._previous.copy_(results[self._place.previous])
        self._memory.give_back(self._total)
        self._total = None

    def run_again(self, link: Link, ring: Ring) -> bool:
        if self._values is None:
            raise restart_needed(
                "ranks next to each other are lost, and with them the reduced gradients of one of them"
            )
        results = self._reduced(link, nothing).view(ring.size, -1)
        return same_bits(results[ring.rank], self.own) and same_bits(results[ring.previous], self.previous)

    def _reduced(self, link: Link, meanwhile: Meanwhile) -> torch.Tensor:
        assert self._values is not None
        total = self._memory.borrow(self._values.numel(), self._values.dtype)  # forgotten if the connection breaks
        total.copy_(self._values.view(-1))
        work = link.post("allreduce", [total], _allreduce_options(self._op))
        meanwhile(work)
        link.wait(work)
        return total

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        return all(ring.at(rank).next not in needy for rank in needy)

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        for rank in needy:
            place = ring.at(rank)
            if ring.rank == rank:
                self._receive(link, place)
            if ring.rank == place.next:
                link.do("send", [self.previous], rank, 0)
            if ring.rank == place.previous:
                link.do("send", [self.own], rank, 0)

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

    def run(self, link: Link, ring: Ring, meanwhile: Meanwhile) -> None:
        totals = [before.clone() for before in self._before]
        works = [link.post("allreduce", [total], _allreduce_options(self._op)) for total in totals]
        meanwhile(works[-1])
        for work in works:
            link.wait(work)
        self._results = totals
        self._write()

    def run_again(self, link: Link, ring: Ring) -> bool:
        raise AssertionError("an all-reduce can be served")

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        return True

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


def nothing(_: Any) -> None:
    """Do nothing while a collective waits."""


def _allreduce_options(op: Any) -> Any:
    options: Any = AllreduceOptions()
    options.reduceOp = op if op is not None else ReduceOp.SUM
    return options


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors in host memory, of the same dtype and size, have the same bits."""
    one, other = one.contiguous(), other.contiguous()
    return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


_memcmp = ctypes.CDLL(None).memcmp  # torch.equal takes twice as long, and does not distinguish 0.0 and -0.0
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
