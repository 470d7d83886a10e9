"""Build the report page of a lab result, and write or read the folder that stores the result."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from holdfast.lab.confidence import ends_text
from holdfast.lab.introductions import introduction
from holdfast.lab.result import Claim, Result, ResultTable, Row, Value, environment, write_json
from holdfast.report import files
from holdfast.report.figures import picture
from holdfast.report.files import prepare
from holdfast.report.page import Column, Number, Page, Picture, Statement, Table

RESULT = "result.json"
CLAIM = "claim"
CLAIMS = (
    'a statement about a value. Its source is in parentheses after it. The column "expected" has the range that was expected '
    'before the run. The column "measured" has the value, with its 95 % confidence interval in parentheses. If this interval '
    "crosses a limit of the range, or if too few values were measured for an interval, the claim is not resolved. Otherwise "
    "the claim holds if the value is in the range, and does not hold if it is outside. Some values have no interval: then only "
    "the value decides."
)


def write(result: Result, out: Path) -> Path:
    """Write result.json, summary.md, figures, tables and report.html below `out`, and return the path of the report."""
    prepare(out)
    write_json(result, out)
    pictures = []
    for name, figure in result.figures.items():
        title, caption, alt = _words(name, result.captions)
        pictures.append(picture(figure, name=name, title=title, caption=caption, alt=alt, wide=True, themed=False))
    return files.write_folder(page(result, pictures, environment()), out)


def read(folder: Path) -> Page:
    """Return the report page for the result that is stored in `folder`."""
    result, facts = _read(folder)
    order = {name: place for place, name in enumerate(result.captions)}
    paths = sorted((folder / "figures").glob("*.png"))
    paths.sort(key=lambda path: order.get(path.stem, len(order)))
    pictures = []
    for path in paths:
        title, caption, alt = _words(path.stem, result.captions)
        try:
            png = path.read_bytes()
        except OSError as error:
            raise BadInput(f"cannot read the figure {path}: {error.strerror or error}.") from error
        pictures.append(Picture(name=path.stem, title=title, caption=caption, alt=alt, png=png, wide=True))
    return page(result, pictures, facts)


def page(result: Result, pictures: Sequence[Picture], facts: Row) -> Page:
    """Return the report page for `result`; `facts` describes the machine and packages that measured it."""
    settings = "; ".join(f"{key}: {value}" for key, value in result.config.items())
    source = {"Command": result.command, "Date": result.date, "Settings": settings}
    tables = [(table.title, table.columns, table.rows, False) for table in result.tables]
    if result.rows:  # rows of different kinds have different columns
        columns = list(dict.fromkeys(key for row in result.rows for key in row))
        rows = [[_cell(row.get(column)) for column in columns] for row in result.rows]
        tables.append(("Every row", columns, rows, True))
    about = introduction(result.experiment, has_claims=bool(result.claims))
    return Page(
        title=result.experiment,
        lead=about.text,
        terms={**about.terms, **result.terms, **({CLAIM: CLAIMS} if result.claims else {})},
        statements=[
            Statement(
                verdict=verdict(claim),
                claim=claim.claim,
                source=claim.source,
                expected=expected(claim),
                measured=measured(claim),
            )
            for claim in result.claims
        ],
        numbers=_counts([verdict(claim) for claim in result.claims]),
        pictures=pictures,
        tables=[
            Table(title=title, columns=[Column(name) for name in names], rows=rows, folded=folded)
            for title, names, rows, folded in tables
        ],
        remarks=result.remarks,
        facts={name: text for name, text in source.items() if text} | {"Environment": environment_line(facts)},
    )


def combine(pages: Sequence[Page]) -> Page:
    """Return one page with the content of several result pages; their tables, figures and remarks are labelled."""
    if len(pages) == 1:
        return pages[0]
    versions = {one.facts["Environment"].split(",")[0] for one in pages}
    mixed = [f"These results are of different versions: {', '.join(sorted(versions))}."] if len(versions) > 1 else []
    statements = [
        replace(claim, source=f"{one.title}, {claim.source}" if claim.source else one.title)
        for one in pages
        for claim in one.statements
    ]
    return Page(
        title=f"{len(pages)} results",
        lead=", ".join(one.title for one in pages) + ".",
        terms={CLAIM: CLAIMS} if statements else {},
        statements=statements,
        numbers=_counts([statement.verdict for statement in statements]),
        pictures=[
            replace(picture, name=f"{one.title}-{picture.name}", title=f"{one.title}: {picture.title}")
            for one in pages
            for picture in one.pictures
        ],
        tables=[replace(table, title=f"{one.title}: {table.title}") for one in pages for table in one.tables],
        remarks=mixed + [f"{one.title}: {remark}" for one in pages for remark in one.remarks],
        facts={f"{one.title}: {name}": text for one in pages for name, text in one.facts.items()},
    )


def verdict(claim: Claim) -> str:
    if not claim.resolved:
        return "not resolved"
    return "holds" if claim.holds else "DOES NOT HOLD"


def measured(claim: Claim) -> str:
    if claim.interval is None:
        return f"{claim.measured:.4g}"
    return f"{claim.measured:.3g} ({ends_text(*claim.interval, '.3g')})"


def expected(claim: Claim) -> str:
    low, high = claim.expected
    if low is None or high is None:
        return f"at most {high:g}" if high is not None else f"at least {low:g}" if low is not None else "any"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def environment_line(facts: Row) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items() if number)
    machine = f"{facts['system']} {facts['machine']}, {facts['cores']} cores"
    return f"holdfast {facts['holdfast']}, {packages}, Python {facts['python']}, {machine}"


def _cell(value: Any) -> Value:
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if value is None or is_plain else str(value)


def _counts(verdicts: Sequence[str]) -> list[Number]:
    words = {"holds": "hold", "DOES NOT HOLD": "do not hold", "not resolved": "not resolved"}
    return [Number(name, str(verdicts.count(word))) for word, name in words.items() if verdicts]


def _words(name: str, captions: Mapping[str, str]) -> tuple[str, str, str]:
    caption = captions.get(name, "")
    title = name.replace("-", " ").replace("_", " ")
    return title[:1].upper() + title[1:], caption, caption or f"Figure: {title}."


def _read(folder: Path) -> tuple[Result, Row]:
    """Read `result.json` in `folder`; return the result, and the machine and packages that measured it."""
    path = folder / RESULT
    try:
        data = json.loads(path.read_text())
        facts = data["environment"]
        environment_line(facts)
        result = Result(
            experiment=str(data["experiment"]),
            config=dict(data["config"]),
            rows=[dict(row) for row in data["rows"]],
            claims=[_claim(claim) for claim in data["claims"]],
            remarks=[str(remark) for remark in data["remarks"]],
            tables=[ResultTable(str(t["title"]), t["columns"], t["rows"]) for t in data.get("tables", ())],
            captions={str(name): str(text) for name, text in data.get("captions", {}).items()},
            terms={str(word): str(meaning) for word, meaning in data.get("terms", {}).items()},
            command=str(data.get("command", "")),
            date=str(data.get("date", "")),
        )
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{path} is not a lab result of this version of holdfast ({type(error).__name__}: {error}): name the folder of "
            "a `holdfast lab run`, or run the experiment again."
        ) from error
    if any(len(row) != len(table.columns) for table in result.tables for row in table.rows):
        raise BadInput(f"{path} is damaged: a row of a table does not have one value for each column.")
    return result, facts


def _claim(data: Row) -> Claim:
    low, high = data["expected"]
    measured, *ends = (
        math.nan if value is None else float(value) for value in (data["measured"], *(data.get("interval") or ()))
    )
    id, claim, source = (str(data[name]) for name in ("id", "claim", "source"))
    return Claim(id, claim, source, (low, high), measured, (ends[0], ends[1]) if ends else None)
