"""Some trials from beginning to end: an unperturbed run, a failure, and what becomes of it under every strategy.

Where runs differ by chance every trial has a run of its own: what one lucky or unlucky run makes of its failures says
little of the next. Only so many trials fly together that their runs fit into memory. Workloads that train alike, and
differ in their blocks alone, fly together too: a run serves them all.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from xxhash import xxh3_128

from holdfast.blocks import Floats
from holdfast.failure import geometric_steps
from holdfast.simulate.lanes import Start, run_lanes
from holdfast.simulate.pool import Tell
from holdfast.simulate.strategy import Case, Scene, Strategy, stream
from holdfast.simulate.trajectory import Trajectory, trajectories
from holdfast.workloads.workload import Arrays, Workload

_Which: TypeAlias = tuple[int, Case]
"""The number of a workload, and a case of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Flown:
    """One trial of one workload: the length of its unperturbed run, the step of its failure, and what followed."""

    length: int
    crossed: float  # the length in fractions of an iteration
    step: int
    counts: dict[Strategy, float]  # iterations from the failure to the criterion
    sizes: dict[Strategy, float]  # of the perturbation


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A trial whose failure is about to strike."""

    number: int
    length: int
    crossed: float
    losses: Floats
    step: int
    scenes: list[Scene]  # of each workload

    def case(self, strategy: Strategy) -> Case:
        return Case(strategy, self.step, self.number)


@dataclass(frozen=True, slots=True, eq=False)
class Flights:
    """What the trials of workloads have in common, and what is known of them; called with the numbers of some."""

    workloads: Sequence[Workload]  # that train alike
    strategies: Sequence[Strategy]
    shared: Trajectory | None  # the run of all trials where runs do not differ
    limit: int  # of iterations
    seed: int
    known: dict[str, float] = field(default_factory=dict)  # iterations by key

    def numbers(self, trials: int, jobs: int) -> list[range]:
        """Which trials fly together: as few flights as memory and the number of processes allow."""
        size = -(-trials // jobs)
        if self.shared is None:
            size = min(size, self.workloads[0].lanes)
        return [range(first, min(first + size, trials)) for first in range(0, trials, size)]

    def __call__(self, numbers: Sequence[int], tell: Tell) -> list[list[Flown]]:
        """Run the trials of these numbers, each for every workload; tells the key and the iterations of a case once known."""
        ready = {trial.number: trial for trial in self._ready(numbers)}

        def begin(which: _Which) -> Start:
            workload, case = which
            return ready[case.number].scenes[workload](case)

        cases = [trial.case(each) for trial in ready.values() for each in self.strategies]
        which = [(workload, case) for workload in range(len(self.workloads)) for case in cases]
        keys = {each: self._key(ready[each[1].number].losses, begin(each)) for each in which}
        self._run(keys, begin, tell)
        return [
            [self._flown(trial, workload, keys) for workload in range(len(self.workloads))] for trial in ready.values()
        ]

    def _ready(self, numbers: Sequence[int]) -> list[_Ready]:
        if self.shared is not None:
            scenes = self._scenes(self.shared.states)
            return [self._trial(n, self.shared, scenes) for n in numbers]
        runs = trajectories(self.workloads[0], [stream(self.seed, n) for n in numbers])
        return [self._trial(n, run) for n, run in zip(numbers, runs, strict=True)]

    def _trial(self, number: int, run: Trajectory, scenes: list[Scene] | None = None) -> _Ready:
        """A trial with its failure: geometric with mean half the length of the run, redrawn when past its end.

        Scenes of its own have no state beyond the failure, so that memory holds no more than is needed.
        """
        step = int(geometric_steps(run.length / 2, run.length, 1, (self.seed, number, 1))[0])
        scenes = scenes or self._scenes(run.states[: step + 1])
        return _Ready(number, run.length, run.crossed(self.workloads[0].criterion), run.losses, step, scenes)

    def _scenes(self, states: Sequence[Arrays]) -> list[Scene]:
        policies = {each.policy for each in self.strategies}
        return [Scene(states, each.blocks, each.norm, policies, self.seed) for each in self.workloads]

    def _flown(self, trial: _Ready, workload: int, keys: Mapping[_Which, str]) -> Flown:
        cases = {each: trial.case(each) for each in self.strategies}
        counts = {each: self.known[keys[workload, case]] for each, case in cases.items()}
        sizes = {each: trial.scenes[workload].size(case) for each, case in cases.items()}
        return Flown(trial.length, trial.crossed, trial.step, counts, sizes)

    def _key(self, losses: Floats, start: Start) -> str:
        """What determines a case: where it starts, to the last bit, and how far it goes.

        So a changed policy, seed or workload never meets an old result.
        """
        workload = self.workloads[0]
        luck = (start.iteration, start.stream) if workload.stochastic else ()
        digest = xxh3_128(repr((workload.name, workload.criterion, losses.tobytes(), luck)).encode())
        for name, value in start.state.items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(value).data)
        return digest.hexdigest()

    def _run(self, keys: Mapping[_Which, str], begin: Callable[[_Which], Start], tell: Tell) -> None:
        """Run every case that is not known; equal ones once."""
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
