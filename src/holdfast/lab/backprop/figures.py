"""Figures of backprop-tradeoff, drawn only from the rows of a result, so that stored results can be drawn again."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from holdfast.lab.backprop.scenarios import LATER, NOW, PHASES, POINTS
from holdfast.lab.plot_style import legend, new_figure
from holdfast.lab.result import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"before": "#a0aec0", "baseline": "#2b6cb0", "replay": "#dd6b20", "forward": "#38a169", "skip": "#b794f4"}
KINDS = (("replay", None), ("forward", 2), ("forward", 4), ("forward", 6), ("skip", None))
RESTART_BARS = {
    "replay, mean": "replay_s",
    "replay, worst": "worst_replay_s",
    "save": "checkpoint_s",
    "restart": "restart_s",
    "mini-batch": "minibatch_s",
}
HATCHES = {2: "..", 4: "//", 6: ""}


def all_figures(rows: Sequence[Row]) -> dict[str, "Figure"]:
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    return {"training": training(rows, panels)} | {panel: tradeoff(rows, panel) for panel in panels}


def caption(name: str) -> str:
    if name == "training":
        return (
            "Above: test accuracy of training without failures, with 95 % confidence intervals. Below: the seconds that "
            "checkpoint-restart takes by the performance model, for repeated work after a failure (on average and at worst), a "
            "save, and a restart. For comparison, the last bar is the time of one mini-batch."
        )
    return (
        "Test accuracy directly after the mini-batch in which workers were lost, and an epoch later, for each point of "
        "failure and each strategy. The last row has the time of this mini-batch, divided by the time of Baseline. "
        "Bars have 95 % confidence intervals."
    )


def training(rows: Sequence[Row], panels: Sequence[str]) -> "Figure":
    """Draw figure 2 of the lossy-recovery paper: accuracy without failures, and the work that a restart repeats."""
    drawn, colour = new_figure(max(4 * len(panels), 4.8), 5.6), COLOURS["baseline"]
    for panel, above, below in zip(panels, *drawn.subplots(2, len(panels), squeeze=False), strict=True):
        own = [row for row in rows if row["panel"] == panel]
        curve = [row for row in own if row["what"] == "training"]
        epochs, means = [row["epoch"] for row in curve], [row["accuracy"] for row in curve]
        above.plot(epochs, means, marker="o", markersize=3, color=colour)
        lows, highs = ([row[f"accuracy_{end}"] for row in curve] for end in ("low", "high"))
        above.fill_between(epochs, lows, highs, alpha=0.2, color=colour)
        for epoch in {row["epoch"] for row in own if row["what"] == "accuracy"}:
            above.axvline(epoch + 0.5, color="black", linestyle=":")
        above.set_ylim(0, 1)
        above.set_xlabel("epoch (dotted: failures)")
        above.set_ylabel("test accuracy")
        above.set_title(panel, fontsize=10)
        restart = next(row for row in own if "replay_s" in row)  # by the performance model
        below.barh(list(RESTART_BARS), [restart[column] for column in RESTART_BARS.values()], color=colour)
        below.set_xscale("log")
        below.invert_yaxis()
        below.set_xlabel(f"seconds a failure,\nepoch of {restart['paper_epoch']} mini-batches")
    return drawn


def tradeoff(rows: Sequence[Row], panel: str) -> "Figure":
    """Draw figures 3 and 4 of the lossy-recovery paper for one network: accuracy after failures, and slowdown."""
    own = [row for row in rows if row["panel"] == panel]
    drawn = new_figure(13, 9)
    places = drawn.subplots(3, len(PHASES), squeeze=False)
    for column, phase in enumerate(PHASES):
        for line, when in enumerate((NOW, LATER)):
            part = [row for row in own if row.get("phase") == phase and row.get("when") == when]
            axes = places[line][column]
            for row in part:
                if row["strategy"] in ("before", "baseline"):
                    style = "--" if row["strategy"] == "before" else "-"
                    label, colour = row["strategy"].capitalize(), COLOURS[row["strategy"]]
                    axes.axhline(row["accuracy"], linestyle=style, color=colour, label=label)
            _bars(axes, part, "accuracy", marked="deviation")
            names = ("accuracy", "accuracy_low", "accuracy_high")
            ends = [row[name] for row in part for name in names if isfinite(row[name])]
            margin = max(max(ends) - min(ends), 0.02)
            axes.set_ylim(max(0, min(ends) - margin / 2), min(1, max(ends) + margin / 4))  # space below for the labels
            axes.set_ylabel("test accuracy")
            axes.set_title(f"{phase} (epoch {part[0]['epoch']}), {when}", fontsize=9)
    for axes in places[2][1:]:
        axes.set_axis_off()
    places[2][0].axhline(1, color=COLOURS["baseline"])
    _bars(places[2][0], [row for row in own if row["what"] == "slowdown"], "slowdown", marked="slowdown")
    places[2][0].set_ylabel("time over that of a mini-batch")
    legend(drawn, [places[0][0]])
    drawn.suptitle(panel)
    return drawn


def _bars(axes: "Axes", rows: Sequence[Row], value: str, *, marked: str) -> None:
    """Draw the column `value` as bars, grouped by point of failure, and write the column `marked` on the bars."""
    foot, plate = axes.get_xaxis_transform(), {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for number, (strategy, left) in enumerate(KINDS):
        mine = {row["point"]: row for row in rows if (row["strategy"], row["survivors"]) == (strategy, left)}
        places = [at + 0.16 * (number - 2) for at in range(len(POINTS))]
        heights = [mine[point][value] for point in POINTS]
        lows, highs = ([mine[point][f"{value}_{end}"] for point in POINTS] for end in ("low", "high"))
        ends = [[abs(end - height) for end, height in zip(side, heights, strict=True)] for side in (lows, highs)]
        label = strategy if left is None else f"{strategy}, {left} survive"
        bars = axes.bar(places, heights, 0.15, yerr=ends, capsize=2, label=label, color=COLOURS[strategy])
        for bar in bars:
            bar.set_hatch(HATCHES[left or 6])
            bar.set_edgecolor("white")
        for place, point in zip(places, POINTS, strict=True):
            words = f"{mine[point][marked]:+.1%}" if marked == "deviation" else f"{mine[point][marked]:.2f}x"
            axes.text(place, 0.02, words, transform=foot, bbox=plate, fontsize=6, rotation=90, ha="center", va="bottom")
    axes.set_xticks(range(len(POINTS)), [f"failure at {point:.0%}" for point in POINTS])
