"""The tables of a matrix: the paper's tables 5 to 8, and what it left for later. Pure."""

import math
from collections.abc import Callable, Sequence

from holdfast.cost.breakdown import CAUSES, PARTS
from holdfast.finding import counted
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.matrix.analysis import Analysis, Metric, difference, gain, reduction
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED, REFERENCE
from holdfast.lab.matrix.measured_run import MeasuredRun
from holdfast.lab.matrix.suites import Suite
from holdfast.lab.result import ResultTable

Value = str | float | int | None
DIGITS = 4
METRICS: dict[str, Metric] = {
    "runs that pass the audit": lambda run: float(run.audit == "pass"),
    "goodput, steps/s": lambda run: run.goodput,
    "restarts": lambda run: float(run.restarts),
    "steps trained again": lambda run: float(run.rolled_back),
    "samples not trained": lambda run: float(run.samples_lost),
    "wall clock, s": lambda run: run.wall,
    "stall, s": lambda run: run.waited,
    "of it writing and queueing, s": lambda run: run.written,
    "of it snapshot, s": lambda run: run.stall.get("snapshot", math.nan),
    "recovery, s": lambda run: run.seconds.get("recovery", math.nan),
}


def tables(found: Analysis) -> list[ResultTable]:
    """Every table that these runs can fill, the most important first."""
    makers: Sequence[Callable[[Analysis], ResultTable | None]] = (
        aggregate,
        per_suite,
        sliced,
        complete,
        stalls,
        wall_clock,
        divergences,
        rejected,
    )
    return [table for table in (make(found) for make in makers) if table is not None and table.rows]


def aggregate(found: Analysis) -> ResultTable | None:
    """Means over the suites that count, by variant (the paper's table 5)."""
    if not found.counted:
        return None
    compared = found.has(BLOCKING, OVERLAPPED)
    against = ["overlapped less blocking", "95 % from", "to"] if compared else []
    rows: list[list[Value]] = []
    for name, metric in METRICS.items():
        cells: list[Value] = [name, *(_number(found.mean(metric, variant)) for variant in found.variants)]
        rows.append(cells + (_cells(found.paired(difference, metric, OVERLAPPED, BLOCKING)) if compared else []))
    if REFERENCE in found.variants:
        rows.append(_drops(found, compared))
    return ResultTable(f"Means of {counted(len(found.counted), 'suite')}", ["", *found.variants, *against], rows)


def _drops(found: Analysis, compared: bool) -> list[Value]:
    """What goodput is less than the reference's, and how much of that overlapping gets back."""
    of = {each: found.paired(gain, _goodput, each, REFERENCE).value for each in found.variants}
    back: list[Value] = [_percent(of[OVERLAPPED] - of[BLOCKING]), None, None] if compared else []
    return ["goodput over the reference's, %", *(_percent(value) for value in of.values()), *back]


def per_suite(found: Analysis) -> ResultTable | None:
    """Suites in the order of what overlapping gains (the paper's table 6)."""
    if not found.has(REFERENCE, BLOCKING, OVERLAPPED):
        return None
    columns = [*_axes(found), "reference, steps/s", "blocking, steps/s", "overlapped, steps/s"]
    columns += ["overlapped over blocking, %", "95 % from", "to"]
    columns += ["blocking over reference, %", "overlapped over reference, %", "stall, overlapped less blocking, s"]
    ranked = sorted(found.counted, key=lambda suite: -_gain(found, [suite]).value)
    return ResultTable(
        "Suites by the gain of overlapped over blocking", columns, [_ranked(found, suite) for suite in ranked]
    )


def _ranked(found: Analysis, suite: Suite) -> list[Value]:
    several = [suite]
    goodputs = [found.mean(_goodput, variant, several) for variant in (REFERENCE, BLOCKING, OVERLAPPED)]
    over = [found.paired(gain, _goodput, variant, REFERENCE, several).value for variant in (BLOCKING, OVERLAPPED)]
    stall = found.paired(difference, _waited, OVERLAPPED, BLOCKING, several).value
    return [
        *suite.axes.values(),
        *map(_number, goodputs),
        *_cells(_gain(found, several), 100),
        *map(_percent, over),
        _number(stall),
    ]


def sliced(found: Analysis) -> ResultTable | None:
    """Means over suites that have something in common (the paper's table 7), also by what is swept over."""
    if not found.has(BLOCKING, OVERLAPPED):
        return None
    rows: list[list[Value]] = []
    for axis, value, suites in found.slices():
        stall = found.paired(difference, _waited, OVERLAPPED, BLOCKING, suites)
        less = found.paired(reduction, _waited, OVERLAPPED, BLOCKING, suites)
        goodputs = [_number(found.mean(_goodput, variant, suites)) for variant in (BLOCKING, OVERLAPPED)]
        own = [axis, value, len(suites), *goodputs, *_cells(_gain(found, suites), 100)]
        rows.append([*own, _number(stall.value), _percent(less.value), _loss_difference(found, suites)])
    columns = ["axis", "value", "suites", "blocking, steps/s", "overlapped, steps/s", "overlapped over blocking, %"]
    columns += ["95 % from", "to", "stall, overlapped less blocking, s", "stall reduced by, %", "loss difference, overlapped less blocking"]  # fmt: skip
    return ResultTable("Parts of the matrix", columns, rows)


def _loss_difference(found: Analysis, suites: Sequence[Suite]) -> Value:
    if REFERENCE not in found.variants:
        return None
    apart = [found.apart(suite, OVERLAPPED).loss - found.apart(suite, BLOCKING).loss for suite in suites]
    return _number(sum(apart) / len(apart))


def complete(found: Analysis) -> ResultTable | None:
    """Goodput, stall and wall clock of every suite in every variant (the paper's table 8)."""
    columns = [*_axes(found)]
    for what in ("steps/s", "stall, s", "wall, s"):
        columns += [f"{variant}, {what}" for variant in found.variants]
    rows: list[list[Value]] = []
    for suite in found.counted:
        means = [
            _number(found.mean(metric, variant, [suite]))
            for metric in (_goodput, _waited, _wall)
            for variant in found.variants
        ]
        rows.append([*suite.axes.values(), *means])
    return ResultTable("Every suite", columns, rows)


def stalls(found: Analysis) -> ResultTable | None:
    """What training waits for saves, by part: seconds of a run, and of one save."""
    parts = ("waited", *PARTS, "overlapped")
    rows: list[list[Value]] = []
    for variant in found.variants if found.counted else ():
        seconds = [found.mean(lambda run, part=part: run.stall.get(part, math.nan), variant) for part in parts]  # type: ignore[misc]
        saves = found.mean(lambda run: float(run.saves), variant)
        rows.append(
            [variant, _number(saves), *map(_number, seconds), _number(seconds[0] / saves if saves else math.nan)]
        )
    columns = ["variant", "saves", "waited, s", *(f"{part}, s" for part in PARTS), "written meanwhile, s"]
    return ResultTable("Stall by part, means of a run", [*columns, "waited a save, s"], rows)


def wall_clock(found: Analysis) -> ResultTable | None:
    """Where the wall clock went, by variant: seconds that add up."""
    rows: list[list[Value]] = []
    for variant in found.variants if found.counted else ():
        seconds = [found.mean(lambda run, cause=cause: run.seconds.get(cause, 0.0), variant) for cause in CAUSES]  # type: ignore[misc]
        goodput = found.mean(_goodput, variant)
        rows.append([variant, _number(goodput), _number(found.mean(_wall, variant)), *map(_number, seconds)])
    columns = ["variant", "steps/s", "wall, s", *(f"{cause}, s" for cause in CAUSES)]
    return ResultTable("Wall clock by cause, means of a run", columns, rows)


def divergences(found: Analysis) -> ResultTable | None:
    """How far every variant is from the reference."""
    if REFERENCE not in found.variants:
        return None
    rows: list[list[Value]] = []
    for suite in found.counted:
        for variant in found.variants:
            if variant != REFERENCE:
                rows.append([suite.name, variant, *(_exact(each) for each in found.apart(suite, variant))])
    columns = ["suite", "variant", "mean absolute loss difference", "largest", "mean L2 distance of snapshots"]
    return ResultTable("Divergence from the reference", [*columns, "of the last, in proportion to the model"], rows)


def rejected(found: Analysis) -> ResultTable | None:
    """The suites that do not count, run by run."""
    rows: list[list[Value]] = [[each.suite.name, each.run, each.gate, each.why] for each in found.failed]
    return ResultTable("Not counted: runs that did not pass a quality gate", ["suite", "run", "gate", "why"], rows)


def _gain(found: Analysis, suites: Sequence[Suite]) -> ConfidenceInterval:
    return found.paired(gain, _goodput, OVERLAPPED, BLOCKING, suites)


def _goodput(run: MeasuredRun) -> float:
    return run.goodput


def _waited(run: MeasuredRun) -> float:
    return run.waited


def _wall(run: MeasuredRun) -> float:
    return run.wall


def _axes(found: Analysis) -> list[str]:
    return list(found.counted[0].axes) if found.counted else []


def _cells(of: ConfidenceInterval, times: float = 1.0) -> list[Value]:
    return [_number(times * value) for value in of]


def _percent(value: float) -> float | None:
    return _number(100 * value)


def _number(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None


def _exact(value: float) -> float | None:
    """Differences may be tiny, and none is not the same as nearly none."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
