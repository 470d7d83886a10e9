"""The content of a report page as data classes: statements with verdicts, numbers, pictures, tables and facts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell: TypeAlias = str | float | int | None
Point: TypeAlias = tuple[float, float]
Tone: TypeAlias = Literal["good", "bad", "open"]
# Words that are verdicts wherever they occur, and their tone.
TONES: Mapping[str, Tone] = {
    **{"holds": "good", "DOES NOT HOLD": "bad", "not resolved": "open"},
    **{"pass": "good", "fail": "bad", "unknown": "open"},
}


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "table"


def duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A claim with its verdict, such as "holds"."""

    verdict: str
    claim: str
    source: str = ""  # the paper that makes the claim
    expected: str = ""
    measured: str = ""

    @property
    def tone(self) -> Tone:
        return TONES[self.verdict]


class Number(NamedTuple):
    """A headline number on a report page: its name, its value as text, and a short explanation."""

    name: str
    value: str
    about: str = ""


class Column(NamedTuple):
    """A column of a table; `form` is the format of its numbers, for example ".2f"."""

    name: str
    form: str = ""

    def show(self, value: Cell) -> str:
        """Return a cell of this column as text; None becomes an empty string."""
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, float) and not math.isfinite(value):
            return "not finite"
        return format(value, self.form or ("," if isinstance(value, int) else ".4g"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table on a report page, which shows the first `most` rows; a `folded` table is collapsed at first."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    most: int = 300
    folded: bool = False

    @property
    def shown(self) -> Sequence[Sequence[Cell]]:
        return self.rows[: self.most]

    @property
    def left_out(self) -> str:
        """A sentence that says how many rows are shown, or an empty string if all rows are shown."""
        count = len(self.rows)
        return f"The first {self.most} of {count:,} rows; the CSV has all." if count > self.most else ""

    @property
    def name(self) -> str:
        return slug(self.title)

    def is_numeric(self, place: int) -> bool:
        """Return True if column number `place` has only numbers and empty cells."""
        values = [row[place] for row in self.rows if row[place] is not None]
        return bool(values) and not any(isinstance(value, str) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture on a report page, as SVG or PNG, with its title and caption."""

    name: str
    title: str
    caption: str
    alt: str  # description for screen readers
    svg: str = ""  # with the colours of the page
    png: bytes = b""
    wide: bool = False  # it has the width of the page
    figure: "Figure | None" = None  # for other formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of a report page, independent of the file format: statements, numbers, pictures and tables."""

    title: str
    lead: str  # the text below the title
    terms: Mapping[str, str] = field(default_factory=dict)  # words that the page uses, with their meaning
    statements: Sequence[Statement]
    scoreboard: str = "claims hold"  # the words after "3 of 4"
    brief: bool = False  # statements are collapsed if all verdicts are good
    numbers: Sequence[Number] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # command, date and environment
    live: bool = False  # it refreshes itself while the run trains

    @property
    def good(self) -> int:
        return sum(statement.tone == "good" for statement in self.statements)

    @property
    def tone(self) -> Tone:
        """The worst tone of all statements ("bad", then "open", then "good"); "open" if there are no statements."""
        tones = [statement.tone for statement in self.statements]
        return "bad" if "bad" in tones else "open" if "open" in tones or not tones else "good"
