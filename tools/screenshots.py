"""Take screenshots of pages in Chromium, wide and narrow, light and dark: `python tools/screenshots.py OUT [PAGE ...]`.

PAGE are HTML files of the repository, or addresses, such as that of `holdfast watch --web`; by default some pages of the site, which `make docs` writes, and a report. Chromium
must be installed. The pages are served on the loopback address, because the search of the site needs a server. For each picture the tool prints what sticks out of the window, and what the browser complained of.
"""

import re
import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SITE = (
    "index",
    "start/quick-start",
    "training",
    "troubleshooting",
    "comparison",
    "reference/commands",
    "explanation/replay",
)
REPORTS = ("docs/results/recovery-matrix-cpu/report.html",)
SIZES = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
WITHIN = 60_000.0  # milliseconds
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]
# What ends right of the window and is in no box that scrolls.
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((part) => {
  const box = part.getBoundingClientRect();
  for (let e = part; e; e = e.parentElement) { const s = getComputedStyle(e);
    if (["auto", "scroll", "hidden"].includes(s.overflowX) || s.position === "fixed") return false; }
  return box.width > 0 && box.right > innerWidth + 1;
}).slice(0, 5).map((part) => part.outerHTML.slice(0, 90))"""


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing for a request."""


def take(browser: Any, address: str, name: str, out: Path) -> list[str]:
    """Take the pictures of a page; return a line for each problem."""
    problems: list[str] = []
    for size, viewport in SIZES.items():
        for scheme in SCHEMES:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            opened = context.new_page()
            opened.on("pageerror", partial(_note, problems, f"{name} {size} {scheme}"))
            opened.goto(address, timeout=WITHIN)
            opened.wait_for_timeout(300)
            problems += [f"{name} {size} {scheme}: sticks out: {part}" for part in opened.evaluate(OVERFLOWING)]
            opened.screenshot(path=out / f"{_name(name)}-{size}-{scheme}.png")
            context.close()
    return problems


def _note(problems: list[str], at: str, error: object) -> None:
    problems.append(f"{at}: {error}")


def _name(page: str) -> str:
    """Return a name for the pictures of a page, such as `docs-results-a-report`."""
    return re.sub(r"\W+", "-", re.sub(r"^\w+://|\.html$", "", page)).strip("-")


def main(out: Path, pages: list[str]) -> int:
    """Take all pictures, print the problems, and return 1 if there is one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(ROOT)))
    Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    named = {
        _name(page): page if "://" in page else f"{base}/{Path(page).resolve().relative_to(ROOT)}" for page in pages
    }
    if not pages:
        named = {name: f"{base}/site/{name}.html" for name in SITE}
        named |= {_name(report): f"{base}/{report}" for report in REPORTS}
    out.mkdir(parents=True, exist_ok=True)
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS, timeout=WITHIN)
        problems = [line for name, address in named.items() for line in take(browser, address, name, out)]
        browser.close()
    print("\n".join([*problems, f"{4 * len(named)} pictures in {out}, {len(problems)} problems"]))
    return bool(problems)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name a folder for the pictures: python tools/screenshots.py OUT [PAGE ...]")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
