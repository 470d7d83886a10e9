"""Runs side by side: rows that add up, and a bar for each run."""

import io

import pytest

from fake_histories import FakeHistory
from holdfast.cost.breakdown import CAUSES, CostBreakdown, cost_breakdown
from holdfast.cost.compare import COLOURS, compare, figure


def run(**parts: float) -> CostBreakdown:
    """Two steps with a save between them, and a failure that costs 3 s."""
    history = FakeHistory()
    history.launches(1.0)
    history.trains()
    history.saves(durable=1.0, **parts)
    history.trains(stall=sum(parts.values()))
    history.dies(1.0)
    history.restarts(2.0)
    history.trains()
    history.saves(durable=1.0, **parts)
    history.finishes()
    return cost_breakdown(history.events)


@pytest.fixture
def runs() -> dict[str, CostBreakdown]:
    return {"blocking": run(snapshot=0.25, write=1.0, sync=0.5), "overlapped": run(snapshot=0.25)}


def test_the_causes_of_one_run_add_up(runs: dict[str, CostBreakdown]) -> None:
    spent = runs["blocking"]
    assert list(spent.seconds) == list(spent.share) == list(CAUSES)
    assert sum(spent.seconds.values()) == pytest.approx(spent.wall)
    assert sum(spent.share.values()) == pytest.approx(1)


def test_a_row_for_each_run_tells_goodput_stall_restarts_and_shares(runs: dict[str, CostBreakdown]) -> None:
    blocking, overlapped = compare(runs)
    assert (blocking["run"], overlapped["run"]) == ("blocking", "overlapped")
    assert overlapped["goodput"] > blocking["goodput"]
    assert (blocking["stall_per_save"], overlapped["stall_per_save"]) == (pytest.approx(1.75), pytest.approx(0.25))
    assert (blocking["restarts"], blocking["rework_steps"], blocking["saves"]) == (1, 1, 2)
    assert sum(blocking[cause] for cause in CAUSES) == pytest.approx(1)


def test_the_figure_has_a_bar_of_all_causes_for_each_run(runs: dict[str, CostBreakdown]) -> None:
    sheet = figure(runs)
    (axes,) = sheet.axes
    sheet.savefig(io.BytesIO())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["blocking", "overlapped"]
    ends = [max(bars[place].get_x() + bars[place].get_width() for bars in axes.containers) for place in range(2)]
    assert ends == pytest.approx([spent.wall for spent in runs.values()], abs=1e-4)
    assert "unaccounted" not in axes.get_legend_handles_labels()[1]  # it took no time


def test_every_cause_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(CAUSES)
    assert len(set(COLOURS.values())) == len(CAUSES)
