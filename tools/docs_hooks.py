"""Hooks of MkDocs (mkdocs.yml): pages that are not files in docs/, and links that leave docs/."""

import re
from pathlib import Path
from typing import Any

import docs_links
import docs_reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"(https?://[^\"]*)")
_REPOSITORY = {docs_links.place_on_site(path): path for path in docs_links.documents()}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {place: (docs_links.ROOT / path).read_text() for place, path in _REPOSITORY.items()}
    pages |= {docs_links.place_on_site(path): docs_links.source_page(path) for path in docs_links.source_files()}
    pages[docs_reference.COMMANDS_PAGE] = docs_reference.commands_page()
    pages[docs_reference.EVENTS_PAGE] = docs_reference.events_page()
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a document."""
    path = _REPOSITORY.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return docs_links.for_site(markdown, path) if (docs_links.ROOT / path).exists() else markdown


def on_post_build(config: Any) -> None:
    """Raise PluginError if a page makes the reader's browser fetch something from another server."""
    for page in Path(config["site_dir"]).rglob("*.html"):
        if match := _FETCHED.search(page.read_text()):
            raise PluginError(f"{page} fetches {match[1]}: the site must work without a network.")
