"""The result of an experiment: its rows, tables, claims and figures, and the file `result.json` that stores them."""

import json
import math
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast.report.files import replace_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from holdfast.lab.confidence import ConfidenceInterval

Row = dict[str, Any]
Value = str | float | int | None
Expected = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of an experiment: its statement, who made it, the range it expects, and the measured value."""

    id: str
    claim: str
    source: str
    expected: Expected  # lowest and highest value; None does not restrict
    measured: float
    interval: tuple[float, float] | None = None  # 95 % confidence; None: no noise, NaN: too few trials

    @classmethod
    def of_estimate(
        cls, id: str, claim: str, source: str, expected: Expected, estimate: "ConfidenceInterval"
    ) -> "Claim":
        """Return a claim, worded as `claim`, that `estimate` is in the range `expected`.

        `source` says who made the claim."""
        return cls(id, claim, source, expected, estimate.value, (estimate.low, estimate.high))

    @property
    def holds(self) -> bool:
        """True if the measured value lies in the expected range; always False for NaN."""
        return self.expects(self.measured)

    @property
    def resolved(self) -> bool:
        """True if the confidence interval is entirely inside or entirely outside the expected range.

        It is also True if the measured value is infinite or NaN, or has no interval because it has no noise. It is
        False if the value is finite and an end of its interval is unknown (NaN)."""
        if self.interval is None or not math.isfinite(self.measured):
            return True
        low, high = self.interval
        if self.holds:
            return self.expects(low) and self.expects(high)
        least, most = self.expected
        return (least is not None and high < least) or (most is not None and low > most)

    def expects(self, value: float) -> bool:
        low, high = self.expected
        return not math.isnan(value) and (low is None or low <= value) and (high is None or value <= high)

    def to_json(self) -> Row:
        return {
            **asdict(self),
            "expected": list(self.expected),
            "measured": finite_or_none(self.measured),
            "interval": None if self.interval is None else [finite_or_none(end) for end in self.interval],
            "holds": self.holds,
            "resolved": self.resolved,
        }


@dataclass(frozen=True, slots=True)
class ResultTable:
    title: str
    columns: list[str]
    rows: list[list[Value]]

    def to_json(self) -> Row:
        rows = [[finite_or_none(value) for value in row] for row in self.rows]
        return {"title": self.title, "columns": self.columns, "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of an experiment: data rows, claims, remarks, tables and figures."""

    experiment: str
    config: Mapping[str, Any]
    rows: list[Row]
    claims: list[Claim]
    remarks: list[str] = field(default_factory=list)  # sentences for the reader
    tables: list[ResultTable] = field(default_factory=list)
    figures: dict[str, "Figure"] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)  # a sentence for each figure
    terms: dict[str, str] = field(default_factory=dict)  # words of this result with their meanings
    command: str = ""  # empty if Python code ran the experiment
    date: str = ""  # such as 2026-01-31

    @property
    def holds(self) -> bool:
        """True if there are claims and none is refuted. An uncertain claim does not count as refuted."""
        return bool(self.claims) and all(claim.holds or not claim.resolved for claim in self.claims)

    def to_json(self) -> Row:
        return {
            "experiment": self.experiment,
            "command": self.command,
            "date": self.date,
            "config": dict(self.config),
            "environment": environment(),
            "remarks": self.remarks,
            "claims": [claim.to_json() for claim in self.claims],
            "tables": [table.to_json() for table in self.tables],
            "captions": self.captions,
            "terms": self.terms,
            "rows": [{key: finite_or_none(value) for key, value in row.items()} for row in self.rows],
        }


def environment() -> Row:
    """Return the package versions and the kind of machine, without user or host names."""
    packages = ("numpy", "numba", "scikit-learn", "torch")
    return {
        "holdfast": holdfast.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in packages},
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the `holdfast` command with `arguments` as reports show it.

    Absolute paths are shortened to hide user names."""
    shown = [f"…/{Path(argument).name}" if Path(argument).is_absolute() else argument for argument in arguments]
    return " ".join(["holdfast", *(word if "…" in word else shlex.quote(word) for word in shown)])


def write_json(result: Result, out: Path) -> None:
    """Write `result.json` below `out` with one line for each data row, so that `diff` can compare two results."""
    data = result.to_json()
    rows = ",\n".join("  " + json.dumps(row) for row in data.pop("rows"))
    head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
    replace_text(out / "result.json", f'{head},\n "rows": [\n{rows}\n ]\n}}\n')


def finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
