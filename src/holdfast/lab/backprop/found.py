"""What one panel of `backprop-tradeoff` showed: trial by trial, and by the clock."""

from dataclasses import dataclass

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab import confidence as interval
from holdfast.lab.backprop.panels import BackpropPanel
from holdfast.lab.backprop.performance_model import Prices, mean_checkpoint_restart
from holdfast.lab.backprop.scenarios import BASELINE, INTERRUPTED, NOW, PHASES, POINTS, Cell, TrialOutcome
from holdfast.lab.confidence import ConfidenceInterval

LEAST = 0.01  # of a mini-batch: an overhead below it is not told from none


@dataclass(frozen=True, slots=True, eq=False)
class PanelResults:
    """What one panel showed: trial by trial, and by the clock."""

    panel: BackpropPanel
    data: str
    quick: bool
    phases: tuple[int, ...]
    steps: int  # mini-batches of an epoch
    outcomes: list[TrialOutcome]
    slowdown: dict[Cell, Floats]
    prices: Prices
    predicted: dict[float, float]
    replayed: tuple[float, float]

    @property
    def label(self) -> str:
        """The panel for a reader, who must not take a quick run for the real one."""
        return f"{self.panel.name}, quick on {self.data}" if self.quick else self.panel.name

    def accuracy(self, phase: str, cell: Cell, when: str = NOW) -> Floats:
        """The accuracy of every trial."""
        return np.array([outcome.accuracy[phase, cell, when] for outcome in self.outcomes])

    def deviation(self, phase: str, cell: Cell, when: str = NOW) -> Floats:
        """The accuracy over that of Baseline in the same trial, less 1."""
        return self.accuracy(phase, cell, when) / np.maximum(self.accuracy(phase, BASELINE, when), 1e-9) - 1

    def took(self, strategy: str, point: float | None = None) -> ConfidenceInterval:
        """The slowdown of a strategy, over all its cells or those of one point."""
        cells = [c for c in INTERRUPTED if c.strategy == strategy and point in (None, c.point)]
        return interval.median(np.stack([self.slowdown[cell] for cell in cells], axis=1))

    def dearer(self, strategy: str) -> ConfidenceInterval:
        """How many times the work that checkpoint-restart does again outweighs that of a strategy, both as overhead."""
        again = mean_checkpoint_restart(self.prices, epoch=self.panel.epoch).replay / self.prices.minibatch
        value, low, high = (max(each - 1, LEAST) for each in self.took(strategy, POINTS[-1]))
        return ConfidenceInterval(again / value, again / high, again / low)

    def worst(self, strategy: str) -> tuple[str, Cell, ConfidenceInterval]:
        """The scenario in which a strategy is on average farthest from Baseline right after the mini-batch."""
        of = {
            (phase, cell): interval.few(np.abs(self.deviation(phase, cell)))
            for phase in PHASES
            for cell in INTERRUPTED
            if cell.strategy == strategy
        }
        phase, cell = max(of, key=lambda each: of[each].value)
        return phase, cell, of[phase, cell]
