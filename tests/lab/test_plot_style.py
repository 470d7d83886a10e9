"""Figures can be printed: legends fit the page, fonts are embedded as text, and every policy has one colour."""

import io
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from holdfast.blocks.policy import RANKINGS
from holdfast.lab.bounds.cost_bound import Contraction
from holdfast.lab.partial import partial_recovery, priority_checkpoint
from holdfast.lab.partial.comparison import Costs, Measurement, PanelComparison, cost_row
from holdfast.lab.partial.cost_report import bound_figure
from holdfast.lab.partial.panels import PANELS
from holdfast.lab.plot_style import COLOURS
from holdfast.lab.simulate.strategy import Strategy

FULL = priority_checkpoint.traditional(8)
PARTIAL = [partial_recovery.strategy(how, lost, 8) for lost in partial_recovery.LOST for how in ("full", "partial")]
PRIORITY = [
    FULL,
    *(priority_checkpoint.strategy(name, fraction, 8) for name in priority_checkpoint.RANKINGS for fraction in priority_checkpoint.FRACTIONS),
    *(priority_checkpoint.strategy(name, Fraction(1, 8), 8) for name in priority_checkpoint.BEYOND),
]  # fmt: skip


def panels(count: int, strategies: list[Strategy]) -> list[PanelComparison]:
    rng, comparisons = np.random.default_rng(0), []
    for panel in list(PANELS.values())[:count]:
        costs = {strategy.canonical: Costs(*rng.exponential(4, size=(4, 10))) for strategy in strategies}
        measured = Measurement(np.full(10, 60), np.arange(1, 41, 4), Contraction(0.9, 1.0, True, 0.9, 0.9), 0.5, costs)
        rows = [cost_row(panel.name, measured, strategy, strategies[0]) for strategy in strategies]
        comparisons.append(PanelComparison(panel.name, "w", False, 1.0, 0.1, measured, rows, panel.title, 10))
    return comparisons


def draw(which: str, count: int) -> Any:
    if which == "bound":
        return bound_figure(panels(count, PRIORITY))
    if which == "partial":
        return partial_recovery.figure(panels(count, PARTIAL), 8, paper=True)
    return priority_checkpoint.figure(panels(count, PRIORITY), 8, paper=True)


@pytest.mark.parametrize(("which", "count"), [("partial", 1), ("priority", 1), ("priority", 5), ("bound", 1)])
def test_titles_and_legends_fit_the_figure(which: str, count: int) -> None:
    figure = draw(which, count)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    parts = [*figure.legends, *(axes.title for axes in figure.axes if axes.axison)]
    for part in parts:
        box = part.get_window_extent(renderer)
        assert box.x0 >= 0, part
        assert box.y0 >= 0, part
        assert box.x1 <= figure.bbox.x1, part
        assert box.y1 <= figure.bbox.y1, part
    below = min(axes.get_tightbbox(renderer).y0 for axes in figure.axes if axes.axison)
    assert figure.legends[0].get_window_extent(renderer).y1 <= below + 1  # not over the panels


def test_the_legend_names_the_paper_range_and_late_failures() -> None:
    figure = draw("partial", 1)
    assert figure.axes[0].get_title() == "MLR on MNIST (60 iterations)"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words.count("range in the paper") == 1
    assert "partial recovery, late failures" in words


def test_a_pdf_has_no_type_3_fonts() -> None:
    file = io.BytesIO()
    draw("partial", 1).savefig(file, format="pdf")
    assert b"/Type3" not in file.getvalue()
    assert b"/FontType 42" in file.getvalue() or b"/CIDFontType2" in file.getvalue()


def test_every_policy_has_a_colour_of_its_own() -> None:
    assert set(RANKINGS) - {"full"} <= set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)
