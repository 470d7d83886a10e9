"""What a failure costs when everything goes back to the checkpoint, and when only the lost blocks do."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from holdfast.blocks import Floats
from holdfast.failure import geometric_steps, lost_blocks
from holdfast.lab.experiment import Meter, Options, each
from holdfast.lab.result import Claim, Result, Row
from holdfast.policy import Policy
from holdfast.recovery import RECOVERIES
from holdfast.simulate.ages import ages, recovered
from holdfast.simulate.lanes import Start
from holdfast.simulate.trajectory import Trajectory, trajectory
from holdfast.simulate.trials import as_given, iterations
from holdfast.workloads.mlr import mlr
from holdfast.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOST = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1))
INTERVAL = 8


def run(options: Options, meter: Meter) -> Result:
    """Compare full with partial recovery of logistic regression on the digits that come with the package."""
    workload, trials = mlr("digits", options.data), options.count(full=100, quick=20)
    unperturbed = trajectory(workload)
    saved_at = ages(unperturbed, workload.blocks, workload.norm, Policy(ranking="full", interval=INTERVAL))
    steps = geometric_steps(unperturbed.length / 2, unperturbed.length, trials, options.seed)
    progress = meter(f"{workload.name}: trials", len(RECOVERIES) * len(LOST) * trials)
    rows = []
    for lost in LOST:
        starts = _starts(workload, unperturbed, saved_at, steps, float(lost), options.seed)
        spent = {how: iterations(workload, chosen, as_given, limit=20 * unperturbed.length, jobs=options.jobs, done=each(progress)) for how, chosen in starts.items()}  # fmt: skip
        costs = {how: steps + count - unperturbed.length for how, count in spent.items()}
        rows += [_row(how, lost, costs[how], costs["full"]) for how in costs]
    return Result(
        experiment="partial-recovery",
        config={
            "workload": workload.name,
            "seed": options.seed,
            "trials": trials,
            "interval": INTERVAL,
            "unperturbed": unperturbed.length,
        },
        rows=rows,
        claims=[_falls(rows)],
        figures={"partial-recovery": figure(rows, workload.name)},
    )


def _starts(
    workload: Workload, run: Trajectory, saved_at: np.ndarray, steps: np.ndarray, lost: float, seed: int
) -> dict[str, list[Start]]:
    """For each recovery the states after the same failures: trial i loses the same blocks at the same step."""
    count = len(workload.blocks)
    gone = [lost_blocks(count, lost, np.random.default_rng((seed, trial))) for trial in range(len(steps))]
    return {
        name: [
            Start(recovered(run, workload.blocks, saved_at[step], how, step, ids), int(step))
            for step, ids in zip(steps, gone, strict=True)
        ]
        for name, how in RECOVERIES.items()
    }


def _row(recovery: str, lost: Fraction, costs: Floats, full: Floats) -> Row:
    mean, half = float(costs.mean()), 1.96 * float(costs.std(ddof=1)) / np.sqrt(len(costs))
    return {
        "recovery": recovery, "lost": str(lost), "trials": len(costs), "cost_mean": mean,
        "cost_low": mean - half, "cost_high": mean + half, "reduction": 1 - mean / float(full.mean()),
    }  # fmt: skip


def _falls(rows: Sequence[Row]) -> Claim:
    partial = [row["cost_mean"] for row in rows if row["recovery"] == "partial"]
    return Claim(
        id="cost-falls",
        claim="steps from one lost fraction to the next smaller one (1, 3/4, 1/2, 1/4) in which the mean cost falls",
        source="figure 7",
        expected=(len(LOST) - 1, None),
        measured=int(np.sum(np.diff(partial) > 0)),
    )


def figure(rows: Sequence[Row], name: str) -> "Figure":
    """Mean costs with 95 % confidence intervals over the lost fraction."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = sheet.subplots()
    for how in RECOVERIES:
        chosen = [row for row in rows if row["recovery"] == how]
        means = np.array([row["cost_mean"] for row in chosen])
        half = [row["cost_high"] - row["cost_mean"] for row in chosen]
        axes.errorbar([row["lost"] for row in chosen], means, yerr=half, marker="o", capsize=3, label=f"{how} recovery")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("fraction of the parameters lost")
    axes.set_ylabel("iteration cost")
    axes.set_title(f"Partial against full recovery: {name}")
    axes.legend(frameon=False)
    return sheet
