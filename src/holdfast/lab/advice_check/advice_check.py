"""Is the advice honest? Costs of failures predicted from runs without one, then measured; and its save interval in a sweep."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.advice.large_job import simulate_published_jobs
from holdfast.lab import confidence as interval
from holdfast.lab.advice_check.killed_runs import run_and_kill
from holdfast.lab.advice_check.predicted_costs import AdviceCase, coverage
from holdfast.lab.advice_check.save_interval_sweep import Sweep, real_sweeps, resampled_sweep
from holdfast.lab.advice_check.simulated_failures import simulate_failures
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.result import Claim, Result, ResultTable, Row
from holdfast.report.files import prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOLDS, FEWEST, NEAR = 0.8, 12, 0.97
HIT, MISS, RANGE = "#2b6cb0", "#c53030", "#a0aec0"
SOURCE = "our goal"


def run(options: Options, meter: Meter) -> Result:
    """Predict, strike, measure; and sweep save intervals."""
    prepare(options.out)
    runs = run_and_kill(options, meter)
    trials = simulate_failures(options, meter)
    sweeps = [resampled_sweep(name, costs, runs.restarts[name], options.seed) for name, costs in runs.calm.items()]
    if not options.quick:
        name, costs = next(iter(runs.calm.items()))
        sweeps += real_sweeps(name, costs, options, meter)
    cases = [*runs.cases, *trials]
    return Result(
        experiment="advice-check",
        config={"seed": options.seed, "interval": options.interval, "cases": len(cases)},
        rows=[case.to_row() for case in cases] + [row for sweep in sweeps for row in _rows(sweep)],
        claims=[*_coverages(runs.cases, trials), *map(_near, sweeps), _llama()],
        remarks=[*_misses("real runs", runs.cases), *_misses("simulated workloads", trials), *_widths(cases), *_jobs()],
        tables=[_table(cases)],
        figures={"advice-check": figure(runs.cases, trials, sweeps)},
        captions={
            "advice-check": "Left: seconds that kills of real workers cost, and the interval predicted from a run without "
            "a failure. Middle: the same in iterations for simulated failures. Right: goodput at save intervals around the "
            "recommended one (dashed), relative to training without saves and failures."
        },
    )


def _coverages(real_cases: Sequence[AdviceCase], trials: Sequence[AdviceCase]) -> list[Claim]:
    by_unit = {unit: [case for case in real_cases if case.unit == unit] for unit in ("seconds", "iterations")}
    groups = {
        "real-seconds": ("kills of real workers: cost in seconds", by_unit["seconds"]),
        "real-iterations": ("kills of real workers: cost in iterations", by_unit["iterations"]),
        "simulated": ("failures of simulated workloads: cost in iterations", list(trials)),
    }
    claims = [
        Claim(
            id=name,
            claim=f"{words}, share of {len(cases)} cases in the predicted interval",
            source=SOURCE,
            expected=(HOLDS, None),
            measured=coverage(cases),
        )
        for name, (words, cases) in groups.items()
    ]
    different = {(case.workload, case.failure, case.strategy) for case in [*real_cases, *trials]}
    count = Claim(
        id="cases",
        claim="cases that differ in workload, failure or strategy",
        source=SOURCE,
        expected=(FEWEST, None),
        measured=len(different),
    )
    return [*claims, count]


def _near(sweep: Sweep) -> Claim:
    kinds = {"resampled": "resampled from what runs cost", "real": "real runs, by the clock"}
    return Claim(
        id=f"{sweep.workload}-{sweep.how.replace(', ', '-').replace(' ', '-')}",
        claim=f"{sweep.workload}, {kinds.get(sweep.how, f'{sweep.how}: the part that trains')}: goodput at the recommended save interval, as a part of the best of a sweep",
        source=SOURCE,
        expected=(NEAR, None),
        measured=sweep.recommended,
        interval=_spread(sweep),
    )


def _spread(sweep: Sweep) -> tuple[float, float] | None:
    """Where the recommended interval's part of the best lies, over the repeats; a few of them by Student's t."""
    if len(sweep.goodput) < 2 or sweep.how == "resampled":
        return None
    best = int(np.argmax(sweep.means))
    ratios = sweep.goodput[:, sweep.every.index(_recommended(sweep))] / sweep.goodput[:, best]
    found = interval.mean_of_few(np.asarray(ratios))
    return found.low, found.high


def _recommended(sweep: Sweep) -> int:
    return sweep.every[len(sweep.every) // 2]


def _llama() -> Claim:
    job, share = simulate_published_jobs()[0]
    return Claim(
        id="llama-3",
        claim=f"{job.name}: effective time by simulation of its published failures (published: {job.says})",
        source=job.source,
        expected=(job.figure - 0.03, job.figure + 0.03),
        measured=share.value,
    )


def _misses(what: str, cases: Sequence[AdviceCase]) -> list[str]:
    """Which cases were not as predicted, and on which side."""
    missed = [case for case in cases if not case.holds]
    if not missed:
        return [f"{what}: every case was as predicted."]
    sides = Counter(
        (case.workload, case.strategy, case.unit, "dearer" if case.measured > case.predicted.high else "cheaper")
        for case in missed
    )
    each = [f"{w}, {s}: {n} {side} ({unit})" for (w, s, unit, side), n in sides.most_common()]
    early = sum("before the first save" in case.failure for case in missed)
    about = f" {early} of them struck before the first save." if early else ""
    return [f"{what}: {len(missed)} of {len(cases)} cases were not as predicted: {'; '.join(each)}.{about}"]


def _widths(cases: Sequence[AdviceCase]) -> list[str]:
    """How much the intervals say: an interval that holds everything would be no prediction."""
    lines = []
    for unit in ("seconds", "iterations"):
        here = [case for case in cases if case.unit == unit and case.predicted.high > 0]
        wide = np.median(
            [(case.predicted.high - case.predicted.low) / max(case.predicted.value, 1e-9) for case in here]
        )
        off = np.median([abs(case.measured - case.predicted.value) for case in here])
        lines.append(
            f"{unit}: a predicted interval is {wide:.1f} times its value wide, and costs are {off:.2g} off it (medians)."
        )
    return lines


def _jobs() -> list[str]:
    return [
        f"{job.name} ({job.source}): published {job.says}, simulated {share.value:.1%} ({share.low:.1%} to {share.high:.1%}). "
        f"{job.assumed[0].upper()}{job.assumed[1:]}."
        for job, share in simulate_published_jobs()
    ]


def _rows(sweep: Sweep) -> list[Row]:
    return [
        {"sweep": sweep.workload, "how": sweep.how, "mtbf": sweep.mtbf, "every": each, "goodput": float(mean)}
        for each, mean in zip(sweep.every, sweep.means, strict=True)
    ]


def _table(cases: Sequence[AdviceCase]) -> ResultTable:
    groups = dict.fromkeys((case.workload, case.strategy, case.unit) for case in cases)
    rows: list[list[str | float | int | None]] = []
    for workload, strategy, unit in groups:
        here = [case for case in cases if (case.workload, case.strategy, case.unit) == (workload, strategy, unit)]
        first = here[0].predicted
        measured = float(np.mean([case.measured for case in here]))
        rows.append([workload, strategy, unit, first.value, first.low, first.high, measured, len(here), coverage(here)])
    columns = [
        "workload",
        "strategy",
        "unit",
        "predicted",
        "low",
        "high",
        "measured (mean)",
        "cases",
        "in the interval",
    ]
    return ResultTable("Predicted and measured costs of a failure", columns, rows)


def figure(real_cases: Sequence[AdviceCase], trials: Sequence[AdviceCase], sweeps: Sequence[Sweep]) -> "Figure":
    """Predicted intervals with what was measured, and the sweeps."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(13, 4.6), layout="constrained")
    seconds, iterations, over = sheet.subplots(1, 3)
    _cases(seconds, [case for case in real_cases if case.unit == "seconds"], "seconds that a kill costs")
    seconds.set_xscale("log")
    _cases(iterations, trials, "iterations that a failure costs")
    for sweep in sweeps:
        style = "o:" if sweep.how == "resampled" else "o-"
        over.plot(sweep.every, sweep.means, style, label=f"{sweep.workload}, {sweep.how}", markersize=4)
        over.axvline(_recommended(sweep), color=RANGE, linestyle="--", linewidth=0.8)
    over.set_xscale("log")
    over.set_xticks(sorted({each for sweep in sweeps for each in sweep.every}), minor=False)
    over.set_xticks([], minor=True)
    over.xaxis.set_major_formatter("{x:.0f}")
    over.tick_params("x", labelrotation=60)
    over.set_xlabel("steps between two saves")
    over.set_ylabel("goodput, of training without failures")
    over.legend(frameon=False, fontsize=8)
    return sheet


def _cases(axes: "Axes", cases: Sequence[AdviceCase], across: str) -> None:
    groups = list(dict.fromkeys((case.workload, case.strategy) for case in cases))
    for place, group in enumerate(groups):
        here = [case for case in cases if (case.workload, case.strategy) == group]
        low, high = here[0].predicted.low, here[0].predicted.high
        axes.plot([low, high], [place, place], color=RANGE, linewidth=7, alpha=0.5, solid_capstyle="butt")
        for case in here:
            axes.plot(case.measured, place, "o", color=HIT if case.holds else MISS, markersize=3)
    axes.set_yticks(range(len(groups)), [f"{workload}: {strategy}" for workload, strategy in groups], fontsize=7)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlabel(across)
    axes.spines[["top", "right"]].set_visible(False)


EXPERIMENT = Experiment(
    name="advice-check",
    title="costs of failures predicted from runs without one, and then measured; save intervals beside a sweep",
    source="ours",
    run=run,
)
