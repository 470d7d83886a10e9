"""Runs side by side: what they cost as rows of a table, and their wall clocks by cause as bars."""

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from holdfast.cost.breakdown import CAUSES, Spent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Work is blue, waiting for saves warm, failures dark: the groups are told apart before the legend is read.
COLOURS = {
    "compute": "#2b6cb0",
    "data": "#90cdf4",
    "snapshot": "#f6e05e",
    "enqueue": "#ecc94b",
    "backpressure": "#dd6b20",
    "write": "#f6ad55",
    "sync": "#9c4221",
    "rework": "#b794f4",
    "recovery": "#553c9a",
    "startup": "#718096",
    "closing": "#a0aec0",
    "unaccounted": "#e2e8f0",
}


def by_cause(spent: Spent) -> list[dict[str, Any]]:
    """The wall clock of one run as a row for each cause; seconds add up to the wall clock and shares to 1."""
    return [{"cause": cause, "seconds": spent.seconds[cause], "share": spent.share[cause]} for cause in CAUSES]


def compare(runs: Mapping[str, Spent]) -> list[dict[str, Any]]:
    """One row for each run, by its name: what it achieved, and the share of its wall clock that each cause took."""
    return [
        {
            "run": name,
            "goodput": spent.goodput,
            "wall": spent.wall,
            "committed": spent.committed,
            "restarts": spent.restarts,
            "rework_steps": spent.rolled_back,
            "samples_lost": spent.samples_lost,
            "trains_after": _typical(spent),
            "saves": len(spent.saves),
            "stall": spent.stall.waited,
            "stall_per_save": spent.stall_per_save,
            **spent.share,
        }
        for name, spent in runs.items()
    ]


def _typical(spent: Spent) -> float | None:
    """The seconds from a failure to the next step, in the middle of all failures."""
    known = [each.to_first_step for each in spent.failures if each.to_first_step is not None]
    return median(known) if known else None


def figure(runs: Mapping[str, Spent]) -> "Figure":
    """A bar for each run, the first at the top: its wall clock by cause, with its goodput at the end."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(8, 1.5 + 0.6 * len(runs)), layout="constrained")
    axes = sheet.subplots()
    _bars(axes, runs)
    axes.set_xlabel("wall clock, seconds")
    axes.invert_yaxis()
    axes.margins(x=0.15)  # room for the goodput
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return sheet


def _bars(axes: "Axes", runs: Mapping[str, Spent]) -> None:
    names = list(runs)
    ends = [0.0] * len(names)
    for cause, colour in COLOURS.items():
        # What was measured twice is negative, and no bar can show it; the rows do.
        widths = [max(0.0, spent.seconds[cause]) for spent in runs.values()]
        if any(widths):
            axes.barh(names, widths, left=ends, color=colour, label=cause, height=0.6)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for name, end, spent in zip(names, ends, runs.values(), strict=True):
        axes.annotate(
            f"{spent.goodput:.3g} steps/s", (end, name), xytext=(4, 0), textcoords="offset points", va="center"
        )
