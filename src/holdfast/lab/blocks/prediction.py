"""The bound of Theorem 3.2 beside the measured costs of panels: where the theory predicts well, and where it does not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.lab.blocks.comparison import Compared
from holdfast.lab.blocks.grid import grid
from holdfast.lab.plot_style import COLOURS, kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def remarks(panels: Sequence[Compared]) -> list[str]:
    """How Theorem 3.2, with the estimated c, predicts the costs of each panel."""
    return [_remark(each) for each in panels]


def _remark(compared: Compared) -> str:
    costs = list(compared.measurement.strategies.values())
    cost, whole, bound = (np.concatenate([getattr(c, name) for c in costs]) for name in ("cost", "whole", "bound"))
    rate = compared.measurement.rate
    if np.isnan(bound).any():
        return f"{compared.label}: distances do not shrink (c = {rate.c:.3f}), so Theorem 3.2 predicts nothing."
    closeness = cost / np.maximum(bound, 1e-9)
    return (
        f"{compared.label}: {rate.words}. Of {len(cost)} trials {np.mean(whole <= np.ceil(bound)):.1%} are within the bound of "
        f"Theorem 3.2 in whole iterations, with the bound rounded up{', as it is proved' if rate.proved else ''}; counted in "
        f"fractions {np.mean(cost <= bound):.1%} are, at a median of {np.median(closeness):.2f} of the bound and at most "
        f"{np.max(closeness):.2f}."
    )


CAPTION = (
    "Every trial as a point: what its failure cost over what Theorem 3.2 allows. Below the line the theorem holds. Trials that "
    "did not converge are not shown."
)


def figure(panels: Sequence[Compared]) -> "Figure":
    """Every trial as a point, its cost over its bound; the theorem allows what is below the line."""

    def draw(axes: "Axes", compared: Compared) -> None:
        measured = compared.measurement
        for name in dict.fromkeys(map(kind, measured.strategies)):
            costs = [c for strategy, c in measured.strategies.items() if kind(strategy) == name]
            bound, cost = np.concatenate([c.bound for c in costs]), np.concatenate([c.cost for c in costs])
            axes.scatter(bound, cost, s=6, alpha=0.5, linewidths=0, color=COLOURS[name], rasterized=True)
            axes.scatter([], [], s=24, color=COLOURS[name], label=name)  # for the legend, large enough to see
        end = max(float(np.nanmax(c.bound, initial=1)) for c in measured.strategies.values())
        axes.plot([0, end], [0, end], color="black", linewidth=0.8, label="cost = bound")

    return grid(panels, draw, across="bound of Theorem 3.2")
