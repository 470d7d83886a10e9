"""What an experiment found: rows, claims and the environment, and the files that hold them."""

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

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement with the range it expects and what was measured; `None` leaves a side of the range open.

    `interval` is where the measured value lies with 95 % confidence, for what was measured with noise.
    """

    id: str
    claim: str
    source: str
    expected: tuple[float | None, float | None]
    measured: float
    interval: tuple[float, float] | None = None

    @property
    def holds(self) -> bool:
        """Whether the measured value lies in the expected range; what could not be measured does not hold."""
        return self.expects(self.measured)

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves no doubt: it lies inside the expected range or outside."""
        if self.interval is None:
            return True
        low, high = self.interval
        if self.expects(low) != self.expects(high):
            return False
        return self.expects(self.measured) == self.expects(low)

    def expects(self, value: float) -> bool:
        """Whether a value lies in the expected range."""
        low, high = self.expected
        return not math.isnan(value) and (low is None or low <= value) and (high is None or value <= high)

    def to_json(self) -> Row:
        """The claim as JSON values."""
        return {
            **asdict(self),
            "expected": list(self.expected),
            "measured": _finite(self.measured),
            "interval": None if self.interval is None else [_finite(end) for end in self.interval],
            "holds": self.holds,
            "resolved": self.resolved,
        }


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table for a reader: every row has one value for each column, `None` where there is none."""

    title: str
    columns: list[str]
    rows: list[list[str | float | int | None]]

    def to_json(self) -> Row:
        """The table as JSON values."""
        rows = [[_finite(value) for value in row] for row in self.rows]
        return {"title": self.title, "columns": self.columns, "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that an experiment found; `remarks` are sentences for the reader, computed from the rows.

    `captions` has a sentence for each figure, by its name. `command` is what a person typed to get this result, and
    `date` the day of it, as 2026-01-31; both are empty for a result that nobody asked for on the command line.
    """

    experiment: str
    config: Mapping[str, Any]
    rows: list[Row]
    claims: list[Claim]
    remarks: list[str] = field(default_factory=list)
    tables: list[ResultTable] = field(default_factory=list)
    figures: dict[str, "Figure"] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""

    @property
    def holds(self) -> bool:
        """Whether no claim fails beyond doubt; without a claim nothing was shown."""
        return bool(self.claims) and all(claim.holds or not claim.resolved for claim in self.claims)

    def to_json(self) -> Row:
        """What `result.json` holds."""
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
            "rows": [{key: _finite(value) for key, value in row.items()} for row in self.rows],
        }


def environment() -> Row:
    """Versions and machine, without anything that names a person or a host."""
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
    """What was typed after `holdfast`, for a reader; of an absolute path the last name only, since the rest may name a person."""
    shown = [f"…/{Path(each).name}" if Path(each).is_absolute() else each for each in arguments]
    return " ".join(["holdfast", *(each if "…" in each else shlex.quote(each) for each in shown)])


def write_json(result: Result, out: Path) -> None:
    """Write `result.json`: one line for each row, so that two results can be compared with `diff`."""
    data = result.to_json()
    rows = ",\n".join("  " + json.dumps(row) for row in data.pop("rows"))
    head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
    replace_text(out / "result.json", f'{head},\n "rows": [\n{rows}\n ]\n}}\n')


def _finite(value: Any) -> Any:
    """JSON has no infinity: a trial that never converged has no cost, and says null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
