"""Figures of many panels, laid out like the paper's: up to four in a row, one legend for all.

In go panels and a function that draws one of them; out comes a figure.

The bound of Theorem 3.2 beside the measured costs of panels: where the theory predicts well, and where it does not.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.lab import confidence as interval
from holdfast.lab.partial.comparison import PanelComparison
from holdfast.lab.plot_style import BAND, COLOURS, legend, new_figure, style_name
from holdfast.lab.result import Row
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.4, 2.9  # inches of one panel


def panel_grid(
    panels: Sequence[PanelComparison], draw: Callable[["Axes", PanelComparison], None], *, across: str
) -> "Figure":
    """Draw every panel in a place of its own; costs go up."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    bound_figure = new_figure(WIDTH * max(columns, 1.4), HEIGHT * rows + 0.5)
    places = bound_figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, compared in zip(places, panels, strict=False):
        draw(axes, compared)
        axes.set_title(panel_title(compared), fontsize=9)
        axes.set_xlabel(across)
        axes.set_ylabel("iteration cost")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    legend(bound_figure, list(places[: len(panels)]))
    return bound_figure


def panel_title(compared: PanelComparison) -> str:
    """What a panel shows, in words; nobody takes a quick run for the real one."""
    quick = "quick, " if compared.quick else ""
    return f"{compared.title or compared.label} ({quick}{compared.measurement.unperturbed:.0f} iterations)"


def draw_means(axes: "Axes", rows: Sequence[Row], *, over: str, name: str, shift: float = 0) -> None:
    """Mean costs with their confidence intervals, one place for each row; a shift keeps neighbours apart."""
    places = [place + shift for place in range(len(rows))]
    means = [row["cost_mean"] for row in rows]
    half = [row["cost_high"] - row["cost_mean"] for row in rows]
    axes.errorbar(places, means, yerr=half, marker="o", markersize=4, capsize=3, label=name, color=COLOURS[name])
    axes.set_xticks(range(len(rows)), [str(row[over]) for row in rows])


def draw_late_failures(
    axes: "Axes", compared: PanelComparison, strategies: Sequence[Strategy], *, shift: float = 0
) -> None:
    """The same means over the failures after the first full checkpoint alone, as a series of its own."""
    later = compared.measurement.steps >= strategies[0].policy.interval
    if not later.any():
        return
    name = style_name(strategies[-1])
    means = [interval.mean(interval.finite(compared.measurement.of(each).cost[later])).value for each in strategies]
    axes.plot(
        np.arange(len(means)) + shift,
        means,
        marker="v",
        markersize=3,
        linestyle=":",
        color=COLOURS[name],
        label=f"{name}, late failures",
    )


def draw_paper_range(axes: "Axes", place: float, low: float, high: float) -> None:
    """The range of costs that the paper gives, at one place."""
    if not (np.isfinite(low) and np.isfinite(high)):
        return
    axes.fill_between(
        [place - 0.3, place + 0.3], low, high, color=BAND, alpha=0.5, linewidth=0, zorder=0, label="range in the paper"
    )


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def bound_remarks(panels: Sequence[PanelComparison]) -> list[str]:
    """How Theorem 3.2, with the estimated c, predicts the costs of each panel."""
    return [_remark(each) for each in panels]


def _remark(compared: PanelComparison) -> str:
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


BOUND_CAPTION = (
    "Every trial as a point: what its failure cost over what Theorem 3.2 allows. Below the line the theorem holds. Trials that "
    "did not converge are not shown."
)


def bound_figure(panels: Sequence[PanelComparison]) -> "Figure":
    """Every trial as a point, its cost over its bound; the theorem allows what is below the line."""

    def draw(axes: "Axes", compared: PanelComparison) -> None:
        measured = compared.measurement
        for name in dict.fromkeys(map(style_name, measured.strategies)):
            costs = [c for strategy, c in measured.strategies.items() if style_name(strategy) == name]
            bound, cost = np.concatenate([c.bound for c in costs]), np.concatenate([c.cost for c in costs])
            axes.scatter(bound, cost, s=6, alpha=0.5, linewidths=0, color=COLOURS[name], rasterized=True)
            axes.scatter([], [], s=24, color=COLOURS[name], label=name)  # for the legend, large enough to see
        end = max(float(np.nanmax(c.bound, initial=1)) for c in measured.strategies.values())
        axes.plot([0, end], [0, end], color="black", linewidth=0.8, label="cost = bound")

    return panel_grid(panels, draw, across="bound of Theorem 3.2")
