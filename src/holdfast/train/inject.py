"""Injection of planned failures into a worker. Each is injected once per run folder, and recorded before it strikes.

Failures of processes are injected here, at a point of a step; storage faults are injected in the store, in the next
save. A rank that is to fail in backward, or before its optimizer steps, first waits until every rank has the gradient
sums that come before that point. So the other ranks are always left with the same sums.
"""

import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast import progress
from holdfast.checkpoint.store import Store
from holdfast.distributed.ranks import NEVER, Ranks, RanksChanged
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import Strike
from holdfast.faults import points
from holdfast.faults.schedule import Failure, Schedule
from holdfast.faults.storage import KINDS, FaultyStore
from holdfast.history.log import HistoryWriter
from holdfast.history.tail import INJECTED, Struck, struck
from holdfast.progress import Phase
from holdfast.train.flip import choose_flip
from holdfast.train.replicate import Replica
from holdfast.train.state.protected import Protected

if TYPE_CHECKING:
    from holdfast.train.sharded import ShardedModels  # a slow import

SLOW_SECONDS = 1.0
MEET_SECONDS = 60.0  # how long a rank waits for the others before it fails without them
JOINT_POINTS = ("backward", "optimizer")  # points that every rank reaches before one fails there


class Injection:
    """An injector of the failures that a test plans for this rank.

    A failure within backward or the optimizer step happens only when all ranks have reached that point."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        attempt: int,
        past: Collection[Struck],
        folder: Path | None,
        peers: Ranks | None = None,
    ) -> None:
        self._rank, self._attempt, self._folder, self._peers = rank, attempt, folder, peers
        self._size = peers.size if peers else 1
        self._schedule = [failure for failure in schedule if failure.kind in ACTS or failure.kind == points.FLIP]
        self._steps = {failure.step for failure in self._schedule}
        self._select(past)
        self._in_backward: list[Failure] = []  # failures in the backward of this step
        self._models: Sequence[nn.Module] = ()
        self._sharded: ShardedModels | None = None
        self._protected: Protected | None = None

    def set_rank(self, rank: int) -> None:
        """Inject the failures planned for `rank` from now on, except those that `rank` has already suffered."""
        self._rank = rank
        if self._schedule and self._folder:
            self._select(struck(self._folder))

    def _select(self, past: Collection[Struck]) -> None:
        self._struck = frozenset(past)
        self._due = [failure for failure in self._schedule if self._rank in self._open_targets(failure)]
        self._joint = [
            failure
            for failure in self._schedule
            if points.name(failure) in JOINT_POINTS and self._open_targets(failure)
        ]

    def _open_targets(self, failure: Failure) -> list[int]:
        targets = failure.targets or (0,)
        return [rank for rank in targets if (failure.step, failure.kind, rank, failure.point) not in self._struck]

    def watch(
        self,
        models: Sequence[nn.Module],
        replicas: Sequence[Replica],
        sharded: "ShardedModels | None" = None,
        protected: Protected | None = None,
    ) -> None:
        """Register the models to inject failures into; raise BadInput if a failure needs a model and none exists."""
        due = [failure for failure in self._schedule if self._open_targets(failure)]
        inside = [failure.point for failure in due if points.name(failure) == "backward"]
        if inside and not (replicas or (sharded and sharded.reductions)):
            raise BadInput(
                f"No failure can strike at {inside[0]}: no model is replicated over several workers, or sharded over them. Use "
                "run.replicate()."
            )
        if not (models or sharded) and any(points.name(failure) == "forward" for failure in due):
            raise BadInput("No failure can strike at forward: no model is replicated or sharded. Use run.replicate().")
        if not sharded and (parts := [failure.point for failure in due if failure.point.startswith(points.FORWARD)]):
            raise BadInput(
                f"No failure can strike at {parts[0]}: only a sharded model gathers in forward. Use forward."
            )
        self._models, self._sharded, self._protected = models, sharded, protected
        for replica in replicas if inside else ():
            replica.watch(self.posted)
        if sharded and inside:
            sharded.watch_backward(self.posted)

    def next(self, step: int) -> int:
        """Return the first step from `step` on in which a failure is planned for any rank; NEVER if there is none."""
        return min((planned for planned in self._steps if planned >= step), default=NEVER)

    def strike(self, step: int) -> None:
        """Inject the failures planned just before `step`, and prepare the failures within it. May end the process."""
        for failure in [failure for failure in self._joint if failure.step == step]:
            self._joint.remove(failure)
            if points.name(failure) == "backward":
                self._in_backward.append(failure)
            else:
                self._before_optimizer(failure)
        for failure in [failure for failure in self._due if failure.step == step]:
            if points.name(failure) == "forward":
                self._due.remove(failure)
                self._in_forward(failure)
            elif failure.point == "boundary" or failure.kind == points.FLIP:
                self._strike(failure)

    def posted(self, works: Sequence[Any], buckets: int) -> None:
        """Inject the failures planned for the moment when `len(works)` of a backward's `buckets` sums have started."""
        for failure in [cut for cut in self._in_backward if points.summed_buckets(cut, buckets) == len(works)]:
            self._in_backward.remove(failure)
            self._strike_jointly(failure, works)

    def strike_in_save(self, step: int) -> None:
        """Inject the failures that are due during the save at `step`. May end the process."""
        self._strike_from("save", step)

    def strike_in_recovery(self, step: int) -> None:
        """Inject the failures that are due while the ranks recover in `step` from a loss. May end the process."""
        self._strike_from("recovery", step)

    def _strike_from(self, point: str, step: int) -> None:
        for failure in [due for due in self._due if due.point == point and due.step <= step]:
            self._strike(failure)

    def _in_forward(self, failure: Failure) -> None:
        if self._sharded:
            self._sharded.on_gather(points.gathered_fraction(failure), lambda: self._strike(failure))
            return

        def on_forward(*_: Any) -> None:
            if torch.is_grad_enabled():
                for hook in hooks:
                    hook.remove()
                self._strike(failure)

        hooks = [model.register_forward_pre_hook(on_forward) for model in self._models]

    def _before_optimizer(self, failure: Failure) -> None:
        def on_step(*_: Any) -> None:
            hook.remove()
            self._strike_jointly(failure, ())

        hook = register_optimizer_step_pre_hook(on_step)

    def _strike_jointly(self, failure: Failure, works: Sequence[Any]) -> None:
        """Report that this rank is at the point of `failure`, once the all-reduces `works` are complete.

        If the failure targets this rank, wait up to a minute for the reports of the other ranks, then inject the failure.
        """
        is_due = failure in self._due
        if self._peers and (works or failure.point == "optimizer"):
            peers = replace(self._peers, patience=MEET_SECONDS)
            with suppress(
                RuntimeError, HoldfastError, RanksChanged
            ):  # another rank is lost, which backward will notice
                for work in works:
                    work.wait()
                if peers.device.type == "cuda":
                    torch.cuda.synchronize()
                self._meet(peers, failure, "comes", range(peers.size) if is_due else ())
        if is_due:
            self._strike(failure)

    def _strike(self, failure: Failure) -> None:
        if failure in self._due:
            self._due.remove(failure)
        act, changed = self._prepare(failure)
        if self._folder:
            strike = Strike(self._attempt, failure.step, failure.kind, self._rank, failure.point, changed)
            in_thread = failure.point == "save"  # there, a thread that must not change the phase of training
            with nullcontext() if in_thread else progress.during(Phase.SAVING):  # a slow disk is not a hang
                _record(self._folder, str(self._rank), strike)
        if self._peers and failure.point != "recovery" and self._peers.size >= self._size:  # all ranks are there
            # The failure's other ranks might otherwise be ended for this failure before it strikes them.
            peers = replace(self._peers, patience=MEET_SECONDS, rank=self._rank)
            targets = [rank for rank in self._open_targets(failure) if rank < peers.size]
            with suppress(RuntimeError, HoldfastError, RanksChanged):
                self._meet(peers, failure, "strikes", targets)
        act()

    def _prepare(self, failure: Failure) -> tuple[Callable[[], object], str | None]:
        """Return a function that makes `failure` happen, and the bit that it changes if it is a flip."""
        if failure.kind != points.FLIP:
            return functools.partial(ACTS[failure.kind], failure), None
        assert self._protected is not None
        flip = choose_flip(self._protected, failure, self._rank)
        return flip.apply, str(flip)

    @staticmethod
    def _meet(peers: Ranks, failure: Failure, word: str, ranks: Iterable[int]) -> None:
        topic = f"injected/{failure.step}/{failure.kind}/{failure.point}/{word}"
        peers.post(f"{topic}/{peers.rank}", "")
        for rank in ranks:
            peers.wait_for(f"{topic}/{rank}")


def faulty(
    store: Store, schedule: Schedule, attempt: int, struck: Collection[Struck], folder: Path, rank: int = 0
) -> Store:
    """Return `store`, wrapped to inject the storage faults that `schedule` plans for `rank`.

    Faults in `struck` were injected before and are left out. Each fault is recorded, with the number of the `attempt`,
    in a history in `folder`. If there are no faults to inject, return `store` itself."""
    faults = tuple(
        fault
        for fault in schedule
        if fault.kind in KINDS
        and rank in (fault.targets or (0,))
        and (fault.step, fault.kind, rank, fault.point) not in struck
    )
    if not faults:
        return store

    def record(fault: Failure) -> None:
        name = f"storage-{rank}" if rank else "storage"
        _record(folder, name, Strike(attempt, fault.step, fault.kind, rank, fault.point))

    return FaultyStore(store, faults, record=record)


def check(schedule: Schedule, steps: int) -> None:
    """Raise BadInput if `schedule` has a failure that cannot happen in a run of `steps` steps.

    Such failures are planned after the last step (except in the last save), or for a rank other than 0 in a file that
    only rank 0 writes."""
    last = {failure: steps + (failure.kind in KINDS or failure.point == "save") for failure in schedule}
    if late := sorted({failure.step for failure, end in last.items() if failure.step >= end}):
        raise BadInput(
            f"No failure can strike before step {', '.join(map(str, late))}: the last step of this run is {steps - 1}."
        )
    for failure in schedule:
        others = [rank for rank in failure.targets if rank]
        if failure.kind in KINDS and failure.point not in ("boundary", "tensors") and others:
            raise BadInput(
                f"{failure.kind} cannot strike rank {others[0]} at {failure.point!r}: only rank 0 commits. Every rank writes "
                "tensors."
            )


def _record(folder: Path, name: str, strike: Strike) -> None:
    with HistoryWriter(folder, f"{INJECTED}{name}") as history:
        history.append(strike)


ACTS: Mapping[str, Callable[[Failure], object]] = {
    "exit": lambda _: os._exit(137),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda _: time.sleep(SLOW_SECONDS),
}
