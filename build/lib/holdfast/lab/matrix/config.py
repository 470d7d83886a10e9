"""A recovery matrix (a grid of training runs) as a TOML file defines it; every error names its line.

The standard library's TOML reader keeps no line numbers, so a line is searched only after a mistake was found.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from holdfast.errors import BadInput
from holdfast.faults import points, storage
from holdfast.faults.schedule import Failure, Schedule
from holdfast.lab.matrix.models_and_data import DATASETS, NETWORKS
from holdfast.runs.config import FAULTS


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the training: a recovery method, a snapshot writer, and whether failures are injected."""

    recovery: str
    writer: str
    fails: bool = True
    is_exact: bool = True  # it trains the same samples as a run without failures

    @property
    def is_live(self) -> bool:
        return self.recovery != "restart"


# The first three are the paper's; its reference saves as `blocking` does.
VARIANTS = {
    "reference": Variant("restart", "blocking", fails=False),
    "blocking": Variant("restart", "blocking"),
    "overlapped": Variant("restart", "overlapped"),
    "replay": Variant("replay", "overlapped"),
    "forward": Variant("forward", "overlapped", is_exact=False),
    "skip": Variant("skip", "overlapped", is_exact=False),
}
REFERENCE, BLOCKING, OVERLAPPED = "reference", "blocking", "overlapped"


_HEADER = re.compile(r"\s*\[\[?([^\[\]=,]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")


def line_of(text: str, table: str = "", key: str = "", value: object = None, nth: int = 0) -> int:
    """Return the number of the line with `key` in the given table of the TOML file `text`.

    If `value` is given, it is searched in the list of the key; without a key, the header of the table is searched.
    `nth` selects a table in an array of tables. The result is 0 if nothing is found."""
    here, seen = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            here = _plain(header[1])
            seen += here == table or (not key and here.startswith(f"{table}."))
            if not key and seen > nth:
                return number
        elif (match := _KEY.match(line)) and (not table or seen > nth or not seen):
            named = f"{here}.{_plain(match[1])}".strip(".")
            if named == f"{table}.{key}".strip("."):
                return number if value is None else _line_of_value(text, number, value)
    return 0


def _line_of_value(text: str, first: int, value: object) -> int:
    shown = re.escape(str(value))
    pattern = re.compile(rf"[\"']{shown}[\"']" if isinstance(value, str) else rf"(?<![\w.-]){shown}(?![\w.])")
    lines = enumerate(text.splitlines()[first - 1 :], first)
    return next((number for number, line in lines if pattern.search(line)), first)


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


OPTIMIZERS = ("sgd", "adamw")
COUNTS = {"workers": 4, "save_every": 50, "max_inflight": 4}  # settings of a run, and the paper's values
PLACES = ("directory", "tmpfs")  # of checkpoints: the run's own folder, or memory; other values are URLs
SWEPT = ("save_every", "max_inflight", "workers_after", "checkpoints")
KEYS = ("steps", "batch", "seeds", "datasets", "models", "variants", "optimizer", *COUNTS, "failures", "sweep")
OF_A_FAILURE = ("steps", "kind", "point", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The settings of a matrix of runs. Each combination of data set, model and failure schedule is a suite.

    Each suite runs with every variant (recovery method) and seed. `sweep` lists several values for a setting, and each
    of these values makes suites of its own."""

    steps: int
    batch: int
    seeds: tuple[int, ...]
    datasets: tuple[str, ...]
    models: tuple[str, ...]
    failures: Mapping[str, Schedule]
    variants: tuple[str, ...] = tuple(VARIANTS)
    optimizer: str = "sgd"
    workers: int = COUNTS["workers"]
    save_every: int = COUNTS["save_every"]
    max_inflight: int = COUNTS["max_inflight"]
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def read_matrix(path: Path) -> Matrix:
    """Return the matrix of runs that a TOML file defines; raise BadInput with the line number of a mistake."""
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise BadInput(f"{path} is not a file: name a TOML file with --config.")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInput(f"cannot read {path}: {why}; name a TOML file with --config.") from error
    try:
        return _Reader(path, text).matrix(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not TOML: {error}.") from error


class _Reader:
    """A converter of a parsed TOML file to a Matrix, whose errors name the line in the file."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def matrix(self, given: Mapping[str, Any]) -> Matrix:
        self._only(given, KEYS, "")
        for key in ("steps", "batch", "seeds", "datasets", "models", "failures"):
            if key not in given:
                raise BadInput(f"{self._path} has no {key}: add it.")
        counts = {key: given[key] for key in ("steps", "batch", *COUNTS) if key in given}
        for key, value in counts.items():
            if not _is_count(value):
                self._refuse(f"{key} is {value!r}: give a whole number of 1 or more", "", key)
        matrix = Matrix(
            **counts,
            seeds=self._list(given, "seeds", "", self._is_seed, "whole numbers of 0 or more"),
            datasets=self._names(given, "datasets", DATASETS, "data set"),
            models=self._names(given, "models", NETWORKS, "model"),
            variants=self._names(given, "variants", VARIANTS, "variant") if "variants" in given else tuple(VARIANTS),
            optimizer=self._one_of(given.get("optimizer", "sgd"), OPTIMIZERS, "optimizer", "", "optimizer"),
            failures=self._failures(given["failures"]),
            sweep=self._sweep(given.get("sweep", {})),
        )
        self._check_together(matrix)
        return matrix

    def _check_together(self, matrix: Matrix) -> None:
        """Raise BadInput if values of `matrix` are valid alone but contradict each other."""
        live = [name for name in matrix.variants if VARIANTS[name].is_live]
        if live and "workers_after" in matrix.sweep:
            self._refuse(f"workers_after needs restarts, and {live[0]} has none", "sweep", "workers_after")
        if live and matrix.workers < 2:
            self._refuse(f"{live[0]} needs 2 workers or more", "", "workers")
        if matrix.batch < matrix.workers:
            self._refuse(f"{matrix.workers} workers cannot share {matrix.batch} samples per step", "", "batch")
        most = max([matrix.workers, *(count for after in matrix.sweep.get("workers_after", ()) for count in after)])
        for name, schedule in matrix.failures.items():
            for failure in schedule:
                table, step = f"failures.{name}", failure.step
                if step >= matrix.steps:
                    last = matrix.steps - 1
                    self._refuse(f"no failure can strike before step {step}: the last is {last}", table, "steps")
                if absent := [rank for rank in failure.targets if rank >= most]:
                    self._refuse(f"there is no rank {absent[0]}: the ranks are 0 to {most - 1}", table, "ranks")

    def _failures(self, given: Any) -> dict[str, Schedule]:
        if not isinstance(given, dict) or not given:
            self._refuse("failures is a table of schedules, such as [failures.base]", "", "failures")
        schedules = {}
        for name, parts in given.items():
            table, tables = f"failures.{name}", parts if isinstance(parts, list) else [parts]
            if not tables or not all(isinstance(part, dict) for part in tables):
                self._refuse("a schedule is a table with steps, kind, point and ranks", table)
            failures = [f for nth, part in enumerate(tables) for f in self._part_of_schedule(table, part, nth)]
            schedules[name] = tuple(sorted(failures, key=lambda failure: failure.step))
        return schedules

    def _part_of_schedule(self, table: str, given: Mapping[str, Any], nth: int) -> list[Failure]:
        self._only(given, OF_A_FAILURE, table, nth)
        if "steps" not in given:
            self._refuse("a schedule needs the steps before which it strikes: add steps", table, nth=nth)
        kind = self._one_of(given.get("kind", "exit"), FAULTS, "kind", table, "kind", nth)
        ranks = self._list(given, "ranks", table, self._is_seed, "ranks", nth) if "ranks" in given else (0,)
        failures = []
        for step in self._list(given, "steps", table, self._is_seed, "steps of 0 or more", nth):
            targets = () if kind in storage.KINDS else ranks
            failures.append(Failure(step=step, kind=kind, point=str(given.get("point", "boundary")), targets=targets))
            try:
                points.check(failures[-1], "restart")
            except BadInput as error:
                self._refuse(str(error).rstrip("."), table, "point", nth=nth)
        return failures

    def _sweep(self, given: Any) -> dict[str, tuple[Any, ...]]:
        if not isinstance(given, dict):
            self._refuse("sweep is a table of lists, such as save_every = [10, 50]", "", "sweep")
        self._only(given, SWEPT, "sweep")
        wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
            "save_every": (_is_count, "whole numbers of 1 or more"),
            "max_inflight": (_is_count, "whole numbers of 1 or more"),
            "workers_after": (
                lambda counts: isinstance(counts, list) and bool(counts) and all(map(_is_count, counts)),
                "lists of numbers of workers, such as [[2, 4]]",
            ),
            "checkpoints": (
                lambda place: isinstance(place, str) and (place in PLACES or "://" in place),
                f"{', '.join(PLACES)} or URLs such as s3://bucket/folder",
            ),
        }
        read = {key: self._list(given, key, "sweep", *wanted[key]) for key in given}
        if "workers_after" in read:
            read["workers_after"] = tuple(tuple(counts) for counts in read["workers_after"])
        return read

    def _names(self, given: Mapping[str, Any], key: str, known: Mapping[str, Any], noun: str) -> tuple[str, ...]:
        names = self._list(given, key, "", lambda name: isinstance(name, str), "names")
        return tuple(self._one_of(name, tuple(known), key, "", noun) for name in names)

    def _one_of(self, value: Any, known: Sequence[str], key: str, table: str, noun: str, nth: int = 0) -> str:
        if value not in known:
            shown = value if isinstance(value, str) else None
            self._refuse(f"there is no {noun} {value!r}: choose {', '.join(known)}", table, key, shown, nth)
        return str(value)

    def _list(
        self, given: Mapping[str, Any], key: str, table: str, fits: Callable[[Any], bool], what: str, nth: int = 0
    ) -> tuple[Any, ...]:
        values = given[key]
        if not isinstance(values, list) or not values or not all(fits(value) for value in values):
            self._refuse(f"{key} is {values!r}: give a list of {what}", table, key, nth=nth)
        if twice := [value for at, value in enumerate(values) if value in values[:at]]:
            self._refuse(f"{key} names {twice[0]!r} twice", table, key, nth=nth)
        return tuple(values)

    @staticmethod
    def _is_seed(value: Any) -> bool:
        return type(value) is int and value >= 0

    def _only(self, given: Mapping[str, Any], known: Sequence[str], table: str, nth: int = 0) -> None:
        for key in given:
            if key not in known:
                where = f" of {table}" if table else ""
                self._refuse(f"there is no key {key!r}; the keys{where} are {', '.join(known)}", table, key, nth=nth)

    def _refuse(self, why: str, table: str, key: str = "", value: object = None, nth: int = 0) -> NoReturn:
        named = f"{table}.{key}".strip(".")  # the key may be a table
        line = line_of(self._text, table, key, value, nth) or line_of(self._text, named) or line_of(self._text, table)
        raise BadInput(f"{self._path}, line {line or 1}: {why}.")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1
