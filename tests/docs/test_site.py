"""The site shows documents of all folders, and its links lead to the same files as in the repository."""

import re
from pathlib import Path

import pytest
from docs_links import documents, for_site, links, place_on_site, source_files, source_page

from repository import ROOT

PAGES = [ROOT / path for path in documents()] + sorted(ROOT.glob("docs/**/*.md"))


@pytest.mark.parametrize(
    ("page", "link", "on_site"),
    [
        ("README.md", "docs/tutorial.md", "tutorial.md"),
        ("README.md", "docs/picture/run.svg", "picture/run.svg"),
        ("docs/strategies.md", "../benchmarks/steady/README.md#cpu", "benchmarks/steady/README.md#cpu"),
        ("docs/results/README.md", "../../experiments/README.md", "../experiments/README.md"),
        ("docs/server.md", "../examples/kmeans.py", "examples/kmeans.py.md"),
        ("benchmarks/steady/README.md", "../../docs/sharded.md#trainers", "../../sharded.md#trainers"),
        ("benchmarks/live-recovery/README.md", "../steady", "../steady/README.md"),
        ("docs/sharded.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/sharded.md", "#trainers", "#trainers"),
    ],
)
def test_a_link_leads_to_the_place_of_its_file_on_the_site(page: str, link: str, on_site: str) -> None:
    assert for_site(f"see [this]({link}), and more", page) == f"see [this]({on_site}), and more"


def test_fenced_blocks_are_not_changed_and_hold_no_links() -> None:
    text = "```python\n  table[0](docs/tutorial.md)\n```\n"
    assert for_site(text, "README.md") == text
    assert list(links(text)) == []


def test_lists_in_lists_are_indented_by_four_spaces() -> None:
    assert for_site("- a\n  - b\n", "README.md") == "- a\n    - b\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_in_lists_are_indented_by_two_spaces_in_a_document(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
    assert re.findall(r"^(?: {1}| {3,})(?:[-*|]|\d+\.) ?.*", text, flags=re.M) == []


def test_documents_of_other_folders_and_examples_have_pages() -> None:
    assert {"README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/steady/README.md"} <= {*documents()}
    sources = source_files()
    assert {"examples/digits.py", "examples/kmeans.py", "docs/picture/draw.py"} <= {*sources}
    assert all(place_on_site(path) == f"{path}.md".removeprefix("docs/") for path in sources)
    assert (ROOT / "examples/kmeans.py").read_text().rstrip() in source_page("examples/kmeans.py")
