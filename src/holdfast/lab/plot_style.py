"""How figures look: one colour for one policy and one recovery everywhere, and a legend that is never cut off."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {  # of a policy that saves some blocks, or of a recovery from full checkpoints; apart for colour-blind readers
    "full recovery": "#4d4d4d",
    "partial recovery": "#0072b2",
    "fresh recovery": "#332288",
    "priority": "#d55e00",
    "round": "#009e73",
    "random": "#cc79a7",
    "relative": "#e69f00",
    "threshold": "#56b4e9",
}
MARKERS = {"relative": "s", "threshold": "D"}
BAND = "#f0e442"  # the range that the paper gives
LETTER, HANDLE = 0.067, 0.6  # inches of a legend in which letters have 8 points


def style_name(strategy: Strategy) -> str:
    """What a strategy is drawn as: by its policy, or where that saves everything by its recovery."""
    return strategy.policy.ranking if strategy.policy.fraction < 1 else f"{strategy.recovery} recovery"


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure whose text stays text in a PDF: venues refuse the fonts of type 3 that matplotlib would write."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["pdf.fonttype"] = 42
    return Figure(figsize=(width, height), layout="constrained")


def legend(figure: "Figure", places: Sequence["Axes"]) -> None:
    """One legend below everything, in as many columns as fit the width; what several places have is in it once."""
    found = {label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = list(COLOURS)
    found = dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    column = LETTER * max(map(len, found), default=0) + HANDLE
    columns = max(1, min(len(found), int(figure.get_figwidth() / column)))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
