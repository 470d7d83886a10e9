"""The style of figures: one colour for each policy and recovery, and a legend that is never cut off."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OWN = "#000000"  # the colour of policies from files of the user
COLOURS = {  # by policy, or by recovery for full checkpoints; distinct for colour-blind readers
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
LETTER, HANDLE = 0.067, 0.6  # inches of a legend whose letters have 8 points


def style_name(strategy: Strategy) -> str:
    return strategy.policy.name if strategy.policy.fraction < 1 else f"{strategy.recovery} recovery"


def colour_of(name: str) -> str:
    return COLOURS.get(name, OWN)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure (size in inches) whose PDF file has no Type 3 fonts, which many venues refuse."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["pdf.fonttype"] = 42
    return Figure(figsize=(width, height), layout="constrained")


def legend(figure: "Figure", places: Sequence["Axes"]) -> None:
    """Draw one legend for all axes in `places` at the bottom of the figure, in which each label appears once."""
    handles = {
        label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = list(COLOURS)
    handles = dict(sorted(handles.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    column = LETTER * max(map(len, handles), default=0) + HANDLE
    columns = max(1, min(len(handles), int(figure.get_figwidth() / column)))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )
