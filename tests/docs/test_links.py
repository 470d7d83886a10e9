"""Every link between documents leads to a file, and to a heading of it, that exists."""

import re
from pathlib import Path

import pytest
from docs_links import documents

from repository import ROOT

PAGES = [ROOT / path for path in documents()] + sorted(ROOT.glob("docs/**/*.md"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if name.startswith("http"):
            continue
        target = page.parent / name if name else page
        assert target.exists(), f"{name} does not exist"
        assert not anchor or anchor in anchors(target), f"{name} has no heading #{anchor}"
