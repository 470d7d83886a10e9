"""The tables of a recovery matrix: tables 5 to 8 of the ECRL paper, and further ones. Pure functions."""

import math
from collections.abc import Callable, Sequence

from holdfast.cost.breakdown import CAUSES, PARTS
from holdfast.finding import counted
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.matrix.analysis import Analysis, Metric, difference, gain, reduction
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED, REFERENCE
from holdfast.lab.matrix.measured_run import MeasuredRun
from holdfast.lab.matrix.suites import Suite
from holdfast.lab.result import ResultTable, Value

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


def tables(analysis: Analysis) -> list[ResultTable]:
    """Return every table for which there are runs, the most important first."""
    makers: list[Callable[[Analysis], ResultTable | None]] = [aggregate, per_suite, sliced, complete]
    makers += [stalls, wall_clock, divergences, rejected]
    return [table for make in makers if (table := make(analysis)) is not None and table.rows]


def aggregate(analysis: Analysis) -> ResultTable | None:
    """Return a table of mean metrics by variant, over suites that pass all quality gates (ECRL paper, table 5)."""
    if not analysis.counted:
        return None
    compared = analysis.has(BLOCKING, OVERLAPPED)
    against = ["overlapped minus blocking", "95 % from", "to"] if compared else []
    rows: list[list[Value]] = []
    for name, metric in METRICS.items():
        cells: list[Value] = [name, *(_number(analysis.mean(metric, variant)) for variant in analysis.variants)]
        rows.append(cells + (_cells(analysis.paired(difference, metric, OVERLAPPED, BLOCKING)) if compared else []))
    if REFERENCE in analysis.variants:
        over = {variant: analysis.paired(gain, _goodput, variant, REFERENCE).value for variant in analysis.variants}
        back: list[Value] = [_percent(over[OVERLAPPED] - over[BLOCKING]), None, None] if compared else []
        rows.append(["goodput over the reference's, %", *map(_percent, over.values()), *back])
    return ResultTable(f"Means of {counted(len(analysis.counted), 'suite')}", ["", *analysis.variants, *against], rows)


def per_suite(analysis: Analysis) -> ResultTable | None:
    """Return a table of suites, sorted by the gain in goodput of overlapped over blocking saves (ECRL table 6)."""
    if not analysis.has(REFERENCE, BLOCKING, OVERLAPPED):
        return None
    columns = [*_axes(analysis), "reference, steps/s", "blocking, steps/s", "overlapped, steps/s"]
    columns += ["overlapped over blocking, %", "95 % from", "to"]
    columns += ["blocking over reference, %", "overlapped over reference, %", "stall, overlapped minus blocking, s"]
    rows: list[list[Value]] = []
    for suite in sorted(analysis.counted, key=lambda suite: -_gain(analysis, [suite]).value):
        goodputs = [analysis.mean(_goodput, variant, [suite]) for variant in (REFERENCE, BLOCKING, OVERLAPPED)]
        compared = (analysis.paired(gain, _goodput, variant, REFERENCE, [suite]) for variant in (BLOCKING, OVERLAPPED))
        stall = analysis.paired(difference, _waited, OVERLAPPED, BLOCKING, [suite]).value
        gains = [*_cells(_gain(analysis, [suite]), 100), *(_percent(estimate.value) for estimate in compared)]
        rows.append([*suite.axes.values(), *map(_number, goodputs), *gains, _number(stall)])
    return ResultTable("Suites by the gain of overlapped over blocking", columns, rows)


def sliced(analysis: Analysis) -> ResultTable | None:
    """Return a table of means over suites with a common setting, such as the model; None without the needed runs."""
    if not analysis.has(BLOCKING, OVERLAPPED):
        return None
    rows: list[list[Value]] = []
    for axis, value, suites in analysis.slices():
        stall = analysis.paired(difference, _waited, OVERLAPPED, BLOCKING, suites)
        less = analysis.paired(reduction, _waited, OVERLAPPED, BLOCKING, suites)
        goodputs = [_number(analysis.mean(_goodput, variant, suites)) for variant in (BLOCKING, OVERLAPPED)]
        own = [axis, value, len(suites), *goodputs, *_cells(_gain(analysis, suites), 100)]
        apart = None
        if REFERENCE in analysis.variants:
            gaps = [analysis.loss_gap(s, OVERLAPPED).loss - analysis.loss_gap(s, BLOCKING).loss for s in suites]
            apart = _number(sum(gaps) / len(gaps))
        rows.append([*own, _number(stall.value), _percent(less.value), apart])
    columns = ["axis", "value", "suites", "blocking, steps/s", "overlapped, steps/s", "overlapped over blocking, %"]
    columns += ["95 % from", "to", "stall, overlapped minus blocking, s", "stall reduced by, %", "loss difference, overlapped minus blocking"]  # fmt: skip
    return ResultTable("Parts of the matrix", columns, rows)


def complete(analysis: Analysis) -> ResultTable | None:
    """Return a table of goodput, stall and wall-clock time by suite and variant (table 8 of the ECRL paper)."""
    columns = [*_axes(analysis)]
    for what in ("steps/s", "stall, s", "wall, s"):
        columns += [f"{variant}, {what}" for variant in analysis.variants]
    rows: list[list[Value]] = []
    for suite in analysis.counted:
        means = [
            _number(analysis.mean(metric, variant, [suite]))
            for metric in (_goodput, _waited, _wall)
            for variant in analysis.variants
        ]
        rows.append([*suite.axes.values(), *means])
    return ResultTable("Every suite", columns, rows)


def stalls(analysis: Analysis) -> ResultTable | None:
    """Return a table, by variant, of how long training waits for saves: in each phase of a run, and for one save."""
    parts = ("waited", *PARTS, "overlapped")
    rows: list[list[Value]] = []
    for variant in analysis.variants if analysis.counted else ():
        seconds = [analysis.mean(lambda run, part=part: run.stall.get(part, math.nan), variant) for part in parts]  # type: ignore[misc]
        saves = analysis.mean(lambda run: float(run.saves), variant)
        rows.append(
            [variant, _number(saves), *map(_number, seconds), _number(seconds[0] / saves if saves else math.nan)]
        )
    columns = ["variant", "saves", "waited, s", *(f"{part}, s" for part in PARTS), "written meanwhile, s"]
    return ResultTable("Stall by part, means of a run", [*columns, "waited a save, s"], rows)


def wall_clock(analysis: Analysis) -> ResultTable | None:
    """Return a table of the mean wall-clock time of a run, by variant and cause."""
    rows: list[list[Value]] = []
    for variant in analysis.variants if analysis.counted else ():
        seconds = [analysis.mean(lambda run, cause=cause: run.seconds.get(cause, 0.0), variant) for cause in CAUSES]  # type: ignore[misc]
        goodput = analysis.mean(_goodput, variant)
        rows.append([variant, _number(goodput), _number(analysis.mean(_wall, variant)), *map(_number, seconds)])
    columns = ["variant", "steps/s", "wall, s", *(f"{cause}, s" for cause in CAUSES)]
    return ResultTable("Wall clock by cause, means of a run", columns, rows)


def divergences(analysis: Analysis) -> ResultTable | None:
    """Return a table of how far the losses and models of each variant are from the reference run."""
    if REFERENCE not in analysis.variants:
        return None
    rows: list[list[Value]] = []
    for suite in analysis.counted:
        for variant in analysis.variants:
            if variant != REFERENCE:
                # 4 significant digits, because a tiny difference must not be shown as 0
                gaps = [
                    float(f"{gap:.4g}") if math.isfinite(gap) else None for gap in analysis.loss_gap(suite, variant)
                ]
                rows.append([suite.name, variant, *gaps])
    columns = ["suite", "variant", "mean absolute loss difference", "largest", "mean L2 distance of snapshots"]
    return ResultTable("Divergence from the reference", [*columns, "of the last, in proportion to the model"], rows)


def rejected(analysis: Analysis) -> ResultTable | None:
    """Return a table of the runs that failed a quality gate, with the reason."""
    rows: list[list[Value]] = [[f.suite.name, f.run, f.gate, f.why] for f in analysis.failed]
    return ResultTable("Not counted: runs that did not pass a quality gate", ["suite", "run", "gate", "why"], rows)


def _gain(analysis: Analysis, suites: Sequence[Suite]) -> ConfidenceInterval:
    return analysis.paired(gain, _goodput, OVERLAPPED, BLOCKING, suites)


def _goodput(run: MeasuredRun) -> float:
    return run.goodput


def _waited(run: MeasuredRun) -> float:
    return run.waited


def _wall(run: MeasuredRun) -> float:
    return run.wall


def _axes(analysis: Analysis) -> list[str]:
    return list(analysis.counted[0].axes) if analysis.counted else []


def _cells(estimate: ConfidenceInterval, times: float = 1.0) -> list[Value]:
    return [_number(times * value) for value in estimate]


def _percent(value: float) -> float | None:
    return _number(100 * value)


def _number(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None
