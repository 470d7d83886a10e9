"""Test `holdfast advise`: predict failure costs from runs without failures, measure them, and sweep save intervals."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.advice.estimate import Estimate
from holdfast.advice.large_job import PublishedJob, simulate_published_jobs
from holdfast.lab.advice_check import measurements
from holdfast.lab.advice_check.measurements import AdviceCase, Sweep, coverage
from holdfast.lab.confidence import mean
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.plot_style import new_figure
from holdfast.lab.result import Claim, Result, ResultTable, Row, Value
from holdfast.report.files import prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOLDS, FEWEST, NEAR = 0.8, 12, 0.97
HIT, MISS, RANGE = "#2b6cb0", "#c53030", "#a0aec0"
SOURCE = "our goal"
RECOMMENDED = measurements.FACTORS.index(1.0)


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: predict what failures and save intervals cost, and compare with measured runs."""
    prepare(options.out)
    runs = measurements.run_and_kill(options, meter)
    sweeps = [
        measurements.resampled_sweep(name, costs, runs.restarts[name], options.seed)
        for name, costs in runs.calm.items()
    ]
    if not options.quick:
        name, costs = next(iter(runs.calm.items()))
        sweeps += measurements.real_sweeps(name, costs, options, meter)
    trials = measurements.simulate_failures(options, meter)  # after all real runs, because it starts threads
    cases, jobs = [*runs.cases, *trials], simulate_published_jobs()
    goodputs: list[Row] = [
        {"sweep": sweep.workload, "how": sweep.how, "mtbf": sweep.mtbf, "every": interval, "goodput": float(mean)}
        for sweep in sweeps
        for interval, mean in zip(sweep.every, sweep.means, strict=True)
    ]
    llama, share = jobs[0]
    words = f"{llama.name}: effective time in a simulation with the published failures (published: {llama.says})"
    near = (llama.figure - 0.03, llama.figure + 0.03)
    return Result(
        experiment="advice-check",
        config={"seed": options.seed, "interval": options.interval, "cases": len(cases)},
        rows=[case.to_row() for case in cases] + goodputs,
        claims=[
            *_coverages(runs.cases, trials),
            *map(_sweep_claim, sweeps),
            Claim("llama-3", words, llama.source, near, share.value),
        ],
        remarks=[
            *(_misses("Kills of real workers", runs.cases), _misses("Simulated failures", trials)),
            *_widths(cases),
        ],
        tables=[_table(cases), _job_table(jobs)],
        figures={"advice-check": figure(runs.cases, trials, sweeps)},
        captions={
            "advice-check": "Left: the measured costs of kills of real workers, in seconds (dots), and the intervals that "
            "were predicted from a run without a failure (bars). Middle: costs of simulated failures, in iterations. Right: "
            "goodput at several save intervals, divided by the goodput of training without saves and failures. The dashed "
            "line is the recommended save interval."
        },
    )


def _coverages(real_cases: Sequence[AdviceCase], trials: Sequence[AdviceCase]) -> list[Claim]:
    seconds, iterations = ([case for case in real_cases if case.unit == unit] for unit in ("seconds", "iterations"))
    groups = {
        "real-seconds": ("kills of real workers", "seconds", seconds),
        "real-iterations": ("kills of real workers", "iterations", iterations),
        "simulated": ("failures of simulated workloads", "iterations", list(trials)),
    }
    claims = []
    for name, (what, unit, cases) in groups.items():
        words = f"{what}: share of the {len(cases)} cases whose measured cost in {unit} is in the predicted interval"
        claims.append(Claim(name, words, SOURCE, (HOLDS, None), coverage(cases)))
    different = {(case.workload, case.failure, case.strategy) for case in [*real_cases, *trials]}
    words = "number of cases that differ in workload, failure or strategy"
    return [*claims, Claim("cases", words, SOURCE, (FEWEST, None), len(different))]


def _sweep_claim(sweep: Sweep) -> Claim:
    kinds = {
        "resampled": "computed from resampled costs of real runs",
        "real": "of real runs, per second of wall clock",
    }
    how = kinds.get(sweep.how, "of real runs, as the share of their duration that useful steps took")
    words = (
        f"workload {sweep.workload}: goodput ({how}) at the recommended save interval, divided by the best goodput of all "
        f"{len(sweep.every)} tested intervals"
    )
    ends: tuple[float, float] | None = None
    if len(sweep.goodput) > 1 and sweep.how != "resampled":
        ratios = sweep.goodput[:, RECOMMENDED] / sweep.goodput[:, int(np.argmax(sweep.means))]
        _, low, high = mean(np.asarray(ratios))
        ends = low, high
    ident = f"{sweep.workload}-{sweep.how.replace(', ', '-').replace(' ', '-')}"
    return Claim(ident, words, SOURCE, (NEAR, None), sweep.recommended, ends)


def _misses(name: str, cases: Sequence[AdviceCase]) -> str:
    missed = [case for case in cases if not case.holds]
    if not missed:
        return f"{name}: all {len(cases)} measured costs are in their predicted intervals."
    more = sum(case.measured > case.predicted.high for case in missed)
    early = sum("before the first save" in case.failure for case in missed)
    about = f" {early} of these {len(missed)} failures struck before the first save." if early else ""
    return (
        f"{name}: {len(missed)} of {len(cases)} measured costs are outside their predicted intervals: {more} are higher, and "
        f"{len(missed) - more} are lower.{about}"
    )


def _widths(cases: Sequence[AdviceCase]) -> Iterator[str]:
    for unit in ("seconds", "iterations"):
        all_cases = [case for case in cases if case.unit == unit]
        chosen = [case for case in all_cases if case.predicted.high > 0]
        width = np.median([(c.predicted.high - c.predicted.low) / max(c.predicted.value, 1e-9) for c in chosen])
        error = np.median([abs(case.measured - case.predicted.value) for case in chosen])
        exact = len(all_cases) - len(chosen)
        left_out = f" The {exact} cases with a predicted interval from 0 to 0 are left out." if exact else ""
        yield (
            f"Costs in {unit}: the width of the predicted interval, divided by the predicted value, is {width:.1f} (median over "
            f"the cases). The measured cost differs from the predicted value by {error:.2g} {unit} (median of the absolute "
            f"differences).{left_out}"
        )


def _table(cases: Sequence[AdviceCase]) -> ResultTable:
    groups: dict[tuple[str, str, str], list[AdviceCase]] = {}
    for case in cases:
        groups.setdefault((case.workload, case.strategy, case.unit), []).append(case)
    rows: list[list[Value]] = []
    for key, group in groups.items():
        first, measured = group[0].predicted, float(np.mean([case.measured for case in group]))
        rows.append([*key, first.value, first.low, first.high, measured, len(group), coverage(group)])
    columns = ["workload", "strategy", "unit", "predicted", "predicted, from", "to", "measured (mean)", "cases"]
    columns.append("share of the cases in the interval")
    return ResultTable("Predicted and measured costs of a failure", columns, rows)


def _job_table(jobs: Sequence[tuple[PublishedJob, Estimate]]) -> ResultTable:
    rows: list[list[Value]] = [
        [
            f"{job.name} ({job.source})",
            job.says,
            *(f"{value:.1%}" for value in (share.value, share.low, share.high)),
            f"{job.assumed[0].upper()}{job.assumed[1:]}.",
        ]
        for job, share in jobs
    ]
    columns = [
        "job",
        "published effective time",
        "simulated effective time",
        "from",
        "to",
        "what is stated and assumed",
    ]
    return ResultTable("Effective time of large published jobs, and of their simulations", columns, rows)


def figure(real_cases: Sequence[AdviceCase], trials: Sequence[AdviceCase], sweeps: Sequence[Sweep]) -> "Figure":
    drawn = new_figure(13, 4.6)
    seconds, iterations, over = drawn.subplots(1, 3)
    _draw_cases(seconds, [case for case in real_cases if case.unit == "seconds"], "cost of a kill, seconds")
    seconds.set_xscale("log")
    _draw_cases(iterations, trials, "cost of a failure, iterations")
    for sweep in sweeps:
        style = "o:" if sweep.how == "resampled" else "o-"
        over.plot(sweep.every, sweep.means, style, label=f"{sweep.workload}, {sweep.how}", markersize=4)
        over.axvline(sweep.every[RECOMMENDED], color=RANGE, linestyle="--", linewidth=0.8)
    over.set_xscale("log")
    over.set_xticks(sorted({interval for sweep in sweeps for interval in sweep.every}), minor=False)
    over.set_xticks([], minor=True)
    over.xaxis.set_major_formatter("{x:.0f}")
    over.tick_params("x", labelrotation=60)
    over.set_xlabel("steps between two saves")
    over.set_ylabel("goodput, of training without failures")
    over.legend(frameon=False, fontsize=8)
    return drawn


def _draw_cases(axes: "Axes", cases: Sequence[AdviceCase], across: str) -> None:
    groups = list(dict.fromkeys((case.workload, case.strategy) for case in cases))
    for place, group in enumerate(groups):
        own = [case for case in cases if (case.workload, case.strategy) == group]
        low, high = own[0].predicted.low, own[0].predicted.high
        axes.plot([low, high], [place, place], color=RANGE, linewidth=7, alpha=0.5, solid_capstyle="butt")
        for case in own:
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
