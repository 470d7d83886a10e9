"""The bound of Theorem 3.2 beside the measured costs of panels: where the theory predicts well, and where it does not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.lab.comparison import Compared
from holdfast.lab.grid import grid
from holdfast.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def remarks(panels: Sequence[Compared]) -> list[str]:
    """How Theorem 3.2, with the estimated c, predicts the costs of each panel."""
    return [_remark(each) for each in panels]


def _remark(compared: Compared) -> str:
    costs = list(compared.measurement.strategies.values())
    cost, bound = np.concatenate([c.cost for c in costs]), np.concatenate([c.bound for c in costs])
    rate = compared.measurement.rate
    if np.isnan(bound).any():
        return f"{compared.label}: distances do not shrink (c = {rate.c:.3f}), so Theorem 3.2 predicts nothing."
    return (
        f"{compared.label}: c = {rate.c:.4f}, of one run; {np.mean(cost <= bound + 1):.0%} of trials are within the bound of "
        f"Theorem 3.2, at a median of {np.median(cost / np.maximum(bound, 1e-9)):.2f} of it."
    )


def figure(panels: Sequence[Compared]) -> "Figure":
    """Every trial as a point, its cost over its bound; the theorem allows what is below the line."""

    def draw(axes: "Axes", compared: Compared) -> None:
        measured = compared.measurement
        for number, name in enumerate(dict.fromkeys(map(_kind, measured.strategies))):
            costs = [c for strategy, c in measured.strategies.items() if _kind(strategy) == name]
            bound, cost = np.concatenate([c.bound for c in costs]), np.concatenate([c.cost for c in costs])
            axes.scatter(bound, cost, s=6, alpha=0.5, linewidths=0, color=f"C{number}", rasterized=True)
            axes.scatter([], [], s=24, color=f"C{number}", label=name)  # for the legend, large enough to see
        end = max(float(np.nanmax(c.bound, initial=1)) for c in measured.strategies.values())
        axes.plot([0, end], [0, end], color="black", linewidth=0.8, label="cost = bound")

    return grid(panels, draw, across="bound of Theorem 3.2")


def _kind(strategy: Strategy) -> str:
    return strategy.policy.ranking if strategy.policy.fraction < 1 else f"{strategy.recovery} recovery"
