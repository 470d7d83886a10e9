"""The page about a result of the lab, as it was found or as it lies in a folder; and all files of a result."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from holdfast.lab import result as lab
from holdfast.lab.result import Claim, Result, Row, environment, write_json
from holdfast.report import files
from holdfast.report.figures import picture
from holdfast.report.files import prepare
from holdfast.report.page import Cell, Column, Number, Page, Picture, Statement, Table

RESULT = "result.json"


def write(result: Result, out: Path) -> Path:
    """Write result.json, summary.md, figures, tables and report.html; returns the path of the report."""
    prepare(out)
    write_json(result, out)
    return files.write_folder(page(result, [_drawn(result, name) for name in result.figures], environment()), out)


def read(folder: Path) -> Page:
    """The page about the result in this folder, with the figures that lie there."""
    result, facts = _read(folder)
    found = sorted((folder / "figures").glob("*.png"))
    order = {name: place for place, name in enumerate(result.captions)}
    found.sort(key=lambda path: order.get(path.stem, len(order)))
    return page(result, [_stored(path, result.captions) for path in found], facts)


def page(result: Result, pictures: Sequence[Picture], facts: Row) -> Page:
    """What a result says."""
    told = {"Command": result.command, "Date": result.date, "Settings": _settings(result)}
    return Page(
        title=result.experiment,
        lead=_lead(result),
        statements=[_statement(claim) for claim in result.claims],
        numbers=_numbers(result.claims),
        pictures=pictures,
        tables=[*map(_table, result.tables), *([_rows(result)] if result.rows else [])],
        remarks=result.remarks,
        facts={name: text for name, text in told.items() if text} | {"Environment": environment_line(facts)},
    )


def combine(pages: Sequence[Page]) -> Page:
    """Several results on one page; what each says is marked with its name."""
    if len(pages) == 1:
        return pages[0]
    versions = {each.facts["Environment"].split(",")[0] for each in pages}
    mixed = [f"These results are of different versions: {', '.join(sorted(versions))}."] if len(versions) > 1 else []
    statements = [_of(each.title, claim) for each in pages for claim in each.statements]
    return Page(
        title=f"{len(pages)} results",
        lead=", ".join(each.title for each in pages) + ".",
        statements=statements,
        numbers=_counts([each.verdict for each in statements]),
        pictures=[_named(each.title, picture) for each in pages for picture in each.pictures],
        tables=[_titled(each.title, table) for each in pages for table in each.tables],
        remarks=mixed + [f"{each.title}: {remark}" for each in pages for remark in each.remarks],
        facts={f"{each.title}: {name}": text for each in pages for name, text in each.facts.items()},
    )


def verdict(claim: Claim) -> str:
    """The word for whether a claim holds."""
    if not claim.resolved:
        return "not resolved"
    return "holds" if claim.holds else "DOES NOT HOLD"


def measured(claim: Claim) -> str:
    """The measured value, with its interval where there is one."""
    if claim.interval is None:
        return f"{claim.measured:.4g}"
    return f"{claim.measured:.3g} ({claim.interval[0]:.3g} to {claim.interval[1]:.3g})"


def expected(claim: Claim) -> str:
    """The expected range in words."""
    low, high = claim.expected
    if low is None or high is None:
        return f"at most {high:g}" if high is not None else f"at least {low:g}" if low is not None else "any"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def environment_line(facts: Row) -> str:
    """Versions and machine in one line."""
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items() if number)
    return f"holdfast {facts['holdfast']}, {packages}, Python {facts['python']}, {facts['system']} {facts['machine']}, {facts['cores']} cores"


def _lead(result: Result) -> str:
    if not result.claims:
        return "Measured, with no claim to hold it against."
    return "Every claim with the range it expects and what was measured; one that does not hold is shown as such."


def _statement(claim: Claim) -> Statement:
    return Statement(
        verdict=verdict(claim),
        claim=claim.claim,
        source=claim.source,
        expected=expected(claim),
        measured=measured(claim),
    )


def _numbers(claims: Sequence[Claim]) -> list[Number]:
    return _counts([verdict(claim) for claim in claims])


def _counts(verdicts: Sequence[str]) -> list[Number]:
    words = {
        "holds": ("hold", "inside the range"),
        "DOES NOT HOLD": ("do not hold", "outside the range"),
        "not resolved": ("not resolved", "the interval leaves a doubt"),
    }
    return [Number(name, str(verdicts.count(word)), about) for word, (name, about) in words.items() if verdicts]


def _settings(result: Result) -> str:
    return ", ".join(f"{key} {value}" for key, value in result.config.items())


def _drawn(result: Result, name: str) -> Picture:
    title, caption, alt = _words(name, result.captions)
    return picture(result.figures[name], name=name, title=title, caption=caption, alt=alt, wide=True, themed=False)


def _stored(path: Path, captions: Mapping[str, str]) -> Picture:
    title, caption, alt = _words(path.stem, captions)
    try:
        return Picture(name=path.stem, title=title, caption=caption, alt=alt, png=path.read_bytes(), wide=True)
    except OSError as error:
        raise BadInput(f"cannot read the figure {path}: {error.strerror or error}.") from error


def _words(name: str, captions: Mapping[str, str]) -> tuple[str, str, str]:
    """The title, the caption and the description of a figure."""
    caption = captions.get(name, "")
    title = name.replace("-", " ").replace("_", " ")
    return title[:1].upper() + title[1:], caption, caption or f"Figure: {title}."


def _table(table: lab.ResultTable) -> Table:
    return Table(title=table.title, columns=[Column(name) for name in table.columns], rows=table.rows)


def _rows(result: Result) -> Table:
    """Everything that was measured; rows of different kinds have different columns."""
    columns = list(dict.fromkeys(key for row in result.rows for key in row))
    rows = [[_cell(row.get(column)) for column in columns] for row in result.rows]
    return Table(title="Every row", columns=[Column(name) for name in columns], rows=rows, folded=True)


def _cell(value: Any) -> Cell:
    if isinstance(value, bool) or not (value is None or isinstance(value, str | int | float)):
        return str(value)
    return value


def _of(title: str, claim: Statement) -> Statement:
    source = f"{title}, {claim.source}" if claim.source else title
    return Statement(
        verdict=claim.verdict, claim=claim.claim, source=source, expected=claim.expected, measured=claim.measured
    )


def _named(title: str, one: Picture) -> Picture:
    return Picture(
        name=f"{title}-{one.name}",
        title=f"{title}: {one.title}",
        caption=one.caption,
        alt=one.alt,
        png=one.png,
        wide=one.wide,
        figure=one.figure,
    )


def _titled(title: str, table: Table) -> Table:
    return Table(title=f"{title}: {table.title}", columns=table.columns, rows=table.rows, folded=table.folded)


def _read(folder: Path) -> tuple[Result, Row]:
    """The result and the environment it was found in, as `result.json` has them."""
    path = folder / RESULT
    try:
        data = json.loads(path.read_text())
        facts = data["environment"]
        environment_line(facts)
        result = Result(
            experiment=str(data["experiment"]),
            config=dict(data["config"]),
            rows=[dict(row) for row in data["rows"]],
            claims=[_claim(each) for each in data["claims"]],
            remarks=[str(each) for each in data["remarks"]],
            tables=[
                lab.ResultTable(str(each["title"]), each["columns"], each["rows"]) for each in data.get("tables", ())
            ],
            captions={str(name): str(text) for name, text in data.get("captions", {}).items()},
            command=str(data.get("command", "")),
            date=str(data.get("date", "")),
        )
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{path} is no result of this holdfast's lab ({type(error).__name__}: {error}): name the folder of a "
            "`holdfast lab run`, or run the experiment again."
        ) from error
    if any(len(row) != len(table.columns) for table in result.tables for row in table.rows):
        raise BadInput(f"{path} is damaged: a row of a table has not as many values as there are columns.")
    return result, facts


def _claim(data: Mapping[str, Any]) -> Claim:
    low, high = data["expected"]
    interval = data.get("interval")
    return Claim(
        id=str(data["id"]),
        claim=str(data["claim"]),
        source=str(data["source"]),
        expected=(low, high),
        measured=_number(data["measured"]),
        interval=None if interval is None else (_number(interval[0]), _number(interval[1])),
    )


def _number(value: float | None) -> float:
    """JSON has no infinity, and what could not be measured is null there."""
    return math.nan if value is None else float(value)
