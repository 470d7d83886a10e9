"""An advice as a picture: what a failure costs under each recovery, and how the save interval moves the run time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.advice.advice import Advice
from holdfast.advice.estimate import Estimate
from holdfast.advice.prices import saving_of
from holdfast.advice.question import Question
from holdfast.advice.saving import SaveCosts, SaveInterval, slowdown
from holdfast.server.advice import ServedAdvice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR, MARK, QUIET = "#2b6cb0", "#dd6b20", "#a0aec0"


def figure(advice: Advice | ServedAdvice, question: Question) -> "Figure":
    """Seconds and iterations of a failure with their intervals, the share that trains over the save interval, and scale."""
    from matplotlib.figure import Figure

    large = advice.large.shares if isinstance(advice, Advice) and advice.large else {}
    sheet = Figure(figsize=(11 + 3 * bool(large), 3.6), layout="constrained")
    places = sheet.subplots(1, 3 + bool(large))
    seconds, iterations = (
        {name: getattr(each, part) for name, each in advice.prices.items()} for part in ("seconds", "iterations")
    )
    _intervals(places[0], seconds, "seconds that a failure costs")
    places[0].set_xscale("symlog", linthresh=0.01)
    _intervals(places[1], iterations, "iterations that a failure costs")
    _over(places[2], *_saving(advice, question))
    if large:
        _intervals(
            places[3], {n: each.times(100) for n, each in large.items()}, f"% that trains, {question.workers} workers"
        )
    sheet.suptitle(advice.line)
    return sheet


def _saving(advice: Advice | ServedAdvice, question: Question) -> tuple[SaveCosts, SaveInterval, int, float]:
    """Of the recommended recovery: what saving costs, the best interval, the run's own, and what failures leave besides."""
    if isinstance(advice, Advice):
        saving = saving_of(advice.costs, question, advice.mtbf.value, advice.recovery)
        outlook = advice.outlooks[advice.recovery]
        left = outlook.effective / outlook.interval.effective
        return saving, outlook.interval, advice.costs.save_every, left
    price = advice.prices[advice.recovery]
    return price.saving, price.interval, advice.costs.interval, 1.0


def _intervals(axes: "Axes", rows: Mapping[str, Estimate], across: str) -> None:
    names: Sequence[str] = list(rows)
    for place, each in enumerate(rows.values()):
        axes.plot([each.low, each.high], [place, place], color=COLOUR, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axes.plot(each.value, place, "o", color=COLOUR)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(across)
    axes.spines[["top", "right"]].set_visible(False)


def _over(axes: "Axes", saving: SaveCosts, interval: SaveInterval, now: int, left: float) -> None:
    first, last = (f(interval.best, now, interval.low, interval.high) for f in (min, max))
    every = np.unique(np.round(np.geomspace(max(1, first / 3), 3 * last, 200)))
    axes.plot(every, 100 * left / slowdown(every, saving), color=COLOUR)
    axes.axvline(interval.best, color=MARK, label=f"best: {interval.best}")
    if now != interval.best:
        axes.axvline(now, color=QUIET, linestyle="--", label=f"now: {now}")
    axes.set_xscale("log")
    axes.set_xlabel("steps between two saves")
    axes.set_ylabel("% of the wall clock that trains")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
