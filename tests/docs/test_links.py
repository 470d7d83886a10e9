"""Every link between documents leads to a file, and to a heading of it, that exists."""

import re
from pathlib import Path

import pytest
from docs_links import documents
from docs_reference import COMMANDS_PAGE, EVENTS_PAGE, commands_page, events_page

from repository import ROOT

PAGES = [ROOT / path for path in documents()] + sorted(ROOT.glob("docs/**/*.md"))
GENERATED = {ROOT / "docs" / COMMANDS_PAGE: commands_page, ROOT / "docs" / EVENTS_PAGE: events_page}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = GENERATED[page]() if page in GENERATED else page.read_text()
    headings = re.findall(r"^#+ (.*)", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if name.startswith("http"):
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists() or target in GENERATED, f"{name} does not exist"
        assert not anchor or target.is_dir() or anchor in anchors(target), f"{name} has no heading #{anchor}"
