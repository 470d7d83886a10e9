"""Pages about runs: what they say, what they leave out, and the files they come in."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_histories import FakeHistory, killed_once, write_history
from fake_server_histories import perturbed
from holdfast.cli.report import page_of
from holdfast.cost.run_events import of_history
from holdfast.errors import BadInput
from holdfast.events import Commit, Detect, Event, Regroup, Seconds, Step
from holdfast.history.fold import fold
from holdfast.report import figures, files, runs_page
from holdfast.report.activity import Activity, activity
from holdfast.report.lane import ACTIVITIES, COLUMNS, Bars, Lane
from holdfast.report.page import Column, Page, Statement, Table
from holdfast.report.run_data import load_run, names, run_from_history
from holdfast.report.timeline_figure import KINDS, described, left_out, timeline
from holdfast.sampler.digest import Samples
from repository import ROOT

PIECES = st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 3), st.sampled_from(sorted(KINDS))), max_size=60)


def one_after_another(parts: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return (begin, end, kind) of each part (gap before it, length, kind)."""
    pieces, now = [], 0.0
    for gap, length, kind in parts:
        begin, now = now + gap, now + gap + length
        pieces.append((begin, now, kind))
    return pieces


def longest(bars: list[tuple[float, float, str]], wall: float) -> list[int]:
    lane = Lane(wall)
    for kind in KINDS:
        of_kind = np.array([(begin, end) for begin, end, own in bars if own == kind]).reshape(-1, 2)
        lane.add(Bars(of_kind[:, 0], of_kind[:, 1], kind))
    kinds: list[int] = lane.longest().tolist()
    return kinds


def active(events: Sequence[Event]) -> Activity:
    return activity(of_history(events))


class Pieces(HTMLParser):
    """The elements of a page by tag, each with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page_of_one() -> Page:
    """The page of one run, with its figures."""
    return runs_page.page([run_from_history(killed_once(), "a")], {})


class TestThinning:
    @given(PIECES)
    def test_a_bar_is_drawn_where_it_is_and_nothing_elsewhere(self, parts: list[tuple[float, float, str]]) -> None:
        bars = one_after_another([(gap, length + 1, kind) for gap, length, kind in parts])
        wall = 4.0 * 60 + 3.0 * 60
        columns = longest(bars, wall)
        assert len(columns) == COLUMNS
        for number, kind in enumerate(columns):
            middle = (number + 0.5) * wall / COLUMNS
            inside = [own for begin, end, own in bars if begin <= middle - 0.25 and middle + 0.25 <= end]
            assert inside == [list(KINDS)[kind]] * len(inside)
            near = any(begin < middle + 0.25 and middle - 0.25 < end for begin, end, _ in bars)
            assert kind < 0 or near

    def test_a_hundred_thousand_steps_become_what_took_most_of_the_time(self) -> None:
        steps = [(0.0, 0.01, "train"), (0.0, 0.002, "wait")] * 100_000
        bars = one_after_another(steps)
        assert {list(KINDS)[kind] for kind in longest(bars, bars[-1][1])} == {"train"}

    def test_a_wait_that_is_long_enough_is_seen_between_steps_that_are_not(self) -> None:
        steps = [(0.0, 0.01, "train")] * 1000 + [(0.0, 2.0, "wait")] + [(0.0, 0.01, "train")] * 1000
        kinds = longest(one_after_another(steps), 22.0)
        assert [list(KINDS)[kind] for kind, _ in groupby(kinds)] == ["train", "wait", "train"]

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 40))
    def test_a_thinned_line_keeps_its_ends_and_its_peaks(self, values: list[float], columns: int) -> None:
        points = [(float(place), value) for place, value in enumerate(values)]
        line = figures.thinned_line(points, columns)
        assert len(line) <= max(4 * columns, len(points) if len(points) <= columns else 0)
        assert (line[0], line[-1]) == (points[0], points[-1])
        assert {min(values), max(values)} <= {value for _, value in line}
        assert line == sorted(line)


class TestActivity:
    def test_a_rank_starts_trains_waits_loses_a_step_and_recovers(self) -> None:
        found = active(killed_once())
        kinds = [ACTIVITIES[kind] for kind, _ in groupby(found.lanes[0].longest()) if kind >= 0]
        assert kinds == ["recover", "train", "wait", "undone", "recover", "train"]
        assert (found.reached, found.trained) == (4, 5)

    def test_it_ends_where_the_cost_says_and_nothing_lies_outside(self) -> None:
        events = killed_once()
        found, cost = active(events), run_from_history(events, "a").cost
        assert found.wall == cost.wall
        assert 0 < sum(found.lanes[0].seconds(kind) for kind in ACTIVITIES) <= cost.wall

    def test_steps_that_a_failure_undid_are_a_line_of_their_own(self) -> None:
        assert [line.kept for line in active(killed_once()).lines] == [True, False, True]

    def test_a_failure_is_marked_where_it_was_seen_and_a_snapshot_where_it_exists(self) -> None:
        found = active(killed_once())
        (failure,) = found.failures
        assert (failure.rank, failure.text) == (0, "SIGKILL")
        assert [save.step for save in found.saves] == [3, 4]

    def test_a_failure_that_no_supervisor_saw_is_marked_where_it_struck(self) -> None:
        history = FakeHistory()
        history.launches()
        history.trains()
        history.strikes("slow", 0)
        history.trains()
        history.finishes()
        (failure,) = active(history.events).failures
        assert (failure.text, failure.step) == ("slow", 1)

    def test_a_live_recovery_is_seen_on_every_rank(self) -> None:
        history = FakeHistory(world=2)
        history.launches()
        history.trains()
        history.passes("recovery", 0.5)
        history.rank_0(Regroup(1, 1, 1, "forward", (0,), (1,), (), seconds=0.5))
        history.trains()
        history.finishes()
        assert active(history.events).lanes[0].seconds("recover") == pytest.approx(1.0 + 0.5)


class TestTimeline:
    def test_it_names_what_failed_and_says_in_words_what_is_drawn(self) -> None:
        drawn = figures.svg(timeline(active(killed_once())), "timeline")
        assert {">failure<", ">snapshot<", ">rank 0<"} <= set(re.findall(r">[^<>]+<", drawn))
        text = described(active(killed_once()))
        assert "1 rank over" in text
        assert "2 snapshots, 1 failure (SIGKILL of rank 0" in text

    def test_a_run_of_very_many_steps_is_small_and_says_what_it_leaves_out(self) -> None:
        history = FakeHistory()
        history.launches()
        for step in range(4_000):
            history.trains(0.001, 0.009)
            if step % 100 == 99:
                history.saves(durable=0.01, snapshot=0.002)
        history.finishes()
        run = active(history.events)
        assert len(figures.svg(timeline(run), "timeline")) < 100_000
        assert "are merged" in left_out(run)

    def test_of_very_many_ranks_those_that_failed_are_drawn(self) -> None:
        history = FakeHistory(world=200)
        history.launches()
        history.trains()
        for rank in range(1, 200):
            history.reports(0, Seconds(0.25, 1.0, 0.0), rank)
        history.dies(rank=150)
        history.restarts()
        history.trains()
        history.finishes()
        run = active(history.events)
        assert ">rank 150<" in figures.svg(timeline(run), "timeline")
        assert "Only 32 of 200 ranks are shown" in left_out(run)

    def test_columns_are_more_than_a_phone_has(self) -> None:
        assert COLUMNS > 390


class TestPage:
    @pytest.mark.usefixtures("undrawn")
    def test_a_run_has_its_numbers_a_timeline_and_tables(self) -> None:
        page = runs_page.page([run_from_history(killed_once(), "a")], {"Command": "holdfast report a"})
        assert page.title == "a"
        assert "4 committed steps" in page.lead
        assert [picture.name for picture in page.pictures] == ["wall-clock", "timeline-a"]
        titles = [table.title for table in page.tables]
        assert {"Wall clock by cause", "Failures", "Attempts"} <= set(titles)
        assert "a is still running: it is audited when it has ended." in page.remarks

    def test_several_runs_are_compared_with_the_first_that_blocks_or_else_the_first(self) -> None:
        fast, slow = run_from_history(killed_once(stall=0.0), "fast"), run_from_history(killed_once(stall=3.0), "slow")
        assert runs_page.baseline([fast, slow]) is fast
        page = runs_page.page([fast, slow], {})
        assert [picture.name for picture in page.pictures] == [
            "goodput",
            "wall-clock",
            "timeline-fast",
            "timeline-slow",
        ]
        assert re.search(r">[0-9.]+ \(-[0-9.]+%\)<", page.pictures[0].svg)

    @pytest.mark.usefixtures("undrawn")
    def test_losses_are_drawn_where_steps_told_them(self) -> None:
        events = [
            event._replace(what=event.what._replace(loss=1.0 / (event.what.step + 1)))
            if isinstance(event.what, Step)
            else event
            for event in killed_once()
        ]
        run = run_from_history(events, "a")
        assert run.losses == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3)), (3, 0.25)]
        assert "loss" in [picture.name for picture in runs_page.page([run], {}).pictures]

    def test_absurd_losses_and_names_can_be_drawn(self, tmp_path: Path) -> None:
        sheet = figures.losses({"a": [(0.0, 1.7e308), (1.0, -1.7e308), (2.0, 5e-324)], "b": [(0.0, 1e300)]})
        assert figures.svg(sheet, "loss").startswith("<svg")
        assert names([Path("/a\x1b[31m\udcff")]) == ["a\\x1b[31m\\udcff"]

    def test_folders_are_called_by_as_much_of_their_path_as_it_takes(self) -> None:
        assert names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
        assert names([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]

    def test_the_page_asks_no_network_and_every_figure_has_a_description(self) -> None:
        text = files.html_text(
            runs_page.page([run_from_history(killed_once(), "a"), run_from_history(killed_once(), "b")], {})
        )
        elements = Pieces(text)
        asked = [
            attributes
            for tag, attributes in elements.found
            for name in ("src", "href")
            if (attributes.get(name) or "").startswith("http")
        ]
        assert asked == []
        assert not re.search(r"url\(\s*['\"]?http|@import", text)
        figures = [attributes for _, attributes in elements.found if attributes.get("role") == "img"]
        assert len(figures) == 4
        assert all(attributes.get("aria-label") for attributes in figures)
        ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert len(elements.of("main")) == len(elements.of("header")) == len(elements.of("footer")) == 1

    def test_names_out_of_a_strangers_folder_are_text(self) -> None:
        text = files.html_text(runs_page.page([run_from_history(killed_once(), "<img src=x onerror=alert(1)>")], {}))
        assert "<img src=x" not in text

    def test_a_scoreboard_counts_what_is_good_and_takes_the_tone_of_the_worst(self) -> None:
        verdicts = ["holds", "not resolved", "DOES NOT HOLD"]
        claims = [Statement(verdict=verdict, claim=verdict) for verdict in verdicts]
        assert [Page(title="t", lead="l", statements=claims[:n]).tone for n in range(4)] == [
            "open",
            "good",
            "open",
            "bad",
        ]
        assert "1 of 3 claims hold" in files.html_text(Page(title="t", lead="l", statements=claims))


class TestTables:
    TABLE = Table(title="Costs, all", columns=[Column("run"), Column("cost", ".1f")], rows=[["a|b", 1.25], ["c", None]])

    def test_numbers_are_shown_as_their_column_says_and_gaps_are_empty(self) -> None:
        assert [Column("cost", ".1f").show(value) for value in (1.25, None, float("inf"))] == ["1.2", "", "not finite"]
        assert Column("steps").show(12000) == "12,000"

    def test_a_page_shows_the_first_of_very_many_rows_and_says_so_and_the_csv_has_all(self) -> None:
        table = Table(title="t", columns=[Column("n")], rows=[[n] for n in range(5000)])
        text = files.html_text(Page(title="t", lead="l", statements=[], tables=[table]))
        assert text.count("<tr>") == 301
        assert "The first 300 of 5,000 rows" in text
        assert files.csv_text(["n"], table.rows).count("\n") == 5001

    def test_markdown_has_the_same_with_bars_that_do_not_end_a_cell(self) -> None:
        text = files.markdown_text(
            Page(title="t", lead="l", statements=[], tables=[self.TABLE], facts={"Made": "today"})
        )
        assert "| a\\|b | 1.2 |" in text
        assert "|---|---:|" in text
        assert "Made: today." in text

    def test_csv_has_numbers_as_they_are(self) -> None:
        assert files.csv_text(["run", "cost"], self.TABLE.rows) == "run,cost\na|b,1.25\nc,\n"


class TestPictures:
    def test_a_legend_that_is_wider_than_its_figure_is_not_cut_off(self) -> None:
        import io

        from matplotlib.figure import Figure
        from PIL import Image

        sheet = Figure(figsize=(2, 1.5), layout="constrained")
        axes = sheet.subplots()
        for number in range(6):
            axes.plot([0, 1], [0, number], label=f"a long name, number {number}")
        sheet.legend(loc="outside lower center", ncols=6)
        wide, _ = Image.open(io.BytesIO(figures.rendered(sheet, "png"))).size
        assert wide > 3 * 2 * figures.DOTS
        (box,) = re.findall(r'viewBox="([^"]*)"', figures.svg(sheet, "a"))
        assert float(box.split()[2]) > 3 * 2 * 72

    def test_a_pdf_has_its_fonts_embedded_and_none_of_type_3(self, page_of_one: Page) -> None:
        picture = page_of_one.pictures[0]
        assert picture.figure is not None
        document = figures.rendered(picture.figure, "pdf")
        assert b"/FontFile2" in document
        assert b"/Type3" not in document

    def test_the_svg_has_the_colours_of_the_page_and_ids_of_its_own(self, page_of_one: Page) -> None:
        picture = page_of_one.pictures[0]
        assert "currentColor" in picture.svg
        assert "<style" not in picture.svg
        assert all(name.startswith("wall-clock-") for name in re.findall(r'\bid="([^"]*)"', picture.svg))


class TestFolders:
    NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)

    @staticmethod
    def run(folder: Path) -> Path:
        by_file: dict[str, list[Event]] = {}
        for event in killed_once():
            by_file.setdefault(event.who, []).append(event)
        write_history(folder / "history", by_file)
        return folder

    @pytest.mark.usefixtures("undrawn")
    def test_a_folder_of_runs_stands_for_all_of_them(self, tmp_path: Path) -> None:
        self.run(tmp_path / "runs/a")
        self.run(tmp_path / "runs/b")
        page = page_of([tmp_path / "runs"], "holdfast report runs", self.NOW)
        assert page.title == "2 runs"
        assert page.facts["Made"] == "2026-01-02 03:04 UTC"
        assert [claim.claim.partition(":")[0] for claim in page.statements] == ["a", "b"]

    @pytest.mark.usefixtures("undrawn")
    def test_a_history_alone_is_a_run_too(self, tmp_path: Path) -> None:
        assert page_of([self.run(tmp_path / "a") / "history"], "c").tables

    def test_a_page_is_one_file_markdown_has_its_figures_beside_it_and_a_folder_has_all(
        self, page_of_one: Page, tmp_path: Path
    ) -> None:
        page = replace(page_of_one, pictures=page_of_one.pictures[:1])
        files.write(page, tmp_path / "one/report.html")
        assert [path.name for path in (tmp_path / "one").iterdir()] == ["report.html"]
        files.write(page, tmp_path / "two/report.md")
        beside = {path.name for path in (tmp_path / "two/figures").iterdir()}
        assert beside == {"wall-clock.png", "wall-clock.pdf"}
        assert "figures/wall-clock.png" in (tmp_path / "two/report.md").read_text()
        files.write(page, tmp_path / "three")
        assert (tmp_path / "three/report.html").exists()
        assert (tmp_path / "three/tables/failures.csv").read_text().startswith("attempt,step,failure")

    @pytest.mark.usefixtures("undrawn")
    def test_what_is_neither_and_what_is_mixed_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        with pytest.raises(BadInput, match="neither a run nor a result"):
            page_of([tmp_path / "other"], "c")
        with pytest.raises(BadInput, match="there is no folder"):
            page_of([tmp_path / "nowhere"], "c")
        result = ROOT / "docs/results/partial-recovery"
        with pytest.raises(BadInput, match=r"is a run and .* is a result of the lab"):
            page_of([self.run(tmp_path / "a"), result], "c")
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/result.json").write_text('{"experiment": "e"}')
        with pytest.raises(BadInput, match="is not a lab result of this version"):
            page_of([tmp_path / "bad"], "c")
        with pytest.raises(BadInput, match="is not a page"):
            files.check(tmp_path / "report.pdf")

    @pytest.mark.usefixtures("undrawn")
    def test_a_served_run_has_its_parts_losses_and_failures(self, tmp_path: Path) -> None:
        served = FakeHistory()
        for what in perturbed():
            served.passes("compute", 1.0)
            served.says("controller", what)
        write_history(tmp_path / "a/history", {"controller": served.events})
        page = page_of([tmp_path / "a"], "c")
        assert [picture.name for picture in page.pictures] == ["parts", "loss"]
        assert {"Parts of an iteration, mean milliseconds", "Failures"} == {table.title for table in page.tables}
        assert page.numbers[0].name == "loss"
        (failures,) = (table for table in page.tables if table.title == "Failures")
        assert failures.columns[-2].name == "loss regained after, iterations"
        assert failures.rows[0][-2] == 2
        assert not any("Theorem" in remark for remark in page.remarks)  # the distance to the optimum is not recorded
        with pytest.raises(BadInput, match=r"is a run of a parameter server and .* is a run"):
            page_of([tmp_path / "a", self.run(tmp_path / "b")], "c")

    def test_results_of_the_lab_are_read_as_they_were_written(self) -> None:
        results = ROOT / "docs/results"
        page = page_of([results / "partial-recovery"], "c")
        assert (page.title, len(page.statements), len(page.pictures)) == ("partial-recovery", 32, 2)
        both = page_of([results / "partial-recovery", results / "priority-checkpoint"], "c")
        assert both.title == "2 results"
        assert {claim.source.partition(",")[0] for claim in both.statements} == {
            "partial-recovery",
            "priority-checkpoint",
        }


def test_events_that_a_page_rests_on_are_told_by_hand_as_runs_tell_them() -> None:
    kinds = {type(event.what) for event in killed_once()}
    assert {Commit, Detect, Step} <= kinds
    assert all(event.what.samples == Samples(8) for event in killed_once() if isinstance(event.what, Step))


@pytest.mark.parametrize("loss", [0.5, None])
def test_a_report_of_folded_steps_is_that_of_their_lines(tmp_path: Path, loss: float | None) -> None:
    history = FakeHistory(world=2)
    history.launches()
    for step in range(900):
        history.trains(0.1, 0.9 + (step % 5) / 10, stall=0.2 * (step % 300 == 0))
        history.reports(step, Seconds(0.1, 0.8, 0.1), rank=1)
        if step % 300 == 299:
            history.saves(durable=0.5, snapshot=0.2)
        if step == 700:
            history.dies(rank=1)
            history.restarts()
    history.saves(durable=0.5, snapshot=0.2)
    history.finishes()
    events = [
        event._replace(what=event.what._replace(loss=loss and loss / (event.what.step + 1)))
        if isinstance(event.what, Step)
        else event
        for event in history.events
    ]
    whos = {event.who for event in events}
    folder = write_history(tmp_path / "history", {who: [e for e in events if e.who == who] for who in whos})
    lines = load_run(tmp_path, "a", audited=False)
    assert fold(folder, least=1, is_over=True)
    folded = load_run(tmp_path, "a", audited=False)
    for rank in (0, 1):
        assert folded.activity.lanes[rank].longest().tolist() == lines.activity.lanes[rank].longest().tolist()
    one, other = folded.activity, lines.activity
    assert (one.reached, one.trained, one.saves, one.failures) == (
        other.reached,
        other.trained,
        other.saves,
        other.failures,
    )
    assert (folded.settings, folded.began, one.wall) == (lines.settings, lines.began, other.wall)
    assert {*folded.losses} <= {*lines.losses}
    assert folded.losses[-1:] == lines.losses[-1:]
    if loss:
        assert len(folded.losses) < len(lines.losses) / 10
        for extreme in (min, max):
            assert extreme(value for _, value in folded.losses) == extreme(value for _, value in lines.losses)
    for line, whole in zip(one.lines, other.lines, strict=True):
        assert line.kept == whole.kept
        assert {point[1] for point in line.points} < {point[1] for point in whole.points}
        assert (line.points[0], line.points[-1]) == (pytest.approx(whole.points[0]), pytest.approx(whole.points[-1]))
