"""Trials from beginning to end: an unperturbed run, a failure in it, and how long training takes under every strategy.

In go workloads, strategies and the numbers of some trials. Out come, for every number and workload, the step of the
failure and the iterations that each strategy needs from there to the criterion. All strategies meet the same failure.

Where runs differ by chance every trial has a run of its own, since a single run is no sample of what others would
show. Trials are run in groups, so small that the states of their runs fit into memory. Workloads that train alike, and
differ in their blocks alone, have their runs in common.
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
from holdfast.lab.simulate.lanes import Start, run_lanes
from holdfast.lab.simulate.process_pool import Report
from holdfast.lab.simulate.strategy import CheckpointedRun, Strategy, Trial, trial_stream
from holdfast.lab.simulate.trajectory import Trajectory, trajectories
from holdfast.workloads.reinit import renewed
from holdfast.workloads.workload import Arrays, Workload, norm_order

_Which: TypeAlias = tuple[int, Trial]
"""The number of a workload, and a trial of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """One failure in a run of one workload, and what came of it under every strategy."""

    length: int  # of the unperturbed run, in whole iterations
    crossed: float  # the same in fractions of an iteration
    step: int  # of the failure
    counts: dict[Strategy, float]  # iterations from the failure to the criterion
    sizes: dict[Strategy, float]  # of the perturbation


@dataclass(frozen=True, slots=True, eq=False)
class _Failure:
    """The failure of one number: the run in which it strikes, and at which step."""

    number: int
    length: int
    crossed: float
    losses: Floats
    step: int
    runs: list[CheckpointedRun]  # up to the failure, for each workload

    def trial(self, strategy: Strategy) -> Trial:
        return Trial(strategy, self.step, self.number)


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """All trials of some workloads and strategies. Called with the numbers of some, it runs these."""

    workloads: Sequence[Workload]  # that train alike
    strategies: Sequence[Strategy]
    shared: Trajectory | None  # the run of all trials where runs do not differ
    limit: int  # of iterations
    seed: int
    known: dict[str, float] = field(default_factory=dict)  # iterations by key
    early: int = 1  # every second failure strikes before this step; with 1 all are drawn alike

    def groups(self, trials: int, jobs: int) -> list[range]:
        """Which numbers are run together: as few groups as memory and the number of processes allow."""
        size = -(-trials // jobs)
        if self.shared is None:
            size = min(size, self.workloads[0].lanes)
        return [range(first, min(first + size, trials)) for first in range(0, trials, size)]

    def __call__(self, numbers: Sequence[int], tell: Report) -> list[list[Outcomes]]:
        """The outcomes of these numbers, each for every workload; tells the key and the iterations of a trial once known."""
        failures = {failure.number: failure for failure in self._failures(numbers)}

        def begin(which: _Which) -> Start:
            workload, trial = which
            return failures[trial.number].runs[workload](trial)

        trials = [failure.trial(each) for failure in failures.values() for each in self.strategies]
        which = [(workload, trial) for workload in range(len(self.workloads)) for trial in trials]
        keys = {each: self._key(failures[each[1].number].losses, begin(each)) for each in which}
        self._run(keys, begin, tell)
        return [
            [self._outcomes(failure, workload, keys) for workload in range(len(self.workloads))]
            for failure in failures.values()
        ]

    def _failures(self, numbers: Sequence[int]) -> list[_Failure]:
        if self.shared is not None:
            runs = self._checkpointed(self.shared.states)
            return [self._failure(n, self.shared, runs) for n in numbers]
        own = trajectories(self.workloads[0], [trial_stream(self.seed, n) for n in numbers])
        return [self._failure(n, run) for n, run in zip(numbers, own, strict=True)]

    def _failure(self, number: int, run: Trajectory, runs: list[CheckpointedRun] | None = None) -> _Failure:
        """The failure of a number: its step is geometric with mean half the length of the run, redrawn when past its end.

        Where early failures are wanted, every second one has any step before `early` with the same chance instead.
        A run that is not shared is kept no further than to the failure, so that memory holds no more than is needed.
        """
        step = int(geometric_steps(run.length / 2, run.length, 1, (self.seed, number, 1))[0])
        if self.early > 1 and number % 2:
            step = int(np.random.default_rng((self.seed, number, 2)).integers(1, min(self.early, run.length)))
        runs = runs or self._checkpointed(run.states[: step + 1])
        return _Failure(number, run.length, run.crossed(self.workloads[0].criterion), run.losses, step, runs)

    def _checkpointed(self, states: Sequence[Arrays]) -> list[CheckpointedRun]:
        policies = {each.policy for each in self.strategies}
        return [
            CheckpointedRun(
                states, each.blocks, each.norm, policies, self.seed, norm_order(each), partial(renewed, each)
            )
            for each in self.workloads
        ]

    def _outcomes(self, failure: _Failure, workload: int, keys: Mapping[_Which, str]) -> Outcomes:
        trials = {each: failure.trial(each) for each in self.strategies}
        counts = {each: self.known[keys[workload, trial]] for each, trial in trials.items()}
        sizes = {each: failure.runs[workload].size(trial) for each, trial in trials.items()}
        return Outcomes(failure.length, failure.crossed, failure.step, counts, sizes)

    def _key(self, losses: Floats, start: Start) -> str:
        """What determines how many iterations a trial takes: where it starts, to the last bit, and how far it goes.

        So a changed policy, seed or workload never meets an old result.
        """
        workload = self.workloads[0]
        drawn = (start.iteration, start.stream) if workload.stochastic else ()
        digest = xxh3_128(repr((workload.name, workload.criterion, losses.tobytes(), drawn)).encode())
        for name, value in start.state.items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(value).data)
        return digest.hexdigest()

    def _run(self, keys: Mapping[_Which, str], begin: Callable[[_Which], Start], tell: Report) -> None:
        """Run every trial that is not known; equal ones once."""
        alike: defaultdict[str, list[_Which]] = defaultdict(list)
        for each, key in keys.items():
            alike[key].append(each)
        todo = [key for key in alike if key not in self.known]

        def note(key: str, count: float) -> None:
            self.known[key] = count
            for _ in alike[key]:
                tell(key, count)

        for key in alike.keys() & self.known.keys():
            note(key, self.known[key])
        first = [alike[key][0] for key in todo]
        run_lanes(self.workloads[0], first, begin, self.limit, lambda i, count: note(todo[i], count))
