"""Strikes the failures of a schedule: each once in the life of a run folder, on record before it strikes.

Those of processes strike here, at their points of a step. Those of storage strike in the store, when the next save gets
there. What the other ranks are left with is always the same: a rank that is to fail in backward, or between backward and
its optimizer, first waits until every rank has the sums that come before that point.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.store import Store
from holdfast.distributed.boundary import NEVER
from holdfast.distributed.ranks import Changed, Ranks
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import Strike
from holdfast.faults import points
from holdfast.faults.schedule import Failure, Schedule
from holdfast.faults.storage import KINDS, Faulty
from holdfast.history.log import HistoryWriter
from holdfast.history.tail import INJECTED, Struck, struck
from holdfast.train.replicate import Replica

STORAGE = "storage"
SLOW_SECONDS = 1.0
MEETS_WITHIN = 60.0  # seconds that a rank waits for the others before it fails without them
TOGETHER = ("backward", "optimizer")  # points that every rank comes to before one fails there


class Injection:
    """The failures that are to strike this rank, and those that it sees strike others."""

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
        self._schedule = [failure for failure in schedule if failure.kind in ACTS]
        self._steps = {failure.step for failure in self._schedule}
        self._look_out(past)
        self._cuts: list[Failure] = []  # those in the backward of this window
        self._models: Sequence[nn.Module] = ()

    def become(self, rank: int) -> None:
        """From now on this worker is that rank: some of what was to strike it may have struck another before."""
        self._rank = rank
        if self._schedule and self._folder:
            self._look_out(struck(self._folder))

    def _look_out(self, past: Collection[Struck]) -> None:
        self._struck = frozenset(past)
        self._due = [failure for failure in self._schedule if self._strikes_here(failure)]
        self._seen = [each for each in self._schedule if points.word(each) in TOGETHER and self._strikes_any(each)]

    def watch(self, models: Sequence[nn.Module], replicas: Sequence[Replica]) -> None:
        """Come to the points that are inside of these; refuse those that they do not have."""
        due = [each for each in self._schedule if self._strikes_any(each)]
        inside = [each.point for each in due if points.word(each) == "backward"]
        if inside and not replicas:
            raise BadInput(
                f"no failure can strike at {inside[0]}: no model is replicated over several workers. Use run.replicate()."
            )
        if not models and any(each.point == "forward" for each in due):
            raise BadInput("no failure can strike at forward: no model is replicated. Use run.replicate().")
        self._models = models
        for replica in replicas if inside else ():
            replica.watch(self.posted)

    def next(self, step: int) -> int:
        """The first window from this one on before or in which something may happen, to this rank or to another."""
        return min((each for each in self._steps if each >= step), default=NEVER)

    def strike(self, step: int) -> None:
        """Let happen what is due before the window with this number, or make ready for it; it may not return."""
        for failure in [each for each in self._seen if each.step == step]:
            self._seen.remove(failure)
            if points.word(failure) == "backward":
                self._cuts.append(failure)
            else:
                self._before_optimizer(failure)
        for failure in [each for each in self._due if each.step == step]:
            if failure.point == "forward":
                self._due.remove(failure)
                self._in_forward(failure)
            elif failure.point == "boundary":
                self._strike(failure)

    def posted(self, works: Sequence[Any], buckets: int) -> None:
        """These sums of a backward are under way, of so many that it has; it may not return."""
        for failure in [each for each in self._cuts if points.summed(each, buckets) == len(works)]:
            self._cuts.remove(failure)
            self._strike_together(failure, works)

    def saves(self, step: int) -> None:
        """The save of this step is being written; it may not return."""
        self._strike_from("save", step)

    def recovers(self, step: int) -> None:
        """The members that are left go on in this step; it may not return."""
        self._strike_from("recovery", step)

    def _strike_from(self, point: str, step: int) -> None:
        for failure in [each for each in self._due if each.point == point and each.step <= step]:
            self._strike(failure)

    def _in_forward(self, failure: Failure) -> None:
        """Strike in the next forward of a model that gradients are wanted of."""

        def begins(*_: Any) -> None:
            if torch.is_grad_enabled():
                for each in hooks:
                    each.remove()
                self._strike(failure)

        hooks = [model.register_forward_pre_hook(begins) for model in self._models]

    def _before_optimizer(self, failure: Failure) -> None:
        """Strike before the next step of an optimizer."""

        def steps(*_: Any) -> None:
            hook.remove()
            self._strike_together(failure, ())

        hook = register_optimizer_step_pre_hook(steps)

    def _strike_together(self, failure: Failure, works: Sequence[Any]) -> None:
        """Come to the point like every other rank, and fail there if it is for us."""
        here = failure in self._due
        if self._peers and (works or failure.point == "optimizer"):
            with suppress(RuntimeError, HoldfastError, Changed):  # another is lost: backward finds out
                self._meet(replace(self._peers, patience=MEETS_WITHIN), failure, works, here)
        if here:
            self._strike(failure)

    def _meet(self, peers: Ranks, failure: Failure, works: Sequence[Any], here: bool) -> None:
        for work in works:
            work.wait()
        if peers.device.type == "cuda":
            torch.cuda.synchronize()
        peers.post(_topic(failure, "comes", peers.rank), "")
        for rank in range(peers.size) if here else ():
            peers.wait_for(_topic(failure, "comes", rank))

    def _strike(self, failure: Failure) -> None:
        if failure in self._due:
            self._due.remove(failure)
        if self._folder:
            about = (failure.step, failure.kind, self._rank, failure.point)
            _tell(self._folder, str(self._rank), Strike(self._attempt, *about))
        self._await_others(failure)
        ACTS[failure.kind](failure)

    def _await_others(self, failure: Failure) -> None:
        """Fail at once with the others that are to: else those might be ended for our failure before they have failed."""
        peers = self._peers
        if peers is None or failure.point == "recovery" or peers.size < self._size:
            return  # or some are not there
        others = [rank for rank in _targets(failure) if rank < peers.size and self._has_yet_to_strike(failure, rank)]
        with suppress(RuntimeError, HoldfastError, Changed):
            peers.post(_topic(failure, "strikes", self._rank), "")
            for rank in others:
                replace(peers, patience=MEETS_WITHIN).wait_for(_topic(failure, "strikes", rank))

    def _strikes_here(self, failure: Failure) -> bool:
        return self._rank in _targets(failure) and self._has_yet_to_strike(failure, self._rank)

    def _strikes_any(self, failure: Failure) -> bool:
        return any(self._has_yet_to_strike(failure, rank) for rank in _targets(failure))

    def _has_yet_to_strike(self, failure: Failure, rank: int) -> bool:
        return (failure.step, failure.kind, rank, failure.point) not in self._struck


def faulty(store: Store, schedule: Schedule, attempt: int, struck: Collection[Struck], folder: Path) -> Store:
    """The store with the faults of storage that have not struck yet; without any, the store itself."""
    faults = tuple(
        fault for fault in schedule if fault.kind in KINDS and (fault.step, fault.kind, 0, fault.point) not in struck
    )
    if not faults:
        return store

    def tell(fault: Failure) -> None:
        _tell(folder, STORAGE, Strike(attempt, fault.step, fault.kind, 0, fault.point))

    return Faulty(store, faults, tell=tell)


def _tell(folder: Path, who: str, strike: Strike) -> None:
    """Put a strike on record in a small file of its own, of which the next attempt reads all."""
    with HistoryWriter(folder, f"{INJECTED}{who}") as record:
        record.append(strike)


def check(schedule: Schedule, steps: int) -> None:
    """Refuse a failure that can never happen; after the last step there is a last save."""
    if late := [each.step for each in schedule if each.step >= steps + (each.kind in KINDS or each.point == "save")]:
        several = ", ".join(str(step) for step in sorted(set(late)))
        raise BadInput(f"no failure can strike before step {several}: the last of this run is step {steps - 1}")


def _targets(failure: Failure) -> tuple[int, ...]:
    return failure.targets or (0,)


def _topic(failure: Failure, word: str, rank: int) -> str:
    """Where a rank says how far it is with a failure."""
    return f"injected/{failure.step}/{failure.kind}/{failure.point}/{word}/{rank}"


def _exit(_: Failure) -> None:
    os._exit(137)


def _kill(_: Failure) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(_: Failure) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(_: Failure) -> None:
    time.sleep(SLOW_SECONDS)


ACTS: Mapping[str, Callable[[Failure], None]] = {"exit": _exit, "kill": _kill, "hang": _hang, "slow": _slow}
