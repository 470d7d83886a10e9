"""Figures of sharded-tradeoff, drawn only from the rows of a result, so that stored results can be drawn again."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from holdfast.lab import confidence
from holdfast.lab.plot_style import legend, new_figure
from holdfast.lab.result import Row
from holdfast.lab.sharded.shard_failures import LOST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "rollback": "#4d4d4d",
    "whole": "#0072b2",
    "fresh": "#009e73",
    "fresh-averaged": "#e69f00",
    "fresh-zeroed": "#cc79a7",
    "zero-weights": "#d55e00",
    "neighbours": "#332288",
    "shadow": "#000000",
    "noise": "#a0aec0",
}
CAPTIONS = {
    "cost": "Mean lag after a failure, with its 95 % interval, by the part of the ranks that was lost. The grey band is the "
    "noise floor. The dashed line is the exact cost of a rollback: the mean age of the newest snapshot. The vertical scale is "
    "linear between -1 and 1, and logarithmic outside.",
    "repeated": "Validation loss of long runs with many failures. In every step, each rank fails with the chance above the "
    "plot. The curves of rollback and shadow are computed, without further training: the curve of shadow is that of the "
    "undisturbed run, and under rollback, each failure moves the run back on this curve, to the newest snapshot.",
    "bound": "Each point is a trial: one failure and one strategy. The vertical axis has the lag, the horizontal axis the "
    "bound of Theorem 3.2. Below the line (cost = bound), the lag is smaller than the bound. Strategies that change no "
    "weight are not shown.",
}


def all_figures(rows: Sequence[Row]) -> dict[str, "Figure"]:
    """Return the figures of single failures, of repeated failures, and of the bound."""
    trials = [row for row in rows if row["kind"] == "trial"]
    repeated = [row for row in rows if row["kind"] == "repeated"]
    return {"cost": _cost(trials), "repeated": _repeated(repeated), "bound": _bound(trials)}


def _cost(trials: Sequence[Row]) -> "Figure":
    intervals = sorted({row["interval"] for row in trials if row["interval"]})
    drawn = new_figure(4.3 * len(intervals), 4.6)
    places = drawn.subplots(1, len(intervals), sharey=True, squeeze=False)[0]
    floor = float(np.sqrt(np.mean([row["lag"] ** 2 for row in trials if row["strategy"] == "noise"])))
    for axes, interval in zip(places, intervals, strict=True):
        own = [row for row in trials if row["interval"] in (None, interval)]
        axes.axhspan(-floor, floor, color=COLOURS["noise"], alpha=0.4, linewidth=0, label="noise")
        ages = [row["age"] for row in own if row["strategy"] == "rollback"]
        axes.axhline(float(np.mean(ages)), color=COLOURS["rollback"], linestyle="--", label="rollback")
        for place, name in enumerate(name for name in COLOURS if name not in ("rollback", "noise")):
            _draw_lags(axes, [row for row in own if row["strategy"] == name], name, 0.06 * (place - 3))
        axes.set_yscale("symlog", linthresh=1)
        axes.set_xticks(range(len(LOST)), [str(lost) for lost in LOST])
        axes.set_xlabel("part of the ranks that was lost")
        axes.set_title(f"snapshot every {interval} steps", fontsize=10)
    places[0].set_ylabel("steps behind the undisturbed run")
    legend(drawn, [places[0]])
    return drawn


def _draw_lags(axes: "Axes", rows: Sequence[Row], name: str, shift: float) -> None:
    losses = sorted({Fraction(row["lost"]) for row in rows})
    means = [
        confidence.mean(np.array([row["lag"] for row in rows if Fraction(row["lost"]) == lost])) for lost in losses
    ]
    values = [mean.value for mean in means]
    ends = [[mean.value - mean.low for mean in means], [mean.high - mean.value for mean in means]]
    at = [LOST.index(lost) + shift for lost in losses]
    axes.errorbar(
        at, values, yerr=np.nan_to_num(ends), fmt="o", markersize=4, capsize=2, color=COLOURS[name], label=name
    )


def _repeated(rows: Sequence[Row]) -> "Figure":
    rates = sorted({row["rate"] for row in rows})
    drawn = new_figure(4.6 * len(rates), 3.8)
    places = drawn.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(places, rates, strict=True):
        for name in dict.fromkeys(row["strategy"] for row in rows):
            own = [row for row in rows if (row["rate"], row["strategy"]) == (rate, name)]
            steps = sorted({row["step"] for row in own})
            losses = [np.mean([row["loss"] for row in own if row["step"] == step]) for step in steps]
            style = "--" if name in ("rollback", "shadow") else "-"
            axes.plot(steps, losses, style, color=COLOURS[name], linewidth=1.3, label=name)
        axes.set_title(f"chance {rate:g} for a rank and step", fontsize=10)
        axes.set_xlabel("steps trained")
    places[0].set_ylabel("validation loss")
    legend(drawn, list(places))
    return drawn


def _bound(trials: Sequence[Row]) -> "Figure":
    perturbed = [row for row in trials if row["bound"] > 0 and row["strategy"] not in ("noise", "shadow")]
    drawn = new_figure(6, 4.8)
    axes = drawn.subplots()
    for name in dict.fromkeys(row["strategy"] for row in perturbed):
        own = [row for row in perturbed if row["strategy"] == name]
        axes.plot([row["bound"] for row in own], [row["lag"] for row in own], "o", markersize=4, alpha=0.6,
                  color=COLOURS[name], label=name)  # fmt: skip
    bounds = [row["bound"] for row in perturbed] or [1.0]
    line = np.geomspace(min(bounds), max(bounds))
    axes.plot(line, line, color="tab:red", linewidth=1, label="cost = bound")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("bound of Theorem 3.2, steps")
    axes.set_ylabel("steps behind the undisturbed run")
    legend(drawn, [axes])
    return drawn
