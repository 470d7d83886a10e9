"""The figures of a matrix: goodput by suite, what overlapping gains, where the time went, how far runs part."""

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from holdfast.cost.compare import COLOURS as CAUSES
from holdfast.lab import plot_style
from holdfast.lab.matrix.analysis import Analysis, difference, gain
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
    "goodput": "Committed steps a second by suite and variant; where there is a reference, in proportion to it.",
    "gain": "What overlapped gains over blocking in goodput, by suite, with 95 % intervals over the seeds.",
    "stall-and-gain": "Seconds of stall that overlapped saves a run, and what it gains in goodput, by suite.",
    "wall-clock": "Where the wall clock went, by variant: means of a run over all suites that count.",
    "sweep": "Goodput by what was swept over, means over all suites that count.",
    "distance": "L2 distance of the model from the reference's in proportion to its length, by snapshot; exact recoveries stay at 0.",
}


def figures(found: Analysis) -> dict[str, "Figure"]:
    """Every figure that these runs can fill, by name."""
    if not found.counted:
        return {}
    drawn = {"goodput": goodput(found), "wall-clock": wall_clock(found)}
    if found.has(BLOCKING, OVERLAPPED):
        drawn |= {"gain": gains(found), "stall-and-gain": stall_and_gain(found)}
    if found.matrix.sweep:
        drawn["sweep"] = sweep(found)
    if REFERENCE in found.variants and len(found.variants) > 1:
        drawn["distance"] = distance(found)
    return {name: drawn[name] for name in CAPTIONS if name in drawn}


def goodput(found: Analysis) -> "Figure":
    """A group of bars for each suite."""
    sheet, axes = _sheet(max(6.0, 1.2 + 1.1 * len(found.counted)), 4.2)
    places, width = np.arange(len(found.counted)), 0.85 / len(found.variants)
    for number, variant in enumerate(found.variants):
        heights = [_height(found, suite, variant) for suite in found.counted]
        axes.bar(places + number * width, heights, width, label=variant, color=COLOURS[variant])
    axes.set_xticks(places + 0.425 - width / 2, _names(found), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("goodput / the reference's" if REFERENCE in found.variants else "goodput, steps/s")
    plot_style.legend(sheet, [axes])
    return sheet


def gains(found: Analysis) -> "Figure":
    """A bar for each suite, the largest gain at the top."""
    pairs = [
        (name, found.paired(gain, lambda run: run.goodput, OVERLAPPED, BLOCKING, [suite]))
        for name, suite in zip(_names(found), found.counted, strict=True)
    ]
    pairs.sort(key=lambda pair: pair[1].value)
    sheet, axes = _sheet(7.0, 1.4 + 0.4 * len(pairs))
    values = [100 * of.value for _, of in pairs]
    axes.barh([name for name, _ in pairs], values, color=COLOURS[OVERLAPPED], height=0.6)
    for place, (_, of) in enumerate(pairs):
        if not math.isnan(of.low):
            axes.plot([100 * of.low, 100 * of.high], [place, place], color="black", linewidth=1.2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("goodput of overlapped over blocking, %")
    return sheet


def stall_and_gain(found: Analysis) -> "Figure":
    """A point for each suite."""
    sheet, axes = _sheet(6.4, 4.4)
    for number, (name, suite) in enumerate(zip(_names(found), found.counted, strict=True)):
        saved = -found.paired(difference, lambda run: run.waited, OVERLAPPED, BLOCKING, [suite]).value
        gained = 100 * found.paired(gain, lambda run: run.goodput, OVERLAPPED, BLOCKING, [suite]).value
        axes.scatter([saved], [gained], marker=MARKERS[number % len(MARKERS)], label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("stall saved a run, s")
    axes.set_ylabel("goodput of overlapped over blocking, %")
    plot_style.legend(sheet, [axes])
    return sheet


def wall_clock(found: Analysis) -> "Figure":
    """A bar for each variant, divided by cause."""
    sheet, axes = _sheet(8.0, 1.8 + 0.5 * len(found.variants))
    ends = np.zeros(len(found.variants))
    for cause, colour in CAUSES.items():
        widths = [
            max(0.0, found.mean(lambda run, cause=cause: run.seconds.get(cause, 0.0), variant))  # type: ignore[misc]
            for variant in found.variants
        ]
        if any(widths):
            axes.barh(found.variants, widths, left=ends, color=colour, label=cause, height=0.6)
        ends += widths
    axes.invert_yaxis()
    axes.set_xlabel("wall clock of a run, s")
    plot_style.legend(sheet, [axes])
    return sheet


def sweep(found: Analysis) -> "Figure":
    """Goodput over the values of each axis that is swept over, a line for each variant."""
    axes_swept = list(found.matrix.sweep)
    sheet = plot_style.new_figure(4.6 * len(axes_swept) + 0.6, 4.0)
    places = sheet.subplots(1, len(axes_swept), squeeze=False)[0]
    for axes, axis in zip(places, axes_swept, strict=True):
        values = list(dict.fromkeys(suite.axes[axis] for suite in found.counted))
        for variant in found.variants:
            parts = [[suite for suite in found.counted if suite.axes[axis] == value] for value in values]
            means = [found.mean(lambda run: run.goodput, variant, part) for part in parts]
            axes.plot(values, means, marker="o", label=variant, color=COLOURS[variant])
        axes.set_xlabel(axis)
        axes.set_ylabel("goodput, steps/s")
        axes.spines[["top", "right"]].set_visible(False)
    plot_style.legend(sheet, [places[0]])
    return sheet


def distance(found: Analysis) -> "Figure":
    """A line for each variant, the mean over suites and seeds."""
    sheet, axes = _sheet(6.4, 4.0)
    for variant in [each for each in found.variants if each != REFERENCE]:
        told: defaultdict[int, list[float]] = defaultdict(list)
        for suite in found.counted:
            for run in found.runs(suite, variant):
                for step, apart, length in run.distances or ():
                    told[step].append(apart / length if length else 0.0)
        steps = sorted(told)
        axes.plot(steps, [float(np.mean(told[step])) for step in steps], label=variant, color=COLOURS[variant])
    axes.set_xlabel("step of the snapshot")
    axes.set_ylabel("distance / length of the model")
    plot_style.legend(sheet, [axes])
    return sheet


def _height(found: Analysis, suite: object, variant: str) -> float:
    several = [each for each in found.counted if each is suite]
    own = found.mean(lambda run: run.goodput, variant, several)
    return own / found.mean(lambda run: run.goodput, REFERENCE, several) if REFERENCE in found.variants else own


def _names(found: Analysis) -> list[str]:
    """What tells the suites apart, or all that is known of the only one."""
    axes = list(dict.fromkeys(axis for axis, _, _ in found.slices()))
    return [" ".join(suite.axes[axis] for axis in axes) or suite.name for suite in found.counted]


def _sheet(width: float, height: float) -> "tuple[Figure, Axes]":
    figure = plot_style.new_figure(width, height)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
