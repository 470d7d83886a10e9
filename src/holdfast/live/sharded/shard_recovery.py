"""Live recovery of one rank of a sharded run: a replacement gets the lost shard from its neighbour, and no step is undone.

The survivors notice a loss in a collective, or at a step boundary, and wait there. The replacement gets the lost shard
from the next rank, which keeps a copy of it (see shadow.py), or from another replica (see replicas.py), and everything
else from any survivor. It computes the interrupted step from the beginning, served by the survivors (see collectives.py),
and then all continue. If that is not possible, the run restarts from its newest snapshot.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn

from holdfast import progress
from holdfast.distributed.gloo_link import GroupBroken
from holdfast.errors import BadInput
from holdfast.events import Regroup
from holdfast.live import state_transfer
from holdfast.live.boundary_marks import BoundaryMarks
from holdfast.live.rank_values import RankValues
from holdfast.live.recovery import LiveRecovery
from holdfast.live.sharded.collectives import Collectives
from holdfast.live.sharded.exchange import Exchange
from holdfast.live.sharded.mesh_group import MeshGroup, ModuleGather, replace_default_group_by_mesh
from holdfast.live.sharded.operations import Ring, Team, ranks_apart
from holdfast.live.sharded.replicas import Agreement, Copies, Replicas, ranks_with_copies
from holdfast.live.sharded.shadow import OwnShards, Shadow, check_copyable, exchange_copies
from holdfast.live.sharded.shard_plan import JOINS, ShardPlan, ShardReport, make_shard_plan
from holdfast.live.training_hooks import TrainingHooks
from holdfast.progress import Phase, restart_needed
from holdfast.train.state.protected import Protected

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ShardedRecovery(LiveRecovery):
    """One rank's part in the live recovery of sharded models, with `--recovery replay`."""

    collectives: Collectives = field(init=False)
    _own: OwnShards | None = field(default=None, init=False)
    _copies: Copies | None = field(default=None, init=False)
    _ranks_with_copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    _buffers: set[int] = field(default_factory=set, init=False)  # the `id()` of each: a rank's own come from the store
    _step: int = field(default=0, init=False)  # the step that this rank trains or reaches next
    _has_begun: bool = field(default=False, init=False)  # this rank has begun that step
    _has_reduced: bool = field(default=False, init=False)  # gradients of that step
    _settled: int | None = field(default=None, init=False)  # the last step in which ranks recovered since the boundary
    _joined_at: int = field(default=-1, init=False)  # the step with which this worker has joined the others
    _postponed: Callable[[], None] | None = field(default=None, init=False)  # this rank's part of a plan
    _has_reported: bool = field(default=False, init=False)  # how much memory the copies take

    @classmethod
    def take_over(cls, live: LiveRecovery) -> "ShardedRecovery":
        """Return the recovery of a sharded run on the connections of `live`.

        A spare first waits here until it replaces a lost worker, because its shards depend on its rank."""
        sharded = cls(live.strategy, live.size, live.coordination, live.link)
        rank, nodes = live.coordination.await_rank(), int(os.environ.get("GROUP_WORLD_SIZE", 1))
        ring = Ring(rank, live.size, ranks_apart(live.size, nodes))
        sharded.collectives = Collectives(live.link, ring, sharded.recover_collective)
        sharded._recorded = live.members
        return sharded

    def connect_new(self, team: Team) -> None:
        """Connect the ranks of a new team."""
        if not self.is_joining:  # otherwise all connections are made when this worker joins
            self._connect_team(team)

    def _connect_team(self, team: Team) -> None:
        self.coordination.connect(team.link, team.members, team.name)

    @property
    def place(self) -> tuple[int, int]:
        return self.collectives.ring.rank, self.size

    def start(self, hooks: TrainingHooks) -> None:
        """Enable recovery once the training loop is built, and send a copy of this rank's shards to the next rank."""
        self._hooks = hooks
        self._check(hooks.protected)
        self._marks = BoundaryMarks(hooks.protected)
        if hooks.protected.has_values_of_rank:
            self._values = RankValues(self.coordination, hooks.protected)
        self._own = OwnShards(hooks.protected)
        self._buffers = {id(buffer) for model in hooks.protected.models for buffer in model.buffers()}
        self._begin_copies(self._own)
        for name, optimizer in self._own.optimizers.items():
            optimizer.register_step_pre_hook(self._step_hook(name))

    def _check(self, protected: Protected) -> None:
        check_copyable(protected)

    def _begin_copies(self, own: OwnShards) -> None:
        self._ranks_with_copies = ranks_with_copies(own, self.collectives.ring)
        if not self.is_joining:
            self._copies = self._replicas() or exchange_copies(
                own, self.link, self.collectives.ring, self.collectives.spare
            )

    def _replicas(self) -> Replicas | None:
        """Return the replicas of this rank's shards, or None if no other rank trains them."""
        assert self._own is not None
        if not self._own.has_replicas:
            return None
        return Replicas(self._own, self._ranks_with_copies[self.collectives.ring.rank])

    def route(self, modules: list[Any]) -> None:
        """Make the all-gathers of the FSDP `modules` pass through this recovery."""
        for number, module in enumerate(modules):
            module.set_custom_all_gather(ModuleGather(self.collectives, number))

    def reduce_scatter(
        self, output: torch.Tensor, values: torch.Tensor, *, op: Any, group: MeshGroup, **_: Any
    ) -> None:
        """Reduce the gradients `values` of the ranks in `group`, and write this rank's part to `output`."""
        if not self._has_reduced:
            self._has_reduced = True
            self.begin_backward()
        self.collectives.reduce(output, values, op, group.team)

    def begin_backward(self) -> None:
        LiveRecovery.begin_backward(self)  # super() does not work in a dataclass with slots
        self._training.record_steps()  # a lost rank is not rolled back, so its steps must be recorded

    def _step_hook(self, name: str) -> Any:
        @torch.no_grad()  # with autograd, the values of each distributed tensor take 15 times as long
        def before_step(*_: Any) -> None:
            assert self._copies is not None
            self.collectives.run(self._copies.exchange_gradients(name, self.collectives.reductions))
            self._copies.step(name)
            self.collectives.end_updates()

        return before_step

    def reach_boundary(self, step: int) -> None:
        """End the collectives of the step before `step`, and keep what a replacement of this rank would need."""
        assert self._marks is not None
        if self._own and self._own.averages and isinstance(self._copies, Shadow) and step != self._joined_at:
            self.collectives.run(self._copies.exchange_averages())
        self._step, self._has_begun = step, False
        if step != self._joined_at:  # otherwise the others may have completed collectives of this step
            self.collectives.begin_step()
        self._marks.take(self._buffers)
        if self._values:
            self._values.keep(self.member, step)

    def begin_step(self, step: int) -> None:
        """Remember that `step` has begun: its batch is about to be handed to the script."""
        self._step, self._has_begun, self._has_reduced = step, True, False

    def end_step(self, optimizer_steps: int) -> None:
        """End the current step, in which the script's optimizers made `optimizer_steps` steps."""
        self._may_accumulate = not optimizer_steps
        is_first = self._joined_at < 0 and not self._has_reported
        if optimizer_steps and is_first and self.collectives.ring.rank == 0 and (line := self._describe_copies()):
            logger.warning("holdfast: %s", line)
            self._has_reported = True

    def _describe_copies(self) -> str | None:
        """Return what the copies cost; None if they cost no memory between two steps."""
        if not isinstance(self._copies, Shadow):
            return None
        return (
            f"every rank keeps a copy of another rank's shards, which takes about {self._copies.nbytes / 1e6:.1f} MB."
        )

    def at_boundary(self, step: int, *, last: bool = False) -> tuple[bool, int | None]:
        """Recover from lost workers just before `step`.

        Return two values: False, because the samples stay divided among the same ranks, and the last step in which
        ranks recovered since the previous boundary (None if they did not recover)."""
        if self._postponed:
            self._carry_out_postponed(self._postponed)
        while self.coordination.is_outdated:
            self.recover(None)
        self.coordination.gate.leave(self)
        settled, self._settled = self._settled, None
        return False, settled

    def compared_state(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor] | None, int, int]:
        """Return this rank's shards, the copy that it keeps of other shards, and the first rank with the same shards.

        The last value says whose shards the copy is of: those of the rank that many ranks before this one."""
        assert self._own is not None
        own, rank = self._own.compared(self._own.capture()), self.collectives.ring.rank
        if isinstance(self._copies, Shadow):
            return own, self._own.compared(self._copies.capture()), rank, self.collectives.ring.apart
        return own, None, min(rank, *self._ranks_with_copies[rank]), 1

    def take_waited(self) -> float | None:
        """Return the seconds that this rank was in collectives since the last call, mostly waiting for other ranks."""
        seconds, self.collectives.seconds = self.collectives.seconds, 0.0
        return seconds

    def suspend(self) -> None:
        """Raise the error that makes the run restart: a sharded model needs all of its ranks."""
        raise restart_needed(f"a model that is sharded over {self.size} ranks needs all of them")

    def recover_collective(self) -> bool:
        """Recover from a loss that interrupted a collective.

        Return True if the collective has ended. Otherwise the caller repeats it."""
        if self._hooks is None or not self._has_copies:
            raise restart_needed("a worker was lost before training began")
        self.recover(None)
        return self._postponed is not None

    def _carry_out_postponed(self, apply: Callable[[], None]) -> None:
        self._postponed = None
        try:
            with progress.during(Phase.RECOVERING):
                apply()
        except GroupBroken:
            self.recover(None)

    @property
    def _has_copies(self) -> bool:
        return self._copies is not None

    def _renew_default_group(self) -> None:
        pass  # the group of a sharded run stays the same

    def _recover_once(self, group: Any, began: float) -> ShardPlan:  # type: ignore[override]
        if self._hooks is None:
            raise restart_needed("a worker was lost before training began")
        membership = self.coordination.next()
        self.link.hang_up()
        report = self._report().to_json()
        reports = self.coordination.exchange(membership.members, report, ShardReport.from_json)
        self.coordination.connect(self.link, membership.members)
        for team in self.collectives.teams:
            self._connect_team(team)
        self.coordination.members = membership.members
        plan = make_shard_plan(reports, self._ranks_with_copies)
        if isinstance(plan, str):
            raise restart_needed(plan)
        interrupted = self.collectives.current
        if self.collectives.ring.rank in plan.late and isinstance(interrupted, Exchange | Agreement):
            interrupted.conclude()
            self.coordination.gate.wait(self)
            self._postponed = lambda: self._apply_shards(plan, reports, began)
        else:
            self._apply_shards(plan, reports, began)
        return plan

    def _report(self) -> ShardReport:
        if self.is_joining:
            return ShardReport(step=JOINS, apart=self.collectives.ring.apart)
        collectives = self.collectives
        return ShardReport(
            step=self._step,
            apart=collectives.ring.apart,
            begun=self._has_begun,
            collectives=len(collectives.log),
            optimizer_steps=collectives.optimizer_steps,
            exchanges=isinstance(collectives.current, Exchange | Agreement),
            members=self._recorded,
            boundaries=progress.here.boundaries,
        )

    def _apply_shards(self, plan: ShardPlan, reports: Mapping[int, ShardReport], began: float) -> None:
        self._record_shards(plan, perf_counter() - began)
        if plan.lost:
            self._training.inject(plan.step)
        self.coordination.gate.wait(self)
        self._settled = max(self._settled or 0, plan.step)
        self._hand_over(plan, reports)
        progress.here.membership = self.coordination.number
        with progress.during(Phase.TRAINING):  # the replacement computes, and is watched as in any step
            self.collectives.serve(plan.completed)

    def _record_shards(self, plan: ShardPlan, seconds: float) -> None:
        self._recorded = self.members
        self._training.record.append(
            Regroup(
                attempt=self._training.attempt,
                number=self.coordination.number,
                step=plan.step,
                strategy=self.strategy,
                members=self.members,
                lost=plan.lost,
                redone=max(plan.completed.values()),
                seconds=seconds,
            )
        )
        self._training.record.flush()

    def _hand_over(self, plan: ShardPlan, reports: Mapping[int, ShardReport]) -> None:
        """Send the replacements the shards that they train, other shards that they keep a copy of, and all other state."""
        own, rank = self._own, self.collectives.ring.rank
        assert own is not None
        if rank == plan.giver:
            self._check_state(own)
            self._training.record_steps()
        rest = self._transfer(plan.giver, plan.joining, own.capture_rest)
        for joining in plan.joining:
            shards = self._transfer(plan.holders[joining], (joining,), self._copied_shards)
            if not own.has_replicas:
                copied = self._transfer(self.collectives.ring.at(joining).previous, (joining,), own.capture)
            if rank == joining:
                own.load(shards, rest)
                self._copies = self._replicas() or Shadow(own, copied, self.collectives.spare)
                self._begin_as_replacement(plan, reports)

    def _transfer(self, giver: int, takers: tuple[int, ...], state: Callable[[], Any]) -> Any:
        return state_transfer.transfer_by_member(self.link, self.coordination, giver, takers, state)

    def _begin_as_replacement(self, plan: ShardPlan, reports: Mapping[int, ShardReport]) -> None:
        self._take_own_values(plan)
        giver = reports[plan.giver]
        progress.here.catch_up(giver.boundaries - giver.begun, 0)
        self.collectives.begin_step()
        self._joined_at = plan.step

    def _copied_shards(self) -> Any:
        assert self._copies is not None
        if not self._copies.is_exact:
            raise restart_needed(
                f"rank {self.collectives.ring.rank}'s copy of the lost shard was not the same as the shard: a hook has changed "
                "gradients just before an optimizer step, or a bit has flipped"
            )
        return self._copies.capture()

    def _check_state(self, own: OwnShards) -> None:
        if own.has_frozen_changed():
            raise restart_needed(
                "parameters that no protected optimizer trains have changed, and no rank has a copy of them"
            )
        self._check_marks_of_step()

    def _check_marks_of_step(self) -> None:
        assert self._marks is not None
        if self._marks.have_changed(self._buffers):
            raise restart_needed("protected state had changed since the step began, before its gradients were reduced")

    def _take_own_values(self, plan: ShardPlan) -> None:
        if self._values and not self._values.restore(self.member, plan.step):
            raise restart_needed(
                f"rank {self.member} was lost before the values it protects were known at step {plan.step}"
            )


def sharded_live(
    live: LiveRecovery, backend: str, kinds: Mapping[str, type[ShardedRecovery]]
) -> ShardedRecovery | None:
    """Return the recovery of a sharded run, which torch.distributed then uses; None if a loss makes the run restart.

    `kinds` has the class for each strategy that recovers sharded models."""
    if live.strategy not in kinds:
        raise BadInput(
            f"a sharded model supports --recovery restart, {' and '.join(kinds)}, not {live.strategy}: every forward "
            "gathers the lost worker's shard, so the others must wait for its replacement, which then computes its samples too."
        )
    if "nccl" not in backend:
        sharded = kinds[live.strategy].take_over(live)
        replace_default_group_by_mesh(sharded.collectives, sharded.connect_new)
        return sharded
    progress.here.has_fallen_back = True
    line = f"--recovery {live.strategy} of a sharded model does not support NCCL yet"
    if live.is_joining:
        raise BadInput(f"{line}, so spare workers are of no use: leave out --spares.")
    if live.coordination.rank == 0:
        logger.warning("%s: after a failure the run restarts from its newest snapshot.", line)
    return None


def check_models(models: Iterable[nn.Module], size: int, recovery: str) -> None:
    """Raise BadInput if a parameter of `models` is not sharded over one mesh of all `size` ranks: it would have no copy."""
    shapes = set()
    for model in models:
        for name, parameter in model.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None or mesh.size() != size or not _is_over_mesh_groups(mesh):
                where = "not sharded" if mesh is None else "sharded over a mesh of the script's own"
                raise BadInput(
                    f"{name} is {where}, so a lost worker's part of it would exist nowhere else: with --recovery {recovery} call "
                    "fully_shard(..., mesh=run.mesh) for every layer and then for the whole model, or choose --recovery restart."
                )
            shapes.add(tuple(mesh.shape))
    if len(shapes) > 1:
        raise BadInput(
            f"the models are sharded over meshes of different shapes ({', '.join(map(str, sorted(shapes)))}): with --recovery "
            f"{recovery} give all layers the same mesh, or choose --recovery restart."
        )


def _is_over_mesh_groups(mesh: Any) -> bool:
    return mesh.ndim <= 2 and all(isinstance(mesh.get_group(number), MeshGroup) for number in range(mesh.ndim))
