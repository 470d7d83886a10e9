"""Figures of a recovery matrix: goodput, gain of overlapped saves, wall-clock time, distance from the reference run."""

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from holdfast.cost.compare import COLOURS as CAUSES
from holdfast.cost.compare import stacked_bars
from holdfast.lab import plot_style
from holdfast.lab.matrix.analysis import GOODPUT, WAITED, Analysis, difference, gain
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED, REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "reference": "#718096",
    "blocking": "#dd6b20",
    "overlapped": "#2b6cb0",
    "replay": "#38a169",
    "forward": "#805ad5",
    "skip": "#d53f8c",
}
MARKERS = "os^Dv*PX"
CAPTIONS = {
    "goodput": 'Goodput of each suite and variant, divided by the goodput of the variant "reference" in the same suite, if the matrix has this variant.',
    "gain": "The goodput that overlapped saves gain over blocking saves, for each suite, with 95 % intervals over the seeds.",
    "stall-and-gain": "For each suite, overlapped saves compared with blocking saves: the seconds of stall that a run avoids (horizontal), and the goodput that it gains, in percent (vertical).",
    "wall-clock": 'The wall clock of a run by cause, for each variant, as a mean over all suites. The table "Columns of the next two tables" explains the causes.',
    "sweep": "Goodput by the swept values, means over all suites that count.",
    "distance": "L2 distance between the weights of each snapshot and the weights of the reference at the same step, divided by the norm of the weights. Variants that recover the exact state stay at 0.",
}


def figures(analysis: Analysis) -> dict[str, "Figure"]:
    if not analysis.counted:
        return {}
    drawn = {"goodput": goodput(analysis), "wall-clock": wall_clock(analysis)}
    if analysis.has(BLOCKING, OVERLAPPED):
        drawn |= {"gain": gains(analysis), "stall-and-gain": stall_and_gain(analysis)}
    if analysis.matrix.sweep:
        drawn["sweep"] = sweep(analysis)
    if REFERENCE in analysis.variants and len(analysis.variants) > 1:
        drawn["distance"] = distance(analysis)
    return {name: drawn[name] for name in CAPTIONS if name in drawn}


def goodput(analysis: Analysis) -> "Figure":
    figure, axes = _figure(max(6.0, 1.2 + 1.1 * len(analysis.counted)), 4.2)
    places, width = np.arange(len(analysis.counted)), 0.85 / len(analysis.variants)
    for number, variant in enumerate(analysis.variants):
        heights = [analysis.mean(GOODPUT, variant, [suite]) for suite in analysis.counted]
        if REFERENCE in analysis.variants:
            whole = [analysis.mean(GOODPUT, REFERENCE, [suite]) for suite in analysis.counted]
            heights = [own / reference for own, reference in zip(heights, whole, strict=True)]
        axes.bar(places + number * width, heights, width, label=variant, color=COLOURS[variant])
    axes.set_xticks(places + 0.425 - width / 2, _names(analysis), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("goodput / the reference's" if REFERENCE in analysis.variants else "goodput, steps/s")
    plot_style.legend(figure, [axes])
    return figure


def gains(analysis: Analysis) -> "Figure":
    pairs = [
        (name, analysis.paired(gain, GOODPUT, OVERLAPPED, BLOCKING, [suite]))
        for name, suite in zip(_names(analysis), analysis.counted, strict=True)
    ]
    pairs.sort(key=lambda pair: pair[1].value)
    figure, axes = _figure(7.0, 1.4 + 0.4 * len(pairs))
    values = [100 * gained.value for _, gained in pairs]
    axes.barh([name for name, _ in pairs], values, color=COLOURS[OVERLAPPED], height=0.6)
    for place, (_, gained) in enumerate(pairs):
        if not math.isnan(gained.low):
            axes.plot([100 * gained.low, 100 * gained.high], [place, place], color="black", linewidth=1.2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("goodput of overlapped over blocking, %")
    return figure


def stall_and_gain(analysis: Analysis) -> "Figure":
    figure, axes = _figure(6.4, 4.4)
    for number, (name, suite) in enumerate(zip(_names(analysis), analysis.counted, strict=True)):
        saved = -analysis.paired(difference, WAITED, OVERLAPPED, BLOCKING, [suite]).value
        gained = 100 * analysis.paired(gain, GOODPUT, OVERLAPPED, BLOCKING, [suite]).value
        axes.scatter([saved], [gained], marker=MARKERS[number % len(MARKERS)], label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("stall saved per run, s")
    axes.set_ylabel("goodput of overlapped over blocking, %")
    plot_style.legend(figure, [axes])
    return figure


def wall_clock(analysis: Analysis) -> "Figure":
    figure, axes = _figure(8.0, 1.8 + 0.5 * len(analysis.variants))
    stacked_bars(axes, {variant: analysis.mean_seconds(variant) for variant in analysis.variants}, CAUSES)
    axes.set_xlabel("wall clock of a run, s")
    plot_style.legend(figure, [axes])
    return figure


def sweep(analysis: Analysis) -> "Figure":
    axes_swept = list(analysis.matrix.sweep)
    figure = plot_style.new_figure(4.6 * len(axes_swept) + 0.6, 4.0)
    places = figure.subplots(1, len(axes_swept), squeeze=False)[0]
    for axes, axis in zip(places, axes_swept, strict=True):
        values = analysis.values(axis)
        for variant in analysis.variants:
            parts = [[suite for suite in analysis.counted if suite.axes[axis] == value] for value in values]
            means = [analysis.mean(GOODPUT, variant, part) for part in parts]
            axes.plot(values, means, marker="o", label=variant, color=COLOURS[variant])
        axes.set_xlabel(axis)
        axes.set_ylabel("goodput, steps/s")
        axes.spines[["top", "right"]].set_visible(False)
    plot_style.legend(figure, [places[0]])
    return figure


def distance(analysis: Analysis) -> "Figure":
    figure, axes = _figure(6.4, 4.0)
    for variant in [name for name in analysis.variants if name != REFERENCE]:
        distances: defaultdict[int, list[float]] = defaultdict(list)
        for suite in analysis.counted:
            for run in analysis.runs(suite, variant):
                for step, apart, length in run.distances or ():
                    distances[step].append(apart / length if length else 0.0)
        steps = sorted(distances)
        axes.plot(steps, [float(np.mean(distances[step])) for step in steps], label=variant, color=COLOURS[variant])
    axes.set_xlabel("step of the snapshot")
    axes.set_ylabel("distance / norm of the model")
    plot_style.legend(figure, [axes])
    return figure


def _names(analysis: Analysis) -> list[str]:
    axes = list(dict.fromkeys(axis for axis, _, _ in analysis.slices()))
    return [" ".join(suite.axes[axis] for axis in axes) or suite.name for suite in analysis.counted]


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    figure = plot_style.new_figure(width, height)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
