"""Writing of report pages: an HTML file, Markdown with figures, or a folder with these and all tables as CSV."""

import csv
import io
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from holdfast.atomic_write import write_atomically
from holdfast.errors import BadInput, StorageFailed
from holdfast.report import figures
from holdfast.report.page import TONES, Number, Page, Picture, Table

PAGE, SUMMARY = "report.html", "summary.md"
FILES = (".html", ".htm", ".md")
OTHER_SUFFIXES = (".pdf", ".csv", ".png", ".svg", ".json", ".txt")  # a page cannot be written as one of these
REFRESH = 2.0  # seconds after which a live page asks for the next one
MOST_ROWS = 40  # of a table in Markdown; the CSV has all


def check(out: Path) -> None:
    """Raise BadInput if a report page cannot be written to `out`."""
    if out.suffix in OTHER_SUFFIXES:
        raise BadInput(f"--out {out} is not a page: name a .html or .md file, or a folder for both, figures and CSV.")
    is_file = out.suffix in FILES
    if out.is_dir() if is_file else out.is_file():
        raise BadInput(f"--out {out} is {'a folder' if is_file else 'a file'}: name another.")


def write(page: Page, out: Path) -> Path:
    """Write the page to `out`, a .html file, a .md file or a folder for both; return the path of the page."""
    if out.suffix not in FILES:
        return write_folder(page, out)
    _make(out.parent)
    if out.suffix == ".md":
        _write_figures(page, out.parent)
    replace_text(out, markdown_text(page) if out.suffix == ".md" else html_text(page))
    return out


def write_folder(page: Page, out: Path) -> Path:
    """Write the page into the folder `out` as HTML and Markdown, with figures and CSV tables; return the HTML path."""
    prepare(out)
    _write_figures(page, out)
    _make(out / "tables")
    for table in page.tables:
        replace_text(
            out / "tables" / f"{table.name}.csv", csv_text([column.name for column in table.columns], table.rows)
        )
    replace_text(out / SUMMARY, markdown_text(page))
    replace_text(out / PAGE, html_text(page))
    return out / PAGE


def _write_figures(page: Page, out: Path) -> None:
    if page.pictures:
        _make(out / "figures")
    for picture in page.pictures:
        path = out / "figures" / picture.name
        if picture.figure is not None:
            replace_bytes(path.with_name(f"{picture.name}.pdf"), figures.rendered(picture.figure, "pdf"))
        png = picture.png or (figures.rendered(picture.figure, "png") if picture.figure is not None else b"")
        replace_bytes(path.with_name(f"{picture.name}.png"), png)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"cannot write to {folder}: {error.strerror}; name another --out.") from error


def prepare(out: Path) -> Path:
    """Create the folder `out` for results, and raise StorageFailed if it is not writable."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: name a folder.")
    _make(out / "figures")
    try:
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageFailed(f"cannot write to {out}: {error.strerror}; name another folder with --out.") from error
    return out


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode(errors="backslashreplace"))


def replace_bytes(path: Path, data: bytes) -> None:
    """Write `data` to a file atomically; if that fails, raise StorageFailed and keep the old file."""
    try:
        write_atomically(path, data, path.with_name(path.name + ".tmp"))
    except OSError as error:
        raise StorageFailed(f"cannot write {path}: {error.strerror}; free space or name another --out.") from error


def csv_text(columns: Iterable[str], rows: Iterable[Sequence[object]]) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return lines.getvalue()


def html_text(page: Page) -> str:

    def png(picture: Picture) -> str:
        return "data:image/png;base64," + b64encode(picture.png).decode()

    return _template().render(page=page, tones=TONES, png=png, refresh=REFRESH)


@cache
def _template() -> Template:
    pages = Environment(
        loader=PackageLoader("holdfast", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return pages.get_template("page.html")


def markdown_text(page: Page) -> str:
    terms = [f"- **{word}:** {meaning}" for word, meaning in page.terms.items()]
    lead = [page.lead, "", *terms] if terms else [page.lead]
    return "\n".join([f"# {page.title}", "", *lead, *_statements(page), *_body(page), ""])


def _statements(page: Page) -> Iterator[str]:
    if not page.statements:
        return
    yield from ("", f"**{page.good} of {len(page.statements)} {page.scoreboard}.**", "")
    yield from ("| | claim | expected | measured |", "|---|---|---|---|")
    for statement in page.statements:
        claim = f"{statement.claim} ({statement.source})" if statement.source else statement.claim
        yield _line([statement.verdict, claim, statement.expected, statement.measured])


def _body(page: Page) -> Iterator[str]:
    if page.numbers:
        yield from ("", ", ".join(map(_number, page.numbers)) + ".")
    if page.remarks:
        yield from ("", *(f"- {remark}" for remark in page.remarks))
    for picture in page.pictures:
        yield from ("", f"![{picture.alt}](figures/{picture.name}.png)")
        if picture.caption:
            yield from ("", picture.caption)
    for table in page.tables:
        if not table.folded:
            yield from ("", *_table(table))
    for name, fact in page.facts.items():
        yield from ("", f"{name}: {fact}{'' if fact.endswith('.') else '.'}")


def _number(number: Number) -> str:
    return f"{number.name}: {number.value}{f' ({number.about})' if number.about else ''}"


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{table.title}**", "")
    yield _line([column.name for column in table.columns])
    yield "|" + "|".join("---:" if table.is_numeric(place) else "---" for place in range(len(table.columns))) + "|"
    for row in table.rows[:MOST_ROWS]:
        yield _line([column.show(value) for column, value in zip(table.columns, row, strict=True)])
    if len(table.rows) > MOST_ROWS:
        yield from ("", f"The first {MOST_ROWS} of {len(table.rows)} rows; tables/{table.name}.csv has all.")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
