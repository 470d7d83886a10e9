"""Partial recovery of one rank of a sharded run: only the lost shard goes back, to the newest values that are left.

While nothing fails, this needs no traffic and no second copy of the optimizer's state. After a loss the survivors wait,
and the replacement puts its shard together: weights that the last forward gathered, of which the next rank has a copy
(see gathered_copies.py), and the optimizer's state from the newest snapshot. If the copy is lost too, the weights come
from that snapshot. Without a snapshot, the optimizer's state comes from the surviving rows. Then the replacement computes
the lost rank's part of the interrupted step, as under `replay`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast import progress
from holdfast.errors import BadInput, Corrupt, StorageFailed
from holdfast.events import Reassembled
from holdfast.live.sharded.gathered_copies import GatheredCopies
from holdfast.live.sharded.reassembly import LostShard, States, row_sums, state_names
from holdfast.live.sharded.shadow import OwnShards, check_own_objects
from holdfast.live.sharded.shard_plan import ShardPlan, ShardReport
from holdfast.live.sharded.shard_recovery import ShardedRecovery
from holdfast.progress import Phase, restart_needed
from holdfast.train.state.protected import Protected


@dataclass(slots=True, eq=False)
class PartialRecovery(ShardedRecovery):
    """One rank's part in the recovery of sharded models with `--recovery partial`."""

    _gathered: GatheredCopies = field(init=False)

    def route(self, modules: list[Any]) -> None:
        self._gathered = GatheredCopies(self.collectives, lambda: self._step)
        for number, module in enumerate(modules):
            self._gathered.watch(number, module)

    def _check(self, protected: Protected) -> None:
        check_own_objects(protected, self.strategy)

    def _begin_copies(self, own: OwnShards) -> None:
        if own.has_replicas:
            raise BadInput(
                "with hybrid sharding another replica has an exact copy of every shard, so --recovery partial brings nothing: "
                "choose --recovery replay."
            )
        # The first forward gathers what is to be copied. Any survivor will do, because there are also snapshots.
        ranks = range(self.size)
        self._ranks_with_copies = {rank: tuple(other for other in ranks if other != rank) for rank in ranks}

    def _step_hook(self, name: str) -> Any:
        return lambda *_: self.collectives.end_updates()

    def _describe_copies(self) -> str:
        size = self._gathered.nbytes / 1e6
        return f"every rank keeps a copy of the weights of another rank's shard, which takes about {size:.1f} MB."

    @property
    def _has_copies(self) -> bool:
        return True

    def _hand_over(self, plan: ShardPlan, reports: Mapping[int, ShardReport]) -> None:
        """Let each replacement put the shard of its rank together, and send it all other state."""
        own, rank = self._own, self.collectives.ring.rank
        assert own is not None
        if rank == plan.giver:
            self._check_marks_of_step()
            self._training.record_steps()
        rest = self._transfer(plan.giver, plan.joining, lambda: [own.capture_rest(), state_names(own)])
        gathered: dict[str, tuple[torch.Tensor, int]] = {}
        for joining in plan.joining:
            giver = self.collectives.ring.at(joining).next
            gathered = self._transfer(giver, (joining,), lambda: self._gathered_rows(own)) or gathered
        shard = LostShard(own, self._restore_shard(plan.step), gathered, rest[1]) if rank in plan.joining else None
        sums = self._row_sums(plan, own, is_needed=shard is not None and shard.lacks_states)
        if shard:
            self._record_sources(plan, shard)
            shard.load(rest[0], sums)
            self._begin_as_replacement(plan, reports)

    def _gathered_rows(self, own: OwnShards) -> dict[str, tuple[torch.Tensor, int]]:
        """Return the previous rank's rows of each gathered parameter, and the step in which they were gathered."""
        rows = self._gathered.rows()
        return {name: rows[id(parameter)] for name, parameter in own.parameters.items() if id(parameter) in rows}

    def _restore_shard(self, step: int) -> int | None:
        try:
            with progress.during(Phase.RESTORING):
                return self._training.restore_shard(self.collectives.ring.rank, step)
        except (BadInput, Corrupt, StorageFailed) as error:
            raise restart_needed(f"the lost shard could not be read from a snapshot ({error})") from error

    def _row_sums(self, plan: ShardPlan, own: OwnShards, *, is_needed: bool) -> list[States]:
        """Send the sums of the surviving rows to the replacements, if one of them needs them. All ranks call this."""
        needed = torch.tensor([int(is_needed)])
        self.link.do("allreduce", [needed])  # also a barrier: the survivors wait while a replacement reads a snapshot
        givers = [rank for rank in range(self.size) if rank not in plan.joining] if needed.item() else []
        return [self._transfer(giver, plan.joining, lambda: row_sums(own)) for giver in givers]

    def _record_sources(self, plan: ShardPlan, shard: LostShard) -> None:
        self._training.record.append(
            Reassembled(
                attempt=self._training.attempt,
                number=self.coordination.number,
                step=plan.step,
                parameters=shard.parameter_sources(),
                moments=shard.state_sources(plan.step),
                rounded=shard.rounded_to,
            )
        )
        self._training.record.flush()


KINDS: Mapping[str, type[ShardedRecovery]] = {"replay": ShardedRecovery, "partial": PartialRecovery}
"""The class that recovers sharded models, for each strategy."""
