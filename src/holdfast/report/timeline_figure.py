"""The timeline figure of a run: its training progress, and below it one bar for the activity of each rank."""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.finding import counted
from holdfast.report.activity import MOST_LANES, Activity
from holdfast.report.figures import LOSS, SAVED, styled, thinned_line
from holdfast.report.lane import COLUMNS
from holdfast.report.page import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMED = 6  # failures that the description names
KINDS = {
    "train": ("#3b6fd4", "training"),
    "undone": ("#a78bda", "training undone by a failure"),
    "wait": ("#e0a32e", "waiting for a save"),
    "recover": ("#a9b1bd", "starting or recovering"),
}


def timeline(run: Activity) -> "Figure":
    """Draw the steps of a run over time, with its snapshots and failures, and the activity of each rank."""
    from matplotlib.figure import Figure

    height = 0.4 + 0.25 * len(run.lanes)
    with styled():
        sheet = Figure(figsize=(9, 3.2 + height), layout="constrained")
        curve, lanes = sheet.subplots(2, sharex=True, height_ratios=(2.2, height))
        _draw_progress(curve, run)
        _draw_lanes(lanes, run)
        lanes.set(xlim=(0, run.wall or 1.0), xlabel="seconds")
        handles = [part for axes in (lanes, curve) for part in axes.get_legend_handles_labels()[0]]
        sheet.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    return sheet


def described(run: Activity) -> str:
    """Return a sentence that describes the timeline: its ranks, duration, steps, snapshots and failures."""
    failures = [f"{mark.text} of rank {mark.rank} after {duration(mark.at)}" for mark in run.failures[:MOST_NAMED]]
    more = f" and {len(run.failures) - MOST_NAMED} more" if len(run.failures) > MOST_NAMED else ""
    parts = [
        f"{counted(run.ranks, 'rank')} over {duration(run.wall)}",
        f"{run.reached:,} steps",
        counted(len(run.saves), "snapshot"),
        f"{counted(len(run.failures), 'failure')} ({', '.join(failures)}{more})" if failures else "nothing failed",
    ]
    return ", ".join(parts) + "."


def left_out(run: Activity) -> str:
    """Return sentences on what the timeline merges or omits; an empty string if it shows everything."""
    sentences = []
    least = run.wall / COLUMNS
    if any(lane.shortest < least for lane in run.lanes.values()):
        sentences.append(f"Pieces shorter than {duration(least)} are merged with their neighbours.")
    if run.ranks > MOST_LANES:
        sentences.append(f"Only {MOST_LANES} of {run.ranks} ranks are shown, the failed ones first.")
    return " ".join(sentences)


def _draw_progress(axes: "Axes", run: Activity) -> None:
    for before, line in zip([None, *run.lines], run.lines, strict=False):
        if before is not None:
            at, steps = zip(before.points[-1], line.points[0], strict=True)
            axes.plot(at, steps, color=KINDS["recover"][0], linestyle=":")
        at, steps = zip(*thinned_line(line.points, COLUMNS // 2), strict=True)
        axes.plot(at, steps, color=KINDS["train" if line.kept else "undone"][0])
    if run.saves:
        at, steps = zip(*thinned_line([(mark.at, mark.step) for mark in run.saves], COLUMNS // 10), strict=True)
        axes.plot(at, steps, "o", color=SAVED, markersize=4, label="snapshot")
    for mark in run.failures:
        axes.axvline(mark.at, color=LOSS, linewidth=0.9, linestyle=(0, (2, 3)))
    axes.grid(visible=True, axis="y")
    axes.set(ylim=(0, None), ylabel="steps")


def _draw_lanes(axes: "Axes", run: Activity) -> None:
    from matplotlib.colors import ListedColormap

    ranks, colours = list(run.lanes), ListedColormap([colour for colour, _ in KINDS.values()])
    for colour, word in KINDS.values():
        axes.bar(0, 0, color=colour, label=word)  # for the legend
    for place, rank in enumerate(ranks):
        image = np.ma.masked_less(run.lanes[rank].longest(), 0)[None]
        extent = (0.0, run.wall or 1.0, place + 0.35, place - 0.35)
        axes.imshow(image, colours, vmin=0, vmax=len(KINDS) - 1, aspect="auto", interpolation="none", extent=extent)
    failures = [(mark.at, ranks.index(mark.rank)) for mark in run.failures if mark.rank in ranks]
    if failures:
        at, places = zip(*failures, strict=True)
        axes.plot(at, places, "X", color=LOSS, markersize=8, label="failure")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.tick_params(length=0)
