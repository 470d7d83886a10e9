"""A page as one HTML file that needs nothing else: styles, script and figures are in it, and it asks no network.

A table as CSV: every row, numbers as they are.

A page as Markdown, for a terminal or a repository; its figures are files beside it.
"""

import csv
import io
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from holdfast.report.page import TONES, Page, Picture, Table
from holdfast.report.timeline import WORDS


def csv_text(table: Table) -> str:
    """The table with a line for its columns and one for each row."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows(table.rows)
    return lines.getvalue()


REFRESH = 2.0  # seconds after which a live page asks again


def html_text(page: Page) -> str:
    """The page."""
    return _template().render(page=page, tones=TONES, kinds=WORDS, png=_png, refresh=REFRESH)


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


def _png(picture: Picture) -> str:
    return "data:image/png;base64," + b64encode(picture.png).decode()


MOST_ROWS = 40  # of a table; the CSV has all


def markdown_text(page: Page) -> str:
    """The page, in the order in which a browser shows it."""
    return "\n".join([f"# {page.title}", "", page.lead, *_statements(page), *_body(page), *_facts(page), ""])


def _statements(page: Page) -> Iterator[str]:
    if not page.statements:
        return
    yield from ("", f"**{page.good} of {len(page.statements)} {page.scoreboard}.**", "")
    yield from ("| | claim | expected | measured |", "|---|---|---|---|")
    for each in page.statements:
        claim = f"{each.claim} ({each.source})" if each.source else each.claim
        yield _line([each.verdict, claim, each.expected, each.measured])


def _body(page: Page) -> Iterator[str]:
    if page.numbers:
        yield from ("", ", ".join(f"{each.name} {each.value} ({each.about})" for each in page.numbers) + ".")
    if page.remarks:
        yield from ("", *(f"- {remark}" for remark in page.remarks))
    for picture in (*page.pictures, *page.timelines):
        yield from ("", *_picture(picture))
    for table in page.tables:
        if not table.folded:
            yield from ("", *_table(table))


def _picture(picture: Picture) -> Iterator[str]:
    yield f"![{picture.alt}](figures/{picture.name}.{'svg' if picture.file else 'png'})"
    if picture.caption:
        yield from ("", picture.caption)


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{table.title}**", "")
    yield _line([column.name for column in table.columns])
    yield "|" + "|".join("---:" if table.is_numeric(place) else "---" for place in range(len(table.columns))) + "|"
    for row in table.rows[:MOST_ROWS]:
        yield _line([column.show(value) for column, value in zip(table.columns, row, strict=True)])
    if len(table.rows) > MOST_ROWS:
        yield from ("", f"The first {MOST_ROWS} of {len(table.rows)} rows; tables/{table.name}.csv has all.")


def _facts(page: Page) -> Iterator[str]:
    for name, fact in page.facts.items():
        yield from ("", f"{name}: {fact}{'' if fact.endswith('.') else '.'}")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
