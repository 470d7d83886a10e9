"""Beyond the paper: failures before the first full checkpoint, and what can be done about them.

Every second failure strikes before the first full checkpoint; the others are drawn as in the paper's experiments.

A block that was never saved can only come back with its first value, and survivors that have moved on must unlearn it:
on matrix factorization that costs more than to start over. Two remedies are compared. Saves can start early: after 1, 2,
4, ... iterations, in parts that have the bytes of one full checkpoint together, or in full for up to log2(C) states more.
And a block that was never saved can get a fresh value by the workload's own rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import ConfidenceInterval, finite, mean_of_few, paired
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial.comparison import PanelComparison, compare_strategies, criteria, unconverged_remarks
from holdfast.lab.partial.cost_figures import panel_grid
from holdfast.lab.partial.panels import panel_notes
from holdfast.lab.result import Claim, Result, ResultTable, Row
from holdfast.lab.simulate.strategy import Strategy
from holdfast.workloads.reinit import has_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = Fraction(1, 2)
EIGHTH = Fraction(1, 8)
FOUND_ON = "mf-movielens"  # the panel on which first values cost more than starting over


@dataclass(frozen=True, slots=True)
class Approach:
    """One way to save and to recover, under a name for readers."""

    name: str
    recovery: str
    saves: str = "regular"
    fraction: Fraction = Fraction(1)

    def strategy(self, interval: int) -> Strategy:
        """The strategy, with half of the blocks lost."""
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
WAYS = (OVER, FIRST, EARLY, EARLY_FULL, FRESH, BOTH, PRIORITY, PRIORITY_FRESH)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The trials of one panel, divided into failures before the first full checkpoint and later ones."""

    compared: PanelComparison
    interval: int
    ways: Sequence[Approach]

    @property
    def early(self) -> npt.NDArray[np.bool_]:
        """Which trials failed before the first full checkpoint."""
        return self.compared.measurement.steps < self.interval

    def cost(self, way: Approach, which: npt.NDArray[np.bool_]) -> ConfidenceInterval:
        """The mean cost of some trials."""
        return mean_of_few(finite(self._costs(way)[which]))

    def saved(self, way: Approach, against: Approach, which: npt.NDArray[np.bool_]) -> ConfidenceInterval:
        """How many iterations a way saves against another, trial by trial, on average."""
        ours, theirs = paired(self._costs(way)[which], self._costs(against)[which])
        return mean_of_few(theirs - ours)

    def _costs(self, way: Approach) -> Floats:
        return self.compared.measurement.of(way.strategy(self.interval)).cost


def run(options: Options, meter: Meter) -> Result:
    """Compare the remedies with starting over and with first values, on every panel, or without claims on one's own model."""
    trials, own, ways = options.count(full=100, quick=8), options.workload is not None, _ways(options)
    strategies = [way.strategy(options.interval) for way in ways]
    panels = compare_strategies(
        options, meter, trials, strategies, OVER.strategy(options.interval), early=options.interval
    )
    splits = [Split(compared, options.interval, ways) for compared in panels]
    return Result(
        experiment="early-failures",
        config={
            "seed": options.seed,
            "trials": trials,
            "interval": options.interval,
            "lost": str(LOST),
            **criteria(panels),
        },
        rows=[row for split in splits for row in _rows(split)],
        claims=[] if own else [claim for split in splits for claim in _claims(split)],
        remarks=[
            *([] if options.quick or own else panel_notes(options.panels)),
            _bytes(options.interval),
            *(_remark(split) for split in splits),
            *unconverged_remarks(panels),
        ],
        tables=[_table(split) for split in splits],
        figures={"early-failures": figure(splits)},
        captions={
            "early-failures": "Mean iteration costs, with 95 % intervals, of failures that take half of the blocks: those "
            "before the first full checkpoint, and the later ones."
        },
    )


def _ways(options: Options) -> list[Approach]:
    """All ways; of a model without a rule for fresh values those that need none."""
    ruled = options.workload is None or has_rule(options.workload)
    return [way for way in WAYS if ruled or way.recovery != "fresh"]


def _rows(split: Split) -> list[Row]:
    """The rows of the comparison, each with the costs of early and of later failures beside those of all."""
    return [
        {
            "way": way.name,
            **row,
            **_columns("early", split.cost(way, split.early)),
            **_columns("later", split.cost(way, ~split.early)),
        }
        for way, row in zip(split.ways, split.compared.rows, strict=True)
    ]


def _columns(which: str, cost: ConfidenceInterval) -> Row:
    return {f"{which}_cost": cost.value, f"{which}_low": cost.low, f"{which}_high": cost.high}


def _claims(split: Split) -> list[Claim]:
    """What each remedy saves in early failures; and on the panel of the finding, that first values cost more than all."""
    finding = [_finding(split)] if split.compared.panel == FOUND_ON and not split.compared.quick else []
    remedies = [_saves(split, way, FIRST) for way in (EARLY, EARLY_FULL, FRESH)]
    return [*finding, *remedies, _saves(split, FRESH, OVER)]


def _finding(split: Split) -> Claim:
    more = split.saved(OVER, FIRST, split.early)
    return Claim(
        id=f"{split.compared.panel}-finding",
        claim=f"{split.compared.label}: iterations by which first values cost more than starting over, in failures before "
        "the first full checkpoint",
        source="our finding",
        expected=(0, None),
        measured=more.value,
        interval=(more.low, more.high),
    )


def _saves(split: Split, way: Approach, against: Approach) -> Claim:
    less = split.saved(way, against, split.early)
    return Claim(
        id=f"{split.compared.panel}-{way.saves if way is not FRESH else 'fresh'}-{'first' if against is FIRST else 'over'}",
        claim=f"{split.compared.label}: iterations that {way.name} save against "
        f"{'first values' if against is FIRST else 'starting over'}, in failures before the first full checkpoint",
        source="our goal",
        expected=(0, None),
        measured=less.value,
        interval=(less.low, less.high),
    )


def _bytes(interval: int) -> str:
    """What early saves cost in bytes."""
    regular, full = (way.strategy(interval).policy.written(interval) for way in (FIRST, EARLY_FULL))
    return (
        f"Early saves write what regular ones do, {regular} state in the first {interval} iterations; early full saves write "
        f"{full - regular} states more, once. Fresh values write nothing."
    )


def _remark(split: Split) -> str:
    """The cheapest way in early failures, and what early saves of the same bytes cost the later ones."""
    early = split.early
    label = split.compared.label
    if not early.any() or early.all():
        return f"{label}: {'no' if not early.any() else 'every'} failure comes before the first full checkpoint."
    costs = {way.name: split.cost(way, early).value for way in split.ways}
    order = ", ".join(f"{name} {cost:.2f}" for name, cost in sorted(costs.items(), key=lambda item: item[1]))
    more = split.saved(FIRST, EARLY, ~early)
    return (
        f"{label}: mean cost of the {early.sum()} of {len(early)} failures before the first full checkpoint, cheapest first: "
        f"{order}. In the others early saves cost {more.value:.2f} iterations ({more.low:.2f} to {more.high:.2f}) more "
        "than full checkpoints."
    )


def _table(split: Split) -> ResultTable:
    """What every way costs, by when the failure comes, and what it writes."""
    length = round(split.compared.measurement.unperturbed)
    rows: list[list[str | float | int | None]] = []
    for way in split.ways:
        early, later = split.cost(way, split.early), split.cost(way, ~split.early)
        written = float(way.strategy(split.interval).policy.written(length))
        rows.append([way.name, *early, *later, written])
    columns = ["way", "early", "from", "to", "later", "from", "to", f"states written in {length} iterations"]
    return ResultTable(f"{split.compared.label}: mean iteration cost of early and later failures", columns, rows)


def figure(splits: Sequence[Split]) -> "Figure":
    """Mean costs of early and of later failures with their intervals, one place for each way."""
    found = {id(split.compared): split for split in splits}

    def draw(axes: "Axes", compared: PanelComparison) -> None:
        split = found[id(compared)]
        kinds = (("before the first full checkpoint", split.early, -0.1), ("later", ~split.early, 0.1))
        for label, which, shift in kinds:
            costs = [split.cost(way, which) for way in split.ways]
            places = [place + shift for place in range(len(costs))]
            half = [max(cost.high - cost.value, 0) for cost in costs]
            axes.errorbar(
                places,
                [cost.value for cost in costs],
                yerr=half,
                marker="o",
                markersize=4,
                capsize=3,
                linestyle="",
                label=label,
            )
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_xticks(range(len(split.ways)), [way.name for way in split.ways], rotation=40, ha="right", fontsize=7)

    return panel_grid([split.compared for split in splits], draw, across="")


EXPERIMENT = Experiment(
    name="early-failures",
    title="iteration costs of failures before the first full checkpoint, with saves that start early and with fresh values",
    source="beyond SCAR",
    panels=True,
    own=True,
    run=run,
)
