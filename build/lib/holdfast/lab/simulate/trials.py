"""Trials: a run without failures, a failure in it, and the iterations that each strategy then needs to converge.

All strategies get the same failure. If training is random, every trial has its own run without failures. Trials run in
groups small enough for the states of their runs to fit into memory. Workloads that differ only in their blocks share
their runs.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from xxhash import xxh3_128

from holdfast.blocks.division import Floats
from holdfast.faults.schedule import geometric_steps
from holdfast.lab.simulate.lanes import Start, Trajectory, run_lanes, trajectories
from holdfast.lab.simulate.pools import Report
from holdfast.lab.simulate.strategy import CheckpointedRun, Strategy, Trial, trial_stream
from holdfast.workloads.reinit import renewed
from holdfast.workloads.workload import Arrays, Workload, norm_order

_WorkloadTrial: TypeAlias = tuple[int, Trial]
"""The index of a workload, and a trial of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The effects of one failure in a run of one workload, by recovery strategy."""

    length: int  # iterations to convergence without the failure
    crossed: float  # the same as a fractional number
    step: int  # iteration of the failure
    counts: dict[Strategy, float]  # iterations from the failure to convergence
    sizes: dict[Strategy, float]  # norms of the perturbations that the recoveries cause


@dataclass(frozen=True, slots=True, eq=False)
class _Failure:
    """The failure of trial `number` after `step` iterations of a run that would converge after `crossed` iterations."""

    number: int
    length: int
    crossed: float
    losses: Floats
    step: int
    runs: list[CheckpointedRun]  # the run up to the failure, one for each workload

    def trial(self, strategy: Strategy) -> Trial:
        return Trial(strategy, self.step, self.number)


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """A simulation of failures under every workload and strategy: call it with the numbers of the trials to run."""

    workloads: Sequence[Workload]  # must train alike
    strategies: Sequence[Strategy]
    shared: Trajectory | None  # the run of all trials, if training is not random
    limit: int  # the most iterations that a trial may take
    seed: int
    known: dict[str, float] = field(default_factory=dict)  # iterations of finished trials, by `_key`
    early: int = 1  # if more than 1, every second failure happens before this step

    def groups(self, trials: int, jobs: int) -> list[range]:
        """Divide the trial numbers 0 to `trials` - 1 into groups for `jobs` processes."""
        size = -(-trials // jobs)
        if self.shared is None:
            size = min(size, self.workloads[0].lanes)
        return [range(first, min(first + size, trials)) for first in range(0, trials, size)]

    def __call__(self, numbers: Sequence[int], report: Report) -> list[list[Outcomes]]:
        """Run the trials `numbers`, and return for each trial a list with its outcomes for each workload.

        `report` is called with the key of every simulated run and the iterations that it took."""
        if self.shared is not None:
            runs = self._checkpointed(self.shared.states)
            failures = {number: self._failure(number, self.shared, runs) for number in numbers}
        else:
            own = trajectories(self.workloads[0], [trial_stream(self.seed, number) for number in numbers])
            failures = {number: self._failure(number, run) for number, run in zip(numbers, own, strict=True)}

        def begin(item: _WorkloadTrial) -> Start:
            workload, trial = item
            return failures[trial.number].runs[workload](trial)

        trials = [failure.trial(strategy) for failure in failures.values() for strategy in self.strategies]
        items = [(workload, trial) for workload in range(len(self.workloads)) for trial in trials]
        keys = {item: self._key(failures[item[1].number].losses, begin(item)) for item in items}
        self._run(keys, begin, report)
        outcomes = []
        for failure in failures.values():
            by_strategy = {strategy: failure.trial(strategy) for strategy in self.strategies}
            outcomes.append(list[Outcomes]())
            for workload, run in enumerate(failure.runs):
                counts = {strategy: self.known[keys[workload, trial]] for strategy, trial in by_strategy.items()}
                sizes = {strategy: run.perturbation_size(trial) for strategy, trial in by_strategy.items()}
                outcomes[-1].append(Outcomes(failure.length, failure.crossed, failure.step, counts, sizes))
        return outcomes

    def _failure(self, number: int, run: Trajectory, runs: list[CheckpointedRun] | None = None) -> _Failure:
        """Return the failure of trial `number`, which happens at a random step of `run`.

        If `self.early` is above 1, odd trials fail before step `self.early`. `runs` has the checkpoints of `run` for
        each workload; if None, they are computed up to the failure."""
        step = int(geometric_steps(run.length / 2, run.length, 1, (self.seed, number, 1))[0])
        if self.early > 1 and number % 2:
            step = int(np.random.default_rng((self.seed, number, 2)).integers(1, min(self.early, run.length)))
        runs = runs or self._checkpointed(run.states[: step + 1])
        return _Failure(number, run.length, run.crossed(self.workloads[0].criterion), run.losses, step, runs)

    def _checkpointed(self, states: Sequence[Arrays]) -> list[CheckpointedRun]:
        policies = {strategy.policy for strategy in self.strategies}
        return [
            CheckpointedRun(states, w.blocks, w.norm, policies, self.seed, norm_order(w), partial(renewed, w))
            for w in self.workloads
        ]

    def _key(self, losses: Floats, start: Start) -> str:
        """Return a digest of everything that determines the result of a trial.

        This is the workload, the start of the trial, and `losses`, the losses of the run without the failure."""
        workload = self.workloads[0]
        drawn = (start.iteration, start.stream) if workload.stochastic else ()
        digest = xxh3_128(repr((workload.name, workload.criterion, losses.tobytes(), drawn)).encode())
        for name, value in start.state.items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(value).data)
        return digest.hexdigest()

    def _run(
        self, keys: Mapping[_WorkloadTrial, str], begin: Callable[[_WorkloadTrial], Start], report: Report
    ) -> None:
        """Run a trial for each key that is not in `self.known`, and store its iterations there.

        `begin` returns the start of a trial, and `report` is called with each key and its iterations."""
        equal: defaultdict[str, list[_WorkloadTrial]] = defaultdict(list)
        for item, key in keys.items():
            equal[key].append(item)
        todo = [key for key in equal if key not in self.known]

        def finish(key: str, count: float) -> None:
            self.known[key] = count
            for _ in equal[key]:
                report(key, count)

        for key in equal.keys() & self.known.keys():
            finish(key, self.known[key])
        first = [equal[key][0] for key in todo]
        run_lanes(self.workloads[0], first, begin, self.limit, lambda i, count: finish(todo[i], count))
