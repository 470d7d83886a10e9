"""The experiment early-failures: failures before the first full checkpoint, and two remedies that the SCAR paper does not have.

A block that was never saved can only be reset to its initial value, which on matrix factorization costs more than
starting over. First remedy: saves start early, after 1, 2, 4, ... iterations, with parts that together have the bytes of
one full checkpoint, or with the full state. Second remedy: such a block gets a fresh value by the workload's own rule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isnan
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import ConfidenceInterval, finite, mean, paired
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial.comparison import PanelComparison, compare_strategies
from holdfast.lab.partial.cost_report import cheapest, criteria, departures, panel_grid, unconverged_remarks
from holdfast.lab.result import Claim, Result, ResultTable, Row, Value
from holdfast.lab.simulate.strategy import Strategy
from holdfast.workloads.reinit import has_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST, EIGHTH = Fraction(1, 2), Fraction(1, 8)
FOUND_ON = "mf-movielens"  # the panel on which initial values cost more than starting over


@dataclass(frozen=True, slots=True)
class Approach:
    """A recovery strategy and a checkpoint schedule; each regular save holds the fraction `fraction` of the blocks."""

    name: str
    recovery: str
    saves: str = "regular"
    fraction: Fraction = Fraction(1)

    def strategy(self, interval: int) -> Strategy:
        ranking = "full" if self.fraction == 1 else "priority"
        policy = Policy(ranking=ranking, interval=interval, fraction=self.fraction, saves=self.saves)
        return Strategy(policy=policy, recovery=self.recovery, lost=LOST)


OVER = Approach("start over", "full")
FIRST = Approach("first values", "partial")
EARLY = Approach("early saves", "partial", saves="early")
EARLY_FULL = Approach("early full saves", "partial", saves="early-full")
FRESH = Approach("fresh values", "fresh")
BOTH = Approach("early saves, fresh values", "fresh", saves="early")
PRIORITY = Approach("priority 1/8", "partial", fraction=EIGHTH)
PRIORITY_FRESH = Approach("priority 1/8, fresh values", "fresh", fraction=EIGHTH)
DESCRIBED = {  # for the report, by approach
    OVER: "after a failure, all blocks return to the newest full checkpoint or, if there is none, to their initial values",
    FIRST: "only the lost blocks return to their newest saved values or, if they were never saved, to their initial values",
    EARLY: f"as `{FIRST.name}`, but the first full checkpoint is saved in equal parts, one after each of the iterations 1, 2, 4, "
    "..., and the last part when this checkpoint is due",
    EARLY_FULL: f"as `{FIRST.name}`, with additional saves of all blocks after the iterations 1, 2, 4, ... before the first full "
    "checkpoint",
    FRESH: f"as `{FIRST.name}`, but lost blocks that were never saved get values by a rule of the model, such as zero",
    BOTH: f"saves as in `{EARLY.name}`, values as in `{FRESH.name}`",
    PRIORITY: "every iteration saves an eighth of the state, the blocks that changed most first; blocks that were never saved "
    "return to their initial values",
    PRIORITY_FRESH: f"saves as in `{PRIORITY.name}`, values as in `{FRESH.name}`",
}
APPROACHES = (OVER, FIRST, EARLY, EARLY_FULL, FRESH, BOTH, PRIORITY, PRIORITY_FRESH)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The trials on one model and data set, divided into failures before and after the first full checkpoint."""

    comparison: PanelComparison
    interval: int
    approaches: Sequence[Approach]

    @property
    def early(self) -> npt.NDArray[np.bool_]:
        return self.comparison.measurement.steps < self.interval

    def cost(self, approach: Approach, mask: npt.NDArray[np.bool_]) -> ConfidenceInterval:
        return mean(finite(self.costs(approach)[mask]))

    def saved(self, approach: Approach, against: Approach, mask: npt.NDArray[np.bool_]) -> ConfidenceInterval:
        """Return how many iterations `approach` saves relative to `against`: the mean over the trials in `mask`."""
        ours, theirs = paired(self.costs(approach)[mask], self.costs(against)[mask])
        return mean(theirs - ours)

    def both_costs(self, approach: Approach) -> tuple[float, ...]:
        """Return the mean cost of early and of later failures under `approach`, each with the ends of its interval.

        Early failures happen before the first full checkpoint."""
        return (*self.cost(approach, self.early), *self.cost(approach, ~self.early))

    def rows(self) -> list[Row]:
        """Return one row for each approach: its costs over all failures, over early and over later failures."""
        names = [f"{which}_{part}" for which in ("early", "later") for part in ("cost", "low", "high")]
        return [
            {"way": approach.name, **row, **dict(zip(names, self.both_costs(approach), strict=True))}
            for approach, row in zip(self.approaches, self.comparison.rows, strict=True)
        ]

    def table(self) -> ResultTable:
        length = round(self.comparison.measurement.unperturbed)
        rows: list[list[Value]] = []
        for approach in self.approaches:
            written = float(approach.strategy(self.interval).policy.written(length))
            rows.append([approach.name, *self.both_costs(approach), written])
        columns = ["way", "early failures", "from", "to", "late failures", "from", "to"]
        columns.append(f"states written in {length} iterations")
        title = f"{self.comparison.label}: mean cost of a failure, in iterations, with its 95 % interval (from, to)"
        return ResultTable(title, columns, rows)

    def costs(self, approach: Approach) -> Floats:
        return self.comparison.measurement.costs_of(approach.strategy(self.interval)).cost


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: compare ways to recover from failures that happen before the first full checkpoint."""
    trials, interval = options.trial_count(full=100, quick=8), options.interval
    has_fresh_values = options.workload is None or has_rule(options.workload)
    approaches = [approach for approach in APPROACHES if has_fresh_values or approach.recovery != "fresh"]
    strategies = [approach.strategy(interval) for approach in approaches]
    panels = compare_strategies(options, meter, trials, strategies, OVER.strategy(interval), early=interval)
    splits = [Split(comparison, interval, approaches) for comparison in panels]
    regular, full = (approach.strategy(interval).policy.written(interval) for approach in (FIRST, EARLY_FULL))
    config: dict[str, Value] = {
        "seed": options.seed,
        "trials": trials,
        "iterations between two full checkpoints": interval,
        "lost": f"{LOST} of the blocks",
    }
    return Result(
        experiment="early-failures",
        config=config | criteria(panels),
        rows=[row for split in splits for row in split.rows()],
        claims=[claim for split in splits for claim in _claims(split)] if options.workload is None else [],
        remarks=[
            f"After {interval} iterations, `{FIRST.name}` has written {regular} whole state: its first full checkpoint. "
            f"`{EARLY.name}` has then written as many values, in several parts. Over a whole run, `{EARLY_FULL.name}` writes "
            f"{full - regular} whole states more than `{FIRST.name}`, and `{FRESH.name}` writes as much as `{FIRST.name}`.",
            *departures(options),
            *(_remark(split) for split in splits),
            *unconverged_remarks(panels),
        ],
        tables=[split.table() for split in splits],
        figures={"early-failures": figure(panels, interval, approaches)},
        captions={
            "early-failures": "Mean costs in iterations, with 95 % intervals, of early failures (before the first full "
            "checkpoint) and of late failures."
        },
        terms={f"`{approach.name}`": f"{DESCRIBED[approach]}." for approach in approaches},
    )


def _claims(split: Split) -> Iterator[Claim]:
    panel, label = split.comparison.panel, split.comparison.label
    if panel == FOUND_ON and not split.comparison.quick:
        words = f"{label}: iterations by which `{FIRST.name}` costs more than `{OVER.name}`"
        more = split.saved(OVER, FIRST, split.early)
        yield Claim.of_estimate(f"{panel}-finding", words, "our finding", (0, None), more)
    for approach, against in ((EARLY, FIRST), (EARLY_FULL, FIRST), (FRESH, FIRST), (FRESH, OVER)):
        ident = "first" if against is FIRST else "over"
        ident = f"{panel}-{approach.saves if approach is not FRESH else 'fresh'}-{ident}"
        words = f"{label}: iterations by which `{approach.name}` costs less than `{against.name}`"
        yield Claim.of_estimate(ident, words, "our goal", (0, None), split.saved(approach, against, split.early))


def _remark(split: Split) -> str:
    early, label = split.early, split.comparison.label
    if not early.any() or early.all():
        return f"{label}: {'no' if not early.any() else 'every'} failure is early."
    first, close = cheapest({approach.name: split.costs(approach)[early] for approach in split.approaches})
    unproved = f" The trials do not show that another way costs more: {', '.join(close)}." if close else ""
    more, less = split.saved(FIRST, EARLY, ~early), split.saved(EARLY, FIRST, ~early)
    difference, word = (less, "less") if more.value < 0 else (more, "more")
    ends = "" if isnan(difference.low) else f" ({difference.ends()})"  # unknown: too few trials
    return (
        f"{label}: {early.sum()} of the {len(early)} failures are early. The early failures cost least with `{first}`.{unproved} On average, a "
        f"late failure costs {difference.value:.2f} iterations {word} with `{EARLY.name}` than with `{FIRST.name}`{ends}."
    )


def figure(panels: Sequence[PanelComparison], interval: int, approaches: Sequence[Approach]) -> "Figure":
    def draw(axes: "Axes", comparison: PanelComparison) -> None:
        split = Split(comparison, interval, approaches)
        masks = {"before the first full checkpoint": split.early, "later": ~split.early}
        for (label, mask), shift in zip(masks.items(), (-0.1, 0.1), strict=True):
            costs = [split.cost(approach, mask) for approach in approaches]
            places = [place + shift for place in range(len(costs))]
            means, half = [cost.value for cost in costs], [max(cost.high - cost.value, 0) for cost in costs]
            axes.errorbar(places, means, yerr=half, fmt="o", markersize=4, capsize=3, label=label)
        axes.axhline(0, color="black", linewidth=0.5)
        names = [approach.name for approach in approaches]
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)

    return panel_grid(panels, draw, across="")


EXPERIMENT = Experiment(
    name="early-failures",
    title="iteration costs of failures before the first full checkpoint, with saves that start early and with fresh values",
    source="beyond SCAR",
    has_panels=True,
    accepts_workload=True,
    run=run,
)
