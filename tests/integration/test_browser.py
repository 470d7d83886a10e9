"""Pages in a real browser: nothing goes wrong in them, they can be read on a phone, sorted by hand and by key, and stay alive."""

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from fake_histories import FakeHistory, killed_once, write_history
from holdfast.audit.verdicts import audit
from holdfast.cli.report import page_of
from holdfast.events import line
from holdfast.report import files, runs_page
from holdfast.report.run_data import run_from_history
from holdfast.watch import web
from repository import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SOON = 0.2  # seconds
WITHIN = 60_000.0  # milliseconds: a machine that others use too
RESULTS = ROOT / "docs/results"
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"there is no browser here: none of {', '.join(NAMES)}")
# What sticks out of the page: of all that is shown, and that no box scrolls, what ends right of the window.
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((each) => {
  const box = each.getBoundingClientRect();
  const inside = each.closest(".scroll, .drawing, .unseen, thead") || each.ownerSVGElement;
  return !inside && box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((each) => each.outerHTML.slice(0, 80))"""
# Of text and what is behind it, the contrast as WCAG counts it.
CONTRAST = """(selector) => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (each) => { for (; each; each = each.parentElement) {
    const c = parts(getComputedStyle(each).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } };
  return Math.min(...[...document.querySelectorAll(selector)].filter((each) => each.checkVisibility()).map((each) => {
    const [a, b] = [light(parts(getComputedStyle(each).color)), light(behind(each))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=FOUND, args=FLAGS, timeout=WITHIN)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page about several runs, and one about a result of the lab with claims that do not hold."""
    folder = tmp_path_factory.mktemp("pages")
    told = {name: killed_once(stall=stall) for name, stall in (("blocking", 2.0), ("b", 0.5), ("c", 0.1))}
    three = [run_from_history(events, name, findings=audit(events)) for name, events in told.items()]
    return {
        "runs": files.write(runs_page.page(three, {"Command": "holdfast report blocking b c"}), folder / "runs.html"),
        "result": files.write(page_of([RESULTS / "partial-recovery"], "c"), folder / "result.html"),
    }


class Opened:
    """A page in a window, and what the browser complained of."""

    def __init__(self, browser: "Browser", address: str, size: dict[str, int], scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        self.context.set_default_timeout(WITHIN)
        self.page: Page = self.context.new_page()
        self.console_messages: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.console_messages.append(message.text))
        self.page.on("pageerror", lambda error: self.console_messages.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *how: object) -> None:
        self.context.close()

    def column(self, table: str, place: int) -> list[str]:
        return self.page.locator(f"#{table} tbody td:nth-child({place + 1})").all_inner_texts()


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [
        ("runs", DESK, "light"),
        ("runs", DESK, "dark"),
        ("runs", PHONE, "light"),
        ("runs", PHONE, "dark"),
        ("result", DESK, "light"),
        ("result", PHONE, "dark"),
    ],
    ids=lambda value: f"{value['width']} px" if isinstance(value, dict) else value,
)
def test_a_page_shows_claims_and_figures_without_complaint_and_within_its_window(
    browser: "Browser", pages: dict[str, Path], tmp_path: Path, name: str, size: dict[str, int], scheme: str
) -> None:
    with Opened(browser, pages[name].as_uri(), size, scheme) as opened:
        page = opened.page
        assert page.locator("#scoreboard .score").is_visible()
        assert page.locator("#table-claims tbody tr").first.is_visible()
        for figure in page.locator("figure").all():
            shown = figure.locator("svg:visible, img:visible").first.bounding_box()
            assert shown is not None
            assert shown["width"] > 100
            assert shown["height"] > 20
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(CONTRAST, "p, h1, h2, h3, td, th button, dt, dd, figcaption, li, .pill, code") >= 4.5
        page.screenshot(path=tmp_path / f"{name}-{size['width']}-{scheme}.png", full_page=True)
        assert (tmp_path / f"{name}-{size['width']}-{scheme}.png").stat().st_size > 10_000
        assert opened.console_messages == []
        assert [each for each in opened.asked if not each.startswith(("file:", "data:"))] == []


def test_tables_sort_by_a_click_and_by_keys_and_say_so(browser: "Browser", pages: dict[str, Path]) -> None:
    with Opened(browser, pages["runs"].as_uri(), DESK) as opened:
        head = opened.page.locator("#table-runs-side-by-side th").nth(1)
        numbers = [float(text) for text in opened.column("table-runs-side-by-side", 1)]
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        assert [float(text) for text in opened.column("table-runs-side-by-side", 1)] == sorted(numbers, reverse=True)
        head.locator("button").focus()
        opened.page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert [float(text) for text in opened.column("table-runs-side-by-side", 1)] == sorted(numbers)
        opened.page.keyboard.press("Shift+Tab")
        opened.page.keyboard.press("Space")
        assert opened.column("table-runs-side-by-side", 0) == ["b", "blocking", "c"]
        assert head.get_attribute("aria-sort") == "none"
        assert opened.page.locator("#said").inner_text() == "Sorted by run, ascending."
        assert opened.console_messages == []


def test_colours_follow_the_system_until_a_reader_chooses_others(browser: "Browser", pages: dict[str, Path]) -> None:
    def paper(opened: Opened) -> str:
        return str(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with Opened(browser, pages["runs"].as_uri(), DESK, "dark") as opened:
        dark = paper(opened)
        switch = opened.page.locator("#theme")
        switch.click()
        assert switch.inner_text() == "Colours: light"
        light = paper(opened)
        assert light != dark
        opened.page.reload()
        assert paper(opened) == light, "the choice is forgotten"
        switch.click()
        assert paper(opened) == dark


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is followed, and asks, several times a second."""
    monkeypatch.setattr(web, "OFTEN", SOON)
    monkeypatch.setattr(web, "SELDOM", 1.0)
    monkeypatch.setattr(files, "REFRESH", SOON)


@pytest.mark.usefixtures("soon")
def test_a_live_page_follows_its_run_and_keeps_what_a_reader_did(browser: "Browser", tmp_path: Path) -> None:
    """A run of which one more save and two more steps are written while the page is open."""
    told = FakeHistory()
    told.launches()
    told.trains()
    told.saves(durable=0.5, snapshot=0.25)
    told.trains()
    (tmp_path / "run").mkdir()
    files: dict[str, list[object]] = {"supervisor": [], "rank-0": []}
    for event in told.events:
        files[event.who].append(event)
    folder = write_history(tmp_path / "run/history", files)  # type: ignore[arg-type]
    so_far = len(told.events)
    site, stop = (
        web.Site(tmp_path / "run", partial(page_of, [tmp_path / "run"], "holdfast watch run --web", live=True)),
        Flag(),
    )
    with web.served(site) as address, Opened(browser, address, DESK) as opened:
        following = Thread(target=web.follow, args=(site, stop))
        following.start()
        try:
            committed = opened.page.locator(".numbers div", has_text="committed").last.locator("dd")
            assert committed.inner_text().startswith("1")
            opened.page.locator("#table-wall-clock-by-cause th button").first.click()
            opened.page.evaluate("document.querySelector('main').dataset.same = 'yes'; scrollTo(0, 400)")
            told.trains()
            told.saves(durable=0.5, snapshot=0.25)
            told.trains()
            with (folder / "rank-0.jsonl").open("ab") as history:
                history.writelines(line(*event) for event in told.events[so_far:])
            opened.page.locator(".lead", has_text="3 committed").wait_for()
            assert opened.page.evaluate("document.querySelector('main').dataset.same") == "yes", "the page was reloaded"
            assert opened.page.evaluate("scrollY") == 400
            sorted_by = opened.page.locator("#table-wall-clock-by-cause th").first.get_attribute("aria-sort")
            assert sorted_by == "ascending"
            names = opened.column("table-wall-clock-by-cause", 0)
            assert names == sorted(names)
            assert opened.console_messages == []
        finally:
            stop.set()
            following.join(WITHIN / 1000)


@pytest.mark.usefixtures("soon")
def test_a_live_page_says_when_nobody_serves_it_any_more(browser: "Browser", tmp_path: Path) -> None:
    write_history(tmp_path / "run/history", {"rank-0": [event for event in killed_once() if event.who == "rank-0"]})
    site = web.Site(tmp_path / "run", partial(page_of, [tmp_path / "run"], "c", live=True))
    with web.served(site) as address:
        opened = Opened(browser, address, DESK)
    with opened:
        deadline = time.monotonic() + WITHIN / 1000
        opened.page.wait_for_selector("#live.lost")
        assert time.monotonic() < deadline
        assert "what was known last" in opened.page.locator("#live").inner_text()
