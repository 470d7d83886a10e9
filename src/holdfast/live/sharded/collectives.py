"""The collectives of a sharded run, numbered within each step, so that a lost worker's part of a step can be repeated.

All ranks make the same number of collectives in a step, in the same order. Each is made by all ranks, or by the ranks of
one team: with hybrid sharding, those that hold one replica of the model, or those that hold the same shard. A collective
completes on no rank before all ranks of its team have begun it. The worker that replaces a lost worker computes the step
from its beginning. Where other ranks of the team have completed a collective, they send it the result, as the lost
worker had received it. A survivor that the loss has interrupted gets a result in the same way.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.live.sharded.host_memory import HostMemory
from holdfast.live.sharded.operations import Gather, Operation, Reduce, Ring, Team, nothing
from holdfast.live.sharded.spare_work import SpareWork
from holdfast.processor_wait import ProcessorWait
from holdfast.progress import restart_needed


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
    spare: SpareWork = field(default_factory=SpareWork)  # done while collectives wait, with results of the step before
    seconds: float = 0.0  # in collectives, mostly waiting for other ranks, not a processor; `take_waited` resets it
    current: Operation | None = None  # the collective that this rank carries out now
    _processor_wait: ProcessorWait = field(default_factory=ProcessorWait)
    _has_ended: bool = False  # this step's collectives have: other ranks are in the next step
    _teams: dict[tuple[int, ...], Team] = field(default_factory=dict)
    _newest: dict[Team, Operation] = field(default_factory=dict)  # the one that other ranks of the team may lack
    _contributions: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _completed: Mapping[int, int] = field(default_factory=dict)  # by rank, at the last recovery in this step
    _gathered: HostMemory = field(default_factory=HostMemory)  # of this rank's contributions
    _reduced: HostMemory = field(default_factory=HostMemory)  # of the results of reduce-scatters
    _has_reduced: bool = False  # in this step
    _later: list[Callable[[], None]] = field(default_factory=list)  # called in the next collective

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

    @property
    def reductions(self) -> list[Reduce]:
        """The reduce-scatters of all ranks in this step, in order."""
        return [made for team, made in self.log if team is self.world and isinstance(made, Reduce)]

    def begin_step(self) -> None:
        """Forget the collectives of the previous step."""
        self.catch_up()
        self.log, self.optimizer_steps, self._completed, self._has_ended = [], 0, {}, False
        self._contributions.clear()
        self._gathered.reclaim()
        self._has_reduced = False

    def end_updates(self) -> None:
        """Count an optimizer step: from here on, parameters differ from those at the beginning of the step."""
        self.optimizer_steps += 1
        self._contributions.clear()

    def gather(
        self, output: torch.Tensor, values: torch.Tensor, key: Hashable = None, team: Team | None = None
    ) -> None:
        """All-gather `values` of all ranks into `output`. Calls with the same `key` in a step pass the same values."""
        values = values.detach().reshape(-1)
        kept = None if key is None else self._contributions.get(key)
        if kept is not None:
            values = kept
        else:
            kept = self._gathered.take(values.numel(), values.dtype)
        self.run(Gather(output, values, kept), team)
        if key is not None:
            self._contributions[key] = kept

    def reduce(self, output: torch.Tensor, values: torch.Tensor, op: Any, team: Team | None = None) -> None:
        """Reduce the `values` of all ranks with the operation `op`, and write this rank's part to `output`."""
        if not self._has_reduced:
            self.spare.finish()
            self._reduced.reclaim()
            self._has_reduced = True
        reduction = Reduce(output, values, op, self._reduced)
        self.run(reduction, team)
        self.later(reduction.keep)

    def later(self, act: Callable[[], None]) -> None:
        """Call `act` while the next collective waits for other ranks, or at the next `catch_up`."""
        self._later.append(act)

    def catch_up(self) -> None:
        """Do now what was postponed with `later`."""
        acts, self._later = self._later, []
        for act in acts:
            act()

    def _use_wait(self, work: Any) -> None:
        self.catch_up()
        if not is_in_torch_dispatch_mode():  # such as selective checkpointing, which keeps track of all operations
            self.spare.do_until(work.is_completed)

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
                    operation.run(team.link, team.ring, self._use_wait)
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
            operation.run(team.link, team.ring, nothing)
        elif not operation.run_again(team.link, team.ring):
            raise restart_needed("a replacement computed other values than the worker that it replaces")
