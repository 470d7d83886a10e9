"""A simulated worker: it restores a snapshot, trains and saves by the product's own protocol, and records its history.

What it trains is one small tensor. The result of a step depends on the step before it and on the number of ranks, as
sums of gradients do.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from holdfast.checkpoint import writer
from holdfast.checkpoint.store import Store
from holdfast.events import Attempt, Done, Plan, Recover, Seconds, Step
from holdfast.history.log import HistoryWriter
from holdfast.history.tail import PastAttempts
from holdfast.runs.config import RunConfig
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.state.attempt import AttemptContext
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import RestoredState, SnapshotFetch, restore
from holdfast.train.state.save import CheckpointSaver, Conditions
from holdfast.train.step_log import Fingerprints
from simulation.messages import SimulatedRanks
from simulation.scheduler import World

BATCH = 8
SIZE = 6  # values in the state


class Model(nn.Module):
    """A model with one parameter, which `train` changes in a way that follows from its arguments alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(SIZE, dtype=torch.float32), requires_grad=False)

    def train_step(self, step: int, world: int) -> None:
        self.weight.mul_(31).add_(7 * step + world).remainder_(8191)


class Fetch(SnapshotFetch):
    """The product's fetch of a snapshot, without its background thread."""

    def __init__(self, attempt: AttemptContext) -> None:
        self._store, self._opened = attempt.store, Future()
        self._opened.set_result(None)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the simulated run."""

    steps: int
    save_every: int
    keep_last: int
    pace: float  # seconds of a step, at most
    plan: SamplePlan
    config: RunConfig

    @classmethod
    def of(cls, steps: int, save_every: int, keep_last: int, pace: float) -> "Settings":
        plan = SamplePlan(samples=BATCH * steps, batch=BATCH, epochs=1, seed=7)
        config = RunConfig(script="train.py", save_every=save_every, keep_last=keep_last, writer="blocking")
        return cls(steps, save_every, keep_last, pace, plan, config)


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """One rank of an attempt. `meet(step)` waits until all ranks have come to `step`, and raises if one is lost."""

    world: World
    settings: Settings
    number: int  # of the attempt
    ranks: SimulatedRanks
    store: Store
    folder: Path  # of its node's histories
    history: Callable[[str], HistoryWriter]
    meet: Callable[[int], None]
    restored: Callable[[int, RestoredState, Protected], None]  # called once it has restored
    is_done: bool = field(default=False, init=False)

    def run(self) -> None:
        rank, size, settings = self.ranks.rank, self.ranks.size, self.settings
        record = self.history(f"rank-{rank}")
        record.append(Attempt(self.number, size, rank, os.getpid(), 7))
        record.flush()
        attempt = AttemptContext(self.number, self.folder, PastAttempts(), record, self.store, settings.keep_last)
        model = Model()
        protected = Protected({"model": model})
        plan = RunPlan((settings.plan,))
        found = restore(Fetch(attempt), attempt, self.ranks, protected)
        self.restored(rank, found, protected)
        fingerprints = Fingerprints(protected)
        record.append(
            Plan(self.number, save_every=settings.save_every, writer="blocking", config="c", **settings.plan.to_json())
        )
        start = found.step or 0
        at = plan.position(start)
        same = found.step is not None and found.has_shares_of(self.ranks)
        state = None if found.step is None else found.digest_in_memory(protected)
        record.append(
            Recover(
                self.number,
                found.step,
                at.epoch,
                at.cursor,
                "restored" if same else "keyed",
                found.seconds,
                found.passed_over,
                state=state,
                fingerprint=fingerprints.take().digest(),
            )
        )
        record.flush()
        saver = self._saver(attempt, protected, plan, found.step)
        for step in range(start, settings.steps):
            if step >= saver.next:
                record.flush()
                saver.take(step, plan.position(step))
            saver.collect()
            self.meet(step)
            self.world.sleep(settings.pace * self.world.rng.random())
            model.train_step(step, size)
            at = plan.position(step)
            place = (self.number, size, rank, at.epoch, at.cursor, step)
            samples = samples_of(settings.plan, step, rank, size)
            digest = fingerprints.take().digest()
            record.append(Step(*place, samples, Seconds(0.0, 0.1, 0.0), digest, 1, 0, 1))
        record.flush()
        saver.take(settings.steps, plan.position(settings.steps))
        saver.close()
        record.append(Done(self.number, settings.steps))
        record.close()
        self.is_done = True

    def _saver(
        self, attempt: AttemptContext, protected: Protected, plan: RunPlan, saved: int | None
    ) -> CheckpointSaver:
        return CheckpointSaver(
            config=self.settings.config,
            attempt=attempt,
            ranks=self.ranks,
            writer=writer.blocking(self.store, keep_last=self.settings.keep_last),
            protected=protected,
            replicated=protected.models,
            plan=plan,
            fingerprint="c",
            conditions=Conditions.now([None], 1),
            position=lambda: None,
            injected=lambda step: None,
            saved=saved,
        )


@lru_cache(maxsize=4096)
def samples_of(plan: SamplePlan, step: int, rank: int, size: int) -> Samples:
    """Return the samples of one rank's share of a step."""
    return Samples.of(plan.share(plan.position(step), rank, size))
