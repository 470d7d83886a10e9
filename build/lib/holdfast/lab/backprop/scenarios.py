"""The grid of simulated failures: phases of training, points of backward, numbers of survivors, and strategies."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.lab.backprop.panels import PANELS, WORKERS, TrainingTask
from holdfast.lab.simulate.pools import Report
from holdfast.lab.simulate.strategy import trial_stream

if TYPE_CHECKING:
    from holdfast.lab.backprop.simulated_workers import Interruption
    from holdfast.lab.backprop.training import Training

PHASES = ("early", "middle", "late")
POINTS = (0.25, 0.5, 0.75)
SURVIVORS = (2, 4, 6)  # numbers of the 8 workers
NOW, LATER = "immediately", "an epoch later"


@dataclass(frozen=True, slots=True)
class FailureCase:
    """A failure at the fraction `point` of a backward pass (None: no failure), and the strategy that handles it."""

    strategy: str
    point: float | None = None
    survivors: int | None = None

    @property
    def name(self) -> str:
        parts = [self.strategy] + ([] if self.point is None else [f"at {self.point:.0%}"])
        return " ".join(parts + ([] if self.survivors is None else [f"{self.survivors} survive"]))

    def interruption(self, order: list[int]) -> "Interruption | None":
        """Return the failure to simulate, or None if this case has no failure.

        `order` lists the workers, survivors first."""
        from holdfast.lab.backprop.simulated_workers import Interruption

        if self.point is None:
            return None
        lost = order[self.survivors or 0 :] if self.strategy == "forward" else order[1:]
        return Interruption(strategy=self.strategy, point=self.point, casualties=frozenset(lost))


BEFORE, BASELINE = FailureCase("before"), FailureCase("baseline")
INTERRUPTED = tuple(
    cell
    for point in POINTS
    for cell in (
        FailureCase("replay", point),
        FailureCase("skip", point),
        *(FailureCase("forward", point, left) for left in SURVIVORS),
    )
)
CELLS = (BEFORE, BASELINE, *INTERRUPTED)
MEASURED = [(cell, when) for cell in CELLS for when in (NOW, LATER) if (cell, when) != (BEFORE, LATER)]


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The test accuracies of one trial: after each epoch without failures, and after each simulated failure."""

    curve: list[float]
    accuracy: dict[tuple[str, FailureCase, str], float]


@dataclass(frozen=True, slots=True)
class Scenarios:
    """The experiment on one network. Calling it with a number runs that trial; `known` caches measured accuracies."""

    panel: str
    quick: bool
    data: Path | None
    seed: int
    known: dict[str, float] = field(default_factory=dict)

    def __call__(self, number: int, report: Report) -> TrialOutcome:
        """Train trial `number` and return its accuracies.

        Call `report` with a key and the accuracy after each failure."""
        import torch

        from holdfast.lab.backprop.training import Training, default_device

        torch.set_num_threads(1)  # so that no result depends on the number of processes that share the cores
        torch.backends.cudnn.deterministic = True
        task, seed = load_task(self.panel, self.quick, self.data), trial_stream(self.seed, number)
        training = Training(task, seed, default_device())
        order = np.random.default_rng((self.seed, number)).permutation(WORKERS).tolist()
        curve, accuracy, done = [training.accuracy()], dict[tuple[str, FailureCase, str], float](), 0
        for phase, epoch in zip(PHASES, task.phases, strict=True):
            failing = epoch * training.epoch + training.epoch // 2
            for step in range(done, failing):
                training.step(step)
                if (step + 1) % training.epoch == 0:
                    curve.append(training.accuracy())
            for (cell, when), value in self._phase(training, failing, order, report).items():
                accuracy[phase, cell, when] = value
            done = failing
        return TrialOutcome(curve, accuracy)

    def _phase(
        self, training: "Training", failing: int, order: list[int], report: Report
    ) -> dict[tuple[FailureCase, str], float]:
        """Simulate every kind of failure in mini-batch `failing`, and return the accuracies after each of them.

        `order` lists the workers, survivors first."""
        from torch.nn.functional import cross_entropy

        from holdfast.lab.backprop.simulated_workers import apply_gradients, compute_gradients, train_minibatch

        before, shares = training.state(), training.shares(failing)
        keys = {(cell, when): f"{before.digest}/{cell.name}/{when}" for cell, when in MEASURED}
        todo = {cell for (cell, _), key in keys.items() if key not in self.known}
        model, optimizer = training.model, training.optimizer
        first = compute_gradients(model, shares, cross_entropy) if todo else []
        for cell in CELLS:
            if cell in todo:
                training.restore(before)
                if cell != BEFORE and apply_gradients(model, optimizer, first, cell.interruption(order)):
                    train_minibatch(model, optimizer, shares, cross_entropy)
                self.known[keys[cell, NOW]] = training.accuracy()
                if cell != BEFORE:
                    for number in range(failing + 1, failing + 1 + training.epoch):
                        training.step(number)
                    self.known[keys[cell, LATER]] = training.accuracy()
            for key in (key for (of, _), key in keys.items() if of == cell):
                report(key, self.known[key])
        training.restore(before)
        return {place: self.known[key] for place, key in keys.items()}


@cache  # each process loads it once
def load_task(panel: str, quick: bool, data: Path | None) -> TrainingTask:
    return (PANELS[panel].quick if quick else PANELS[panel].full)(data)
