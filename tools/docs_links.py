"""Links of documents, as they are in the repository and as they are on the site.

The site shows the pages in docs/, and as generated pages also documents of other folders and every source file that a
document links to. Its addresses begin at docs/, so links that leave docs/ are rewritten.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
HOME = "README.md"

OTHER_DOCUMENTS = (HOME, "CONTRIBUTING.md", "CHANGELOG.md")
OTHER_FOLDERS = ("benchmarks", "examples", "experiments")
SHOWN_AS_PAGE = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml"}

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(?P<fence> *```).*?^(?P=fence)`*$", flags=re.S | re.M)


def documents() -> list[str]:
    """Return the documents outside docs/ that are pages of the site, as paths in the repository."""
    deeper = [path for folder in OTHER_FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    return [*OTHER_DOCUMENTS, *(path.relative_to(ROOT).as_posix() for path in deeper)]


def place_on_site(path: str) -> str | None:
    """Return where the site has a file of the repository, or None if the site cannot show it."""
    if path == HOME:
        return "index.md"
    whole = ROOT / path
    if whole.is_dir():
        return place_on_site(f"{path}/README.md") if (whole / "README.md").exists() else None
    is_shown_as_it_is = whole.suffix not in SHOWN_AS_PAGE if path.startswith("docs/") else whole.suffix == ".md"
    place = path.removeprefix("docs/")
    return place if is_shown_as_it_is else f"{place}.md" if whole.suffix in SHOWN_AS_PAGE else None


def links(markdown: str) -> Iterator[str]:
    """Yield the target of every link to a file, without its anchor."""
    for match in _LINK.finditer(_FENCE.sub("", markdown)):
        if "://" not in match[1] and not match[1].startswith("mailto:"):
            yield match[1]


def linked_file(page: str, target: str) -> str:
    """Return the path in the repository of a link in the document at `page`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def for_site(markdown: str, page: str) -> str:
    """Return the text of the document at `page` with links that lead to the same files on the site."""
    folder = posixpath.dirname(place_on_site(page) or "")

    def rewritten(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = linked_file(page, target)
        place = place_on_site(path) if "://" not in target and (ROOT / path).exists() else None
        return f"{posixpath.relpath(place, folder or '.')}{anchor}" if place else match[0]

    return _outside_code(markdown, lambda text: _deeper(_LINK.sub(rewritten, text)))


def source_page(path: str) -> str:
    """Return a page with the text of a source file."""
    file = ROOT / path
    return f"# {path}\n\n```{SHOWN_AS_PAGE[file.suffix]}\n{file.read_text().rstrip()}\n```\n"


def source_files() -> list[str]:
    """Return the source files that the site shows: those that a document links to, and all examples."""
    pages = [*documents(), *(path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md")))]
    targets = {linked_file(page, target) for page in pages for target in links((ROOT / page).read_text())}
    examples = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")}
    return sorted(path for path in targets | examples if Path(path).suffix in SHOWN_AS_PAGE and (ROOT / path).is_file())


def _deeper(text: str) -> str:
    """Return the text with indents twice as wide: GitHub nests lists by two spaces, MkDocs by four."""
    return re.sub(r"^( +)(?=\S)", r"\1\1", text, flags=re.M)


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return the text with everything but its fenced blocks changed."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])
