"""What a page says, as values: statements with verdicts, numbers, pictures, tables, and where all of it comes from.

Nothing here knows HTML or Markdown, and nothing reads a file.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell: TypeAlias = str | float | int | None
Tone: TypeAlias = Literal["good", "bad", "open"]
# Words that are verdicts wherever they stand, and whether they are good news.
TONES: Mapping[str, Tone] = {
    "holds": "good",
    "DOES NOT HOLD": "bad",
    "not resolved": "open",
    "pass": "good",
    "fail": "bad",
    "unknown": "open",
}


def slug(text: str) -> str:
    """A text as a name: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A line of the scoreboard: a verdict (a key of `TONES`), on what, by whom it is claimed, what was expected and found."""

    verdict: str
    claim: str
    source: str = ""
    expected: str = ""
    measured: str = ""

    @property
    def tone(self) -> Tone:
        """Whether the verdict is good news."""
        return TONES[self.verdict]


class Number(NamedTuple):
    """A number that a reader should see at once, as text, and one line about it."""

    name: str
    value: str
    about: str = ""


class Column(NamedTuple):
    """A column of a table. `form` says how its numbers are shown, as in `format(1.5, ".2f")`."""

    name: str
    form: str = ""

    def show(self, value: Cell) -> str:
        """A value of this column as text; nothing where there is none."""
        if value is None or isinstance(value, str):
            return value or ""
        if isinstance(value, float) and not math.isfinite(value):
            return "not finite"
        return format(value, self.form or ("," if isinstance(value, int) else ".4g"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for a reader. Of very many rows a page shows the first `most`; a long one is `folded` until it is asked for."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    most: int = 300
    folded: bool = False

    @property
    def shown(self) -> Sequence[Sequence[Cell]]:
        """The rows that a page has."""
        return self.rows[: self.most]

    @property
    def left_out(self) -> str:
        """What is to be said of the others."""
        return (
            f"The first {self.most} of {len(self.rows):,} rows; the CSV has all." if len(self.rows) > self.most else ""
        )

    @property
    def name(self) -> str:
        """The title as the name of a file or of a place on the page."""
        return slug(self.title)

    def is_numeric(self, place: int) -> bool:
        """Whether a column holds numbers, and perhaps gaps."""
        values = [row[place] for row in self.rows if row[place] is not None]
        return bool(values) and not any(isinstance(value, str) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its caption: SVG that follows the colours of the page, or else a PNG.

    `name` is that of its files; `alt` says in words what can be seen. A `wide` one takes the width of the page. `file`
    is an SVG that needs no page around it, and `figure` what other formats are drawn from.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: str = ""
    png: bytes = b""
    wide: bool = False
    file: str = ""
    figure: "Figure | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page; `lead` is the sentence under its title. `facts` say where it comes from: command, date, environment.

    A scoreboard that is `brief` is folded while all is well. A `live` page is served while its run goes on, and asks
    for the next one by itself.
    """

    title: str
    lead: str
    statements: Sequence[Statement]
    scoreboard: str = "claims hold"  # what is counted: 3 of 4 of them
    brief: bool = False
    numbers: Sequence[Number] = ()
    pictures: Sequence[Picture] = ()
    timelines: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    live: bool = False

    @property
    def good(self) -> int:
        """How many statements have a good verdict."""
        return sum(each.tone == "good" for each in self.statements)

    @property
    def tone(self) -> Tone:
        """The verdict on the whole: the worst of all."""
        tones = [each.tone for each in self.statements]
        return "bad" if "bad" in tones else "open" if "open" in tones or not tones else "good"
