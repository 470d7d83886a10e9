"""Scenarios of failures inside back-propagation: phases of training, points of failure, casualties, and strategies.

In goes the number of a trial; out comes the accuracy after every way to end the mini-batch that failed.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.lab.backprop.panels import PANELS, WORKERS, TrainingTask
from holdfast.lab.simulate.process_pool import Report
from holdfast.lab.simulate.strategy import trial_stream

if TYPE_CHECKING:
    from holdfast.lab.backprop.simulated_workers import Interruption, WorkerGradients
    from holdfast.lab.backprop.training import State, Training

PHASES = ("early", "middle", "late")
POINTS = (0.25, 0.5, 0.75)
SURVIVORS = (2, 4, 6)  # of 8
NOW, LATER = "immediately", "an epoch later"


@dataclass(frozen=True, slots=True)
class Cell:
    """What becomes of the mini-batch of a scenario; survivors matter to `forward` alone."""

    strategy: str
    point: float | None = None
    survivors: int | None = None

    @property
    def name(self) -> str:
        """The cell in words, as tables and journals have it."""
        parts = [self.strategy] + ([] if self.point is None else [f"at {self.point:.0%}"])
        return " ".join(parts + ([] if self.survivors is None else [f"{self.survivors} survive"]))

    def interruption(self, order: list[int]) -> "Interruption | None":
        """The failure, or None where nothing fails; the first workers of `order` survive."""
        from holdfast.lab.backprop.simulated_workers import Interruption

        if self.point is None:
            return None
        lost = order[self.survivors or 0 :] if self.strategy == "forward" else order[1:]
        return Interruption(strategy=self.strategy, point=self.point, casualties=frozenset(lost))


BEFORE, BASELINE = Cell("before"), Cell("baseline")
INTERRUPTED = tuple(
    cell
    for point in POINTS
    for cell in (Cell("replay", point), Cell("skip", point), *(Cell("forward", point, left) for left in SURVIVORS))
)
CELLS = (BEFORE, BASELINE, *INTERRUPTED)
MEASURED = [(cell, when) for cell in CELLS for when in (NOW, LATER) if (cell, when) != (BEFORE, LATER)]


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """One trial: the accuracy after every epoch without failures, and after every cell of every phase."""

    curve: list[float]
    accuracy: dict[tuple[str, Cell, str], float]


@dataclass(frozen=True, slots=True)
class Scenarios:
    """All scenarios of one panel. Called with the number of a trial, they train it and give its accuracies."""

    panel: str
    quick: bool
    data: Path | None
    seed: int
    known: dict[str, float] = field(default_factory=dict)

    def __call__(self, number: int, tell: Report) -> TrialOutcome:
        """Run a trial; tells the key and the accuracy of every cell once known."""
        import torch

        from holdfast.lab.backprop.training import Training, device

        torch.set_num_threads(1)  # trials are shared out among processes, and then none depends on how many
        torch.backends.cudnn.deterministic = True
        training = Training(load_task(self.panel, self.quick, self.data), trial_stream(self.seed, number), device())
        order = np.random.default_rng((self.seed, number)).permutation(WORKERS).tolist()
        curve, accuracy, done = [training.accuracy()], dict[tuple[str, Cell, str], float](), 0
        for phase, epoch in zip(PHASES, training.subject.phases, strict=True):
            failing = epoch * training.epoch + training.epoch // 2
            for step in range(done, failing):
                training.step(step)
                if (step + 1) % training.epoch == 0:
                    curve.append(training.accuracy())
            for (cell, when), value in self._phase(training, failing, order, tell).items():
                accuracy[phase, cell, when] = value
            done = failing
        return TrialOutcome(curve, accuracy)

    def _phase(
        self, training: "Training", failing: int, order: list[int], tell: Report
    ) -> dict[tuple[Cell, str], float]:
        from holdfast.lab.backprop.simulated_workers import compute_gradients

        before = training.state()
        keys = {each: f"{before.digest}/{each[0].name}/{each[1]}" for each in MEASURED}
        if not all(key in self.known for key in keys.values()):
            from torch.nn.functional import cross_entropy

            first = compute_gradients(training.model, training.shares(failing), cross_entropy)
            for cell in CELLS:
                if not all(keys[each] in self.known for each in keys if each[0] == cell):
                    self._cell(training, before, first, failing, cell, order)
                    self._measure(training, failing, cell, keys, tell)
            training.go_back(before)
        else:
            for key in keys.values():
                tell(key, self.known[key])
        return {each: self.known[key] for each, key in keys.items()}

    def _cell(
        self,
        training: "Training",
        before: "State",
        first: "list[WorkerGradients]",
        failing: int,
        cell: Cell,
        order: list[int],
    ) -> None:
        """Bring the training to where the cell leaves it. All cells have the first gradients in common."""
        from torch.nn.functional import cross_entropy

        from holdfast.lab.backprop.simulated_workers import apply_gradients, train_minibatch

        training.go_back(before)
        if cell == BEFORE:
            return
        if apply_gradients(training.model, training.optimizer, first, cell.interruption(order)):
            train_minibatch(training.model, training.optimizer, training.shares(failing), cross_entropy)

    def _measure(
        self, training: "Training", failing: int, cell: Cell, keys: dict[tuple[Cell, str], str], tell: Report
    ) -> None:
        self._note(keys[cell, NOW], training.accuracy(), tell)
        if cell != BEFORE:
            training.steps(failing + 1, failing + 1 + training.epoch)
            self._note(keys[cell, LATER], training.accuracy(), tell)

    def _note(self, key: str, value: float, tell: Report) -> None:
        self.known[key] = value
        tell(key, value)


@cache
def load_task(panel: str, quick: bool, data: Path | None) -> TrainingTask:
    """The subject of a panel, read once in a process."""
    return PANELS[panel].subject(data, quick=quick)
