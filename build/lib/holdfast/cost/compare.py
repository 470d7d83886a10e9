"""Comparison of runs: their costs as rows of a table, and a bar chart of their wall clock by cause."""

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from holdfast.cost.breakdown import CostBreakdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Work is blue, waiting for saves is warm, failures are dark.
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


def compare(runs: Mapping[str, CostBreakdown]) -> list[dict[str, Any]]:
    """Return a table row for each run: goodput, steps, waiting for saves, and the fraction of time for each cause."""
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


def _typical(spent: CostBreakdown) -> float | None:
    known = [failure.to_first_step for failure in spent.failures if failure.to_first_step is not None]
    return median(known) if known else None


def stacked_bars(axes: "Axes", rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> dict[str, float]:
    """Draw a stacked bar for each name in `rows`, and return the length of each bar.

    `rows` maps a name to the length of each part, and `colours` maps a part to its colour."""
    ends = dict.fromkeys(rows, 0.0)
    for part, colour in colours.items():
        # Time that was measured twice is negative; a table shows it, a bar cannot.
        widths = [max(0.0, row.get(part, 0.0)) for row in rows.values()]
        if any(widths):
            axes.barh(list(rows), widths, left=list(ends.values()), color=colour, label=part, height=0.6)
        ends = {name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)}
    axes.invert_yaxis()
    return ends


def figure(runs: Mapping[str, CostBreakdown]) -> "Figure":
    """Draw a stacked bar for each run: its wall-clock time by cause, labelled with its goodput."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(8, 1.5 + 0.6 * len(runs)), layout="constrained")
    axes = sheet.subplots()
    ends = stacked_bars(axes, {name: spent.seconds for name, spent in runs.items()}, COLOURS)
    for (name, end), spent in zip(ends.items(), runs.values(), strict=True):
        text = f"{spent.goodput:.3g} steps/s"
        axes.annotate(text, (end, name), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlabel("wall clock, seconds")
    axes.margins(x=0.15)  # room for the goodput
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return sheet
