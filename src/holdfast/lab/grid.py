"""Figures of many panels, laid out like the paper's: up to four in a row, one legend for all."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.lab.comparison import Compared
from holdfast.lab.result import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def grid(panels: Sequence[Compared], draw: Callable[["Axes", Compared], None], *, across: str) -> "Figure":
    """Draw every panel in a place of its own; costs go up."""
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    sheet = Figure(figsize=(3.4 * columns, 2.9 * rows + 0.5), layout="constrained")
    places = sheet.subplots(rows, columns, squeeze=False).ravel()
    for axes, compared in zip(places, panels, strict=False):
        draw(axes, compared)
        axes.set_title(f"{compared.label} ({compared.measurement.unperturbed:.0f} iterations)", fontsize=9)
        axes.set_xlabel(across)
        axes.set_ylabel("iteration cost")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    handles, labels = places[0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return sheet


def series(axes: "Axes", rows: Sequence[Row], *, over: str, label: str, shift: float = 0) -> None:
    """Mean costs with their confidence intervals, one place for each row; a shift keeps neighbours apart."""
    places = [place + shift for place in range(len(rows))]
    means, half = [row["cost_mean"] for row in rows], [row["cost_high"] - row["cost_mean"] for row in rows]
    axes.errorbar(places, means, yerr=half, marker="o", markersize=4, capsize=3, label=label)
    axes.set_xticks(range(len(rows)), [str(row[over]) for row in rows])
