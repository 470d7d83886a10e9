"""The tables of a recovery matrix (such as tables 5 to 8 of the ECRL report), its claims, and remarks for readers."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from holdfast.cost.breakdown import CAUSES, PARTS
from holdfast.faults.storage import KINDS
from holdfast.finding import counted
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.matrix.analysis import GOODPUT, WAITED, WALL, Analysis, Metric, difference, gain, reduction, wins
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED, REFERENCE, VARIANTS
from holdfast.lab.matrix.runner import STOLEN
from holdfast.lab.matrix.suites import Suite
from holdfast.lab.result import Claim, ResultTable, Value

DIGITS = 4
TIMES = {  # the causes of wall-clock time, for readers
    "compute": "training, including the wait for the other ranks in all-reduces",
    "snapshot": "training waits while the state is copied for a save",
    "enqueue": "training waits while the run decides where each tensor goes in the file",
    "backpressure": "training waits because an earlier save is still being written",
    "write": "training waits while the save is written",
    "sync": "training waits for the other ranks during a save",
    "written during training": "the save is written while training continues; training does not wait",
    "recovery": "from a failure to the next step",
    "rework": "steps that are trained again",
    "data": "training waits for the next batch",
    "startup": "from the start to the first step",
    "closing": "after the last step, without the stall of the last save",
    "unaccounted": "all other time",
}
STALL, WRITE = 0.57, 0.92  # the paper's reductions
METRICS: dict[str, Metric] = {
    "runs that pass the audit": lambda run: float(run.audit == "pass"),
    "goodput, steps/s": GOODPUT,
    "restarts": lambda run: float(run.restarts),
    "steps trained again": lambda run: float(run.rolled_back),
    "samples not trained": lambda run: float(run.samples_lost),
    "wall clock, s": WALL,
    "stall, s": WAITED,
    "stall for writing and queueing, s": lambda run: run.written,
    "stall for copying the state, s": lambda run: run.stall.get("snapshot", math.nan),
    "recovery, s": lambda run: run.seconds.get("recovery", math.nan),
}


def tables(analysis: Analysis) -> list[ResultTable]:
    """Return all tables whose runs exist, the most important table first."""
    makers: list[Callable[[Analysis], ResultTable | None]] = [aggregate, per_suite, sliced, complete]
    makers += [time_columns, stalls, wall_clock, divergences, rejected]
    return [table for make in makers if (table := make(analysis)) is not None and table.rows]


def aggregate(analysis: Analysis) -> ResultTable | None:
    """Return a table of mean metrics by variant over all valid suites (table 5 of the ECRL report)."""
    if not analysis.counted:
        return None
    compared = analysis.has(BLOCKING, OVERLAPPED)
    against = ["overlapped minus blocking", "95 % from", "to"] if compared else []
    rows: list[list[Value]] = []
    for name, metric in METRICS.items():
        cells: list[Value] = [name, *(_number(analysis.mean(metric, variant)) for variant in analysis.variants)]
        rows.append(cells + (_cells(analysis.paired(difference, metric, OVERLAPPED, BLOCKING)) if compared else []))
    if REFERENCE in analysis.variants:
        over = {variant: analysis.paired(gain, GOODPUT, variant, REFERENCE).value for variant in analysis.variants}
        back: list[Value] = [_percent(over[OVERLAPPED] - over[BLOCKING]), None, None] if compared else []
        rows.append(["goodput compared with the reference, %", *map(_percent, over.values()), *back])
    return ResultTable(f"Means of {counted(len(analysis.counted), 'suite')}", ["", *analysis.variants, *against], rows)


def per_suite(analysis: Analysis) -> ResultTable | None:
    """Return a table of suites, sorted by how much overlapped saves gain over blocking saves (ECRL report, table 6)."""
    if not analysis.has(REFERENCE, BLOCKING, OVERLAPPED):
        return None
    columns = [*_axes(analysis), "reference, steps/s", "blocking, steps/s", "overlapped, steps/s"]
    columns += ["goodput gained by overlapped, %", "95 % from", "to"]
    columns += [
        "blocking compared with reference, %",
        "overlapped compared with reference, %",
        "stall, overlapped minus blocking, s",
    ]
    rows: list[list[Value]] = []
    for suite in sorted(analysis.counted, key=lambda suite: -_gain(analysis, [suite]).value):
        goodputs = [analysis.mean(GOODPUT, variant, [suite]) for variant in (REFERENCE, BLOCKING, OVERLAPPED)]
        compared = (analysis.paired(gain, GOODPUT, variant, REFERENCE, [suite]) for variant in (BLOCKING, OVERLAPPED))
        stall = analysis.paired(difference, WAITED, OVERLAPPED, BLOCKING, [suite]).value
        gains = [*_cells(_gain(analysis, [suite]), 100), *(_percent(estimate.value) for estimate in compared)]
        rows.append([*suite.axes.values(), *map(_number, goodputs), *gains, _number(stall)])
    return ResultTable("Goodput of each suite, sorted by what overlapped saves gain over blocking saves", columns, rows)


def sliced(analysis: Analysis) -> ResultTable | None:
    """Return a table of means over all suites with the same model, data set or other setting."""
    if not analysis.has(BLOCKING, OVERLAPPED):
        return None
    rows: list[list[Value]] = []
    for axis, value, suites in analysis.slices():
        stall = analysis.paired(difference, WAITED, OVERLAPPED, BLOCKING, suites)
        less = analysis.paired(reduction, WAITED, OVERLAPPED, BLOCKING, suites)
        goodputs = [_number(analysis.mean(GOODPUT, variant, suites)) for variant in (BLOCKING, OVERLAPPED)]
        own = [axis, value, len(suites), *goodputs, *_cells(_gain(analysis, suites), 100)]
        apart = None
        if REFERENCE in analysis.variants:
            gaps = [analysis.loss_gap(s, OVERLAPPED).loss - analysis.loss_gap(s, BLOCKING).loss for s in suites]
            apart = _number(sum(gaps) / len(gaps))
        rows.append([*own, _number(stall.value), _percent(less.value), apart])
    columns = [
        "setting",
        "value",
        "suites",
        "blocking, steps/s",
        "overlapped, steps/s",
        "goodput gained by overlapped, %",
    ]
    columns += ["95 % from", "to", "stall, overlapped minus blocking, s", "stall reduced by, %", "loss difference, overlapped minus blocking"]  # fmt: skip
    return ResultTable("Means over all suites with the same model, data set or failure schedule", columns, rows)


def complete(analysis: Analysis) -> ResultTable | None:
    """Return a table of goodput, waiting for saves, and run time by suite and variant (ECRL report, table 8)."""
    columns = [*_axes(analysis)]
    for what in ("steps/s", "stall, s", "wall, s"):
        columns += [f"{variant}, {what}" for variant in analysis.variants]
    rows: list[list[Value]] = []
    for suite in analysis.counted:
        pairs = product((GOODPUT, WAITED, WALL), analysis.variants)
        means = [_number(analysis.mean(metric, variant, [suite])) for metric, variant in pairs]
        rows.append([*suite.axes.values(), *means])
    return ResultTable("Goodput, stall and wall clock of each suite", columns, rows)


def time_columns(analysis: Analysis) -> ResultTable | None:
    """Return a table that explains the columns of the two tables of times."""
    rows: list[list[Value]] = [[name, meaning] for name, meaning in TIMES.items()] if analysis.counted else []
    return ResultTable("Columns of the next two tables", ["column", "meaning"], rows)


def stalls(analysis: Analysis) -> ResultTable | None:
    """Return a table by variant of the seconds that training waited for saves, in total, by cause and per save."""
    parts = ("waited", *PARTS, "overlapped")
    rows: list[list[Value]] = []
    for variant in analysis.variants if analysis.counted else ():
        seconds = [analysis.mean(lambda run, part=part: run.stall.get(part, math.nan), variant) for part in parts]  # type: ignore[misc]
        saves = analysis.mean(lambda run: float(run.saves), variant)
        per_save = seconds[0] / saves if saves else math.nan
        rows.append([variant, *map(_number, (saves, *seconds, per_save))])
    columns = [
        "variant",
        "saves",
        "waited in total, s",
        *(f"{part}, s" for part in PARTS),
        "written during training, s",
    ]
    return ResultTable("Stall by part: mean seconds of a run", [*columns, "waited per save, s"], rows)


def wall_clock(analysis: Analysis) -> ResultTable | None:
    """Return a table of the mean wall-clock time of a run, by variant and cause."""
    rows: list[list[Value]] = []
    for variant in analysis.variants if analysis.counted else ():
        means = [analysis.mean(GOODPUT, variant), analysis.mean(WALL, variant)]
        rows.append([variant, *map(_number, [*means, *analysis.mean_seconds(variant).values()])])
    columns = ["variant", "steps/s", "wall, s", *(f"{cause}, s" for cause in CAUSES)]
    return ResultTable("Wall clock by cause: mean seconds of a run", columns, rows)


def divergences(analysis: Analysis) -> ResultTable | None:
    """Return a table of how far the losses and models of each variant are from the run without failures."""
    if REFERENCE not in analysis.variants:
        return None
    rows: list[list[Value]] = []
    for suite, variant in product(analysis.counted, analysis.variants):
        if variant != REFERENCE:
            # 4 significant digits, because a tiny difference must not be shown as 0
            gaps = [float(f"{gap:.4g}") if math.isfinite(gap) else None for gap in analysis.loss_gap(suite, variant)]
            rows.append([suite.name, variant, *gaps])
    columns = [
        "suite",
        "variant",
        "mean absolute difference of the loss",
        "largest difference of the loss",
        "mean L2 distance of the snapshots",
    ]
    return ResultTable(
        "Differences from the reference", [*columns, "distance of the last snapshot / norm of the model"], rows
    )


def rejected(analysis: Analysis) -> ResultTable | None:
    rows: list[list[Value]] = [[f.suite.name, f.run, f.gate, f.why] for f in analysis.failed]
    return ResultTable("Not counted: runs that did not pass a quality gate", ["suite", "run", "gate", "why"], rows)


def claims(analysis: Analysis) -> list[Claim]:
    """Return the claims that the runs can confirm or refute, each with its measured value."""
    passed = [run.audit == "pass" for run in analysis.measured.values()]
    count, share = len(analysis.suites), sum(passed) / len(passed)
    gates = f"share of the {count} suites whose runs pass all quality gates"
    return [
        Claim("pass-rate", "share of the runs that pass the audit", "table 5: 1.0", (1, 1), share),
        Claim("gates", gates, "section 5.9", (1, 1), len(analysis.counted) / count),
        *_overlapped(analysis),
        *_exact(analysis),
    ]


def _overlapped(analysis: Analysis) -> Iterator[Claim]:
    """Yield the claims that compare overlapped with blocking saves, if the matrix has the needed runs."""
    has_faults = any(f.kind in KINDS for schedule in analysis.matrix.failures.values() for f in schedule)
    if not analysis.has(BLOCKING, OVERLAPPED) or analysis.matrix.sweep or has_faults:
        return
    pair, of = (OVERLAPPED, BLOCKING), Claim.of_estimate
    beats = analysis.paired(wins, GOODPUT, *pair)
    yield of("beats", "share of the suites in which overlapped saves have more goodput than blocking saves", "table 6: 8 of 8", (1, 1), beats)  # fmt: skip
    gained = analysis.paired(gain, GOODPUT, *pair)
    yield of(
        "gain",
        "goodput that overlapped saves gain over blocking saves, divided by the goodput with blocking saves",
        "table 5: 0.032",
        (0, None),
        gained,
    )
    stall = analysis.paired(reduction, WAITED, *pair)
    yield of(
        "stall",
        "reduction of the stall by overlapped saves, divided by the stall with blocking saves",
        "section 6.1: 57 %",
        (STALL, None),
        stall,
    )
    written = analysis.paired(reduction, lambda run: run.written, *pair)
    yield of("write", "reduction of the stall for writing and queueing by overlapped saves, divided by this stall with blocking saves", "section 6.1: 92 %", (WRITE, None), written)  # fmt: skip


def _exact(analysis: Analysis) -> Iterator[Claim]:
    """Yield the claim that recoveries without lost samples give the same losses as the run without failures."""
    exact = [name for name in analysis.variants if VARIANTS[name].is_exact and name != REFERENCE]
    if not (exact and analysis.has(REFERENCE)) or "workers_after" in analysis.matrix.sweep:
        return
    most = [analysis.loss_gap(suite, variant).most for suite in analysis.counted for variant in exact]
    words = (
        f"largest difference of a training loss of {' or '.join(exact)} from the loss of the reference in the same step"
    )
    largest = math.nan if any(map(math.isnan, most)) else max(most)
    yield Claim("exact", words, "our goal; section 6.5: a mean difference of 0.07", (0, 0), largest)


def remarks(analysis: Analysis) -> list[str]:
    """Return sentences for the report: how times are counted, which suites are left out, and what a save costs."""
    lines = [
        "The wall clock of a run is counted from the start of the supervisor (the parent process of the workers) to the end of "
        "the last worker. It includes the start, every recovery, and the wait for saves that are still being written at the "
        "end. Goodput is computed with this wall clock.",
        "The stall for writing and queueing is a part of the stall. With blocking saves, it is the time until the save is "
        "written. With overlapped saves, it is the time to decide where each tensor goes in the file, and to wait while "
        "`max_inflight` earlier saves are still being written. After the last step, the run also waits until the last overlapped save is written. This wait is not "
        "part of the stall; the table of the wall clock by cause has it under `closing`.",
    ]
    if analysis.failed:
        names = ", ".join(dict.fromkeys(failure.suite.name for failure in analysis.failed))
        lines.append(
            f"NOT COUNTED in any mean, because a run of the suite failed a quality gate: {names}. The last table says why."
        )
    if analysis.has(BLOCKING, OVERLAPPED):
        # These decide whether overlapping can gain anything.
        size = analysis.mean(lambda run: float(run.bytes), BLOCKING) / 1e6
        step = analysis.mean(lambda run: run.seconds["compute"] / max(1, run.committed), BLOCKING)
        save, less = (analysis.mean(lambda run: run.waited / max(1, run.saves), how) for how in (BLOCKING, OVERLAPPED))
        lines.append(
            f"On average over all suites, a save has {size:.3g} MB, and a step of the variant `blocking` takes {step:.3g} s. "
            f"Training waits {save:.3g} s for a blocking save (variant `blocking`) and {less:.3g} s for an overlapped save "
            "(variant `overlapped`)."
        )
    if stolen := [run.stolen for run in analysis.measured.values() if run.stolen is not None]:
        repeated = sum(run.tries > 1 for run in analysis.measured.values())
        lines.append(
            f"The runs were on a virtual machine. Its host gave {sum(stolen) / len(stolen):.1%} of the processor time to other "
            f"virtual machines on average, and at most {max(stolen):.1%} during a run. A run is repeated if this share is more "
            f"than {STOLEN:.0%}; this happened to {repeated} of {len(analysis.measured)} runs."
        )
    return lines


def _gain(analysis: Analysis, suites: Sequence[Suite]) -> ConfidenceInterval:
    return analysis.paired(gain, GOODPUT, OVERLAPPED, BLOCKING, suites)


def _axes(analysis: Analysis) -> list[str]:
    return list(analysis.counted[0].axes) if analysis.counted else []


def _cells(estimate: ConfidenceInterval, times: float = 1.0) -> list[Value]:
    return [_number(times * value) for value in estimate]


def _percent(value: float) -> float | None:
    return _number(100 * value)


def _number(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None
