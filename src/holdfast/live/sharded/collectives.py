"""The collectives of a sharded run, numbered within each step, so that a lost worker's part of a step can be repeated.

All ranks make the same number of collectives in a step, in the same order. Each is made by all ranks, or by the ranks of
one team: with hybrid sharding, those that hold one replica of the model, or those that hold the same shard. A collective
completes on no rank before all ranks of its team have begun it. The worker that replaces a lost worker computes the step
from its beginning. Where other ranks of the team have completed a collective, they send it the result, as the lost
worker had received it. A survivor that the loss has interrupted gets a result in the same way.

gloo computes a reduce-scatter as an all-reduce, so this module uses the all-reduce, with the same bits. Every rank then
also has the reduced gradients of the previous rank, which that rank's replacement needs. Tensors on a GPU pass through
host memory.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, GatherOptions, ReduceOp

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.processor_wait import ProcessorWait
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


class Operation(Protocol):
    """One collective of a step. `ring` has the places of the ranks in the team that makes it, and so has `needy`."""

    def run(self, link: Link, ring: Ring) -> None:
        """Carry out the collective together with the team."""

    def run_again(self, link: Link, ring: Ring) -> bool:
        """Repeat a collective that this rank has completed; return False if the result differs from the first one."""

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        """Return True if the ranks other than `needy`, which have completed the collective, have the result of `needy`."""

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        """Send the result of this completed collective to the ranks `needy`. The team calls this, including `needy`."""

    def release(self) -> None:
        """Free the memory that only `run_again` needs. Called when the team has completed the collective."""


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
        raise AssertionError("an all-gather can be served")

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
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
        if self._values is None:
            raise restart_needed(
                "ranks next to each other are lost, and with them the reduced gradients of one of them"
            )
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

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        return all(ring.at(rank).next not in needy for rank in needy)

    def serve(self, link: Link, ring: Ring, needy: Sequence[int]) -> None:
        for rank in needy:
            place = ring.at(rank)
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
        raise AssertionError("an all-reduce can be served")

    def can_serve(self, ring: Ring, needy: Sequence[int]) -> bool:
        return True

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
    """The collectives of one rank. When a collective fails, `recover` is called.

    It returns True if the collective needs no other rank any more; otherwise the collective is repeated. `ring` has the places of all ranks, and `link` connects them."""

    link: Link
    ring: Ring
    recover: Callable[[], bool]
    world: Team = field(init=False)
    log: list[tuple[Team, Operation]] = field(default_factory=list)  # completed in this step, in order
    optimizer_steps: int = 0  # in this step
    seconds: float = (
        0.0  # in collectives, mostly waiting for other ranks, not for a processor; `take_waited` sets it back
    )
    current: Operation | None = None  # the collective that this rank carries out now
    _processor_wait: ProcessorWait = field(default_factory=ProcessorWait)
    _has_ended: bool = False  # this step's collectives have: other ranks are in the next step
    _teams: dict[tuple[int, ...], Team] = field(default_factory=dict)
    _newest: dict[Team, Operation] = field(default_factory=dict)  # the one that other ranks of the team may lack
    _contributions: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _completed: Mapping[int, int] = field(default_factory=dict)  # by rank, at the last recovery in this step

    def __post_init__(self) -> None:
        self.world = Team(tuple(range(self.ring.size)), self.ring, self.link)

    @property
    def teams(self) -> list[Team]:
        """The teams of some of the ranks that include this rank, in the order in which they were made."""
        return [*self._teams.values()]

    def team(self, members: tuple[int, ...], connect: Callable[[Team], None]) -> Team:
        """Return the team of the ranks `members`, which include this rank; call `connect` with a new one."""
        if members == self.world.members:
            return self.world
        if members not in self._teams:
            ring = Ring(members.index(self.ring.rank), len(members))
            self._teams[members] = Team(members, ring, self.link.part())
            connect(self._teams[members])
        return self._teams[members]

    def begin_step(self) -> None:
        """Forget the collectives of the previous step."""
        self.log, self.optimizer_steps, self._completed, self._has_ended = [], 0, {}, False
        self._contributions.clear()

    def end_updates(self) -> None:
        """Count an optimizer step: from here on, parameters differ from those at the beginning of the step."""
        self.optimizer_steps += 1
        self._contributions.clear()

    def gather(
        self, output: torch.Tensor, values: torch.Tensor, key: Hashable = None, team: Team | None = None
    ) -> None:
        """All-gather `values` of all ranks into `output`. Calls with the same `key` in a step pass the same values."""
        contribution = None if key is None else self._contributions.get(key)
        if contribution is None:
            contribution = values.detach().to("cpu", copy=True).reshape(-1)
            if key is not None:
                self._contributions[key] = contribution
        self.run(Gather(output, contribution), team)

    def run(self, operation: Operation, team: Team | None = None) -> None:
        """Carry out the next collective, of all ranks or of a `team`. If a worker is lost meanwhile, recover first."""
        if self._has_ended:
            raise restart_needed("a worker was lost in a collective operation after the optimizer's step")
        team = team or self.world
        self.current = operation
        progress.here.count_post()
        began, waited = perf_counter(), self._processor_wait.seconds()
        while True:
            try:
                if self._has_completed(team, len(self.log)):
                    self._settle(operation, team, len(self.log))
                else:
                    operation.run(team.link, team.ring)
                break
            except GroupBroken:
                if self.recover():
                    self._has_ended = True
                    break
        self.seconds += perf_counter() - began - (self._processor_wait.seconds() - waited)
        self.current = None
        if team in self._newest:
            self._newest[team].release()  # all ranks of the team have begun this collective
        self._newest[team] = operation
        self.log.append((team, operation))

    def serve(self, completed: Mapping[int, int]) -> None:
        """Send other ranks the results of this step's collectives that this rank has completed and they have not.

        `completed` has the number of collectives that each rank has completed in this step."""
        self._completed = completed
        for number, (team, operation) in enumerate(self.log):
            if self._needy(team, number):
                self._settle(operation, team, number)

    def _has_completed(self, team: Team, number: int) -> bool:
        return any(self._completed.get(rank, 0) > number for rank in team.members)

    def _needy(self, team: Team, number: int) -> list[int]:
        return [place for place, rank in enumerate(team.members) if self._completed[rank] <= number]

    def _settle(self, operation: Operation, team: Team, number: int) -> None:
        """Complete a collective of this step that some ranks of the team have completed, and others have not."""
        needy = self._needy(team, number)
        if operation.can_serve(team.ring, needy):
            operation.serve(team.link, team.ring, needy)
        elif team.ring.rank in needy:
            operation.run(team.link, team.ring)
        elif not operation.run_again(team.link, team.ring):
            raise restart_needed("a replacement computed other values than the worker that it replaces")


def _allreduce_options(op: Any) -> Any:
    options: Any = AllreduceOptions()
    options.reduceOp = op if op is not None else ReduceOp.SUM
    return options


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
