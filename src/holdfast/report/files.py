"""Pages as files: one HTML file, Markdown with its figures, or a folder with all of it."""

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import BadInput, StorageFailed
from holdfast.report import figures, formats
from holdfast.report.page import Page, Picture

PAGE, SUMMARY = "report.html", "summary.md"
NEITHER = (".pdf", ".csv", ".png", ".svg", ".json", ".txt")  # endings that a page does not come in


def check(out: Path) -> None:
    """Refuse a name that no page can be written to, before anything is read for it."""
    if out.suffix in NEITHER:
        raise BadInput(f"--out {out} is no page: name a .html or a .md file, or a folder for those, figures and CSV.")
    is_file = out.suffix in WRITERS
    if out.is_dir() if is_file else out.is_file():
        raise BadInput(f"--out {out} is {'a folder' if is_file else 'a file'}: name another.")


def write(page: Page, out: Path) -> Path:
    """Write the page as the ending of the name says; a name without one is a folder. Returns the page's path."""
    return WRITERS.get(out.suffix, write_folder)(page, out)


def write_folder(page: Page, out: Path) -> Path:
    """The page as HTML and Markdown, its figures as PNG, PDF or SVG, and its tables as CSV."""
    prepare(out)
    _write_figures(page, out)
    _make(out / "tables")
    for table in page.tables:
        replace_text(out / "tables" / f"{table.name}.csv", formats.csv_text(table))
    replace_text(out / SUMMARY, formats.markdown_text(page))
    replace_text(out / PAGE, formats.html_text(page))
    return out / PAGE


def _write_html(page: Page, out: Path) -> Path:
    _make(out.parent)
    replace_text(out, formats.html_text(page))
    return out


def _write_markdown(page: Page, out: Path) -> Path:
    _make(out.parent)
    _write_figures(page, out.parent)
    replace_text(out, formats.markdown_text(page))
    return out


def _write_figures(page: Page, out: Path) -> None:
    if page.pictures or page.timelines:
        _make(out / "figures")
    for picture in (*page.pictures, *page.timelines):
        for ending, data in _formats(picture).items():
            replace_bytes(out / "figures" / f"{picture.name}.{ending}", data)


def _formats(picture: Picture) -> dict[str, bytes]:
    """The files of a figure: those that can be drawn, or the one that there is."""
    if picture.file:
        return {"svg": picture.file.encode()}
    if picture.figure is None:
        return {"png": picture.png}
    return {"png": picture.png or figures.png(picture.figure), "pdf": figures.pdf(picture.figure)}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"cannot write to {folder}: {error.strerror}; name another --out.") from error


WRITERS: dict[str, Callable[[Page, Path], Path]] = {
    ".html": _write_html,
    ".htm": _write_html,
    ".md": _write_markdown,
}


def prepare(out: Path) -> Path:
    """Create the folder for a result, and find out now, not after the work, whether it can be written."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: name a folder")
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageFailed(f"cannot write to {out}: {error.strerror}; name another folder with --out") from error
    return out


def replace_text(path: Path, text: str) -> None:
    """Put a file in place whole: a reader sees the old one or the new one."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Put a file in place whole: a full disk leaves the old one as it was."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageFailed(f"cannot write {path}: {error.strerror}; free space or name another --out") from error
