"""What the runs of a matrix come to: figures of a suite, of a part of the suites, of all of them. Pure.

Confidence intervals over seeds: the runs of each suite are drawn again, seed by seed, and the figure computed anew.

Runs of one seed stay together, whatever their variant: they began with the same weights and found the machine alike.

The quality gates: what must hold of every run of a suite before the suite counts. Pure.

They are the paper's (section 5.9): target steps, correctness, artifacts, consistent metadata. A suite that fails one is
shown with the reason and is part of no mean.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.confidence import RESAMPLES, ConfidenceInterval
from holdfast.lab.matrix.config import REFERENCE, Matrix
from holdfast.lab.matrix.measured_run import MeasuredRun, Struck
from holdfast.lab.matrix.suites import PlannedRun, Suite, expected_restarts, failure_schedule


@dataclass(frozen=True, slots=True)
class GateFailure:
    """A gate that a run did not pass, and why."""

    suite: Suite
    run: str
    gate: str
    why: str


def gate_failures(matrix: Matrix, suite: Suite, found: Mapping[PlannedRun, MeasuredRun]) -> list[GateFailure]:
    """Every gate that a run of this suite does not pass; none if the suite counts."""
    wrong: list[GateFailure] = []
    for variant in matrix.variants:
        for seed in matrix.seeds:
            unit = PlannedRun(suite, variant, seed)
            checks = _run(matrix, unit, found[unit]) if unit in found else iter([("measured", "it was not run")])
            wrong += [GateFailure(suite, unit.name, gate, why) for gate, why in checks]
    return wrong


def counted(matrix: Matrix, several: Sequence[Suite], found: Mapping[PlannedRun, MeasuredRun]) -> list[Suite]:
    """The suites that pass every gate."""
    return [suite for suite in several if not gate_failures(matrix, suite, found)]


def expected_strikes(matrix: Matrix, unit: PlannedRun) -> tuple[Struck, ...]:
    """The failures that are to strike a run, one for each rank; storage is struck as a whole, on record as rank 0."""
    several = [
        (failure.step, failure.kind, failure.point, rank)
        for failure in failure_schedule(matrix, unit)
        for rank in failure.targets or (0,)
    ]
    return tuple(sorted(several))


def _run(matrix: Matrix, unit: PlannedRun, run: MeasuredRun) -> Iterator[tuple[str, str]]:
    """The gates that one run does not pass."""
    if run.verdict != "completed":
        yield "completed", f"{run.verdict}: {run.because}"
    if run.committed != matrix.steps:
        yield "steps", f"{run.committed} of {matrix.steps} steps are committed"
    if run.audit != "pass":
        yield "audit", f"{run.audit}: {run.finding or 'nothing was trained'}"
    if run.struck != expected_strikes(matrix, unit):
        yield (
            "failures",
            f"struck by {_listed(run.struck)}, where it was to be {_listed(expected_strikes(matrix, unit))}",
        )
    if run.restarts != expected_restarts(matrix, unit):
        yield "restarts", f"{run.restarts} restarts, where it was to be {expected_restarts(matrix, unit)}"
    if run.verdict == "completed" and run.attempts != run.restarts + 1:
        yield "attempts", f"its supervisor tells of {run.attempts} attempts, its history of {run.restarts + 1}"
    if not run.saves:
        yield "saves", "nothing was saved"
    if run.samples_lost and unit.how.is_exact:
        yield "samples", f"{run.samples_lost} samples were not trained"


def _listed(several: Sequence[Struck]) -> str:
    return ", ".join(f"{kind} of rank {rank} at {step}:{point}" for step, kind, point, rank in several) or "nothing"


Statistic: TypeAlias = Callable[[Sequence[Floats]], Floats]
"""From the means of every suite, each as (draw, column), to a number for every draw."""


def bootstrap_interval(suites: Sequence[Floats], figure: Statistic, seed: int = 0) -> ConfidenceInterval:
    """A figure of suites, each an array of (seed, column), with its 95 % interval; with one seed a suite there is none."""
    value = float(figure([rows.mean(axis=0, keepdims=True) for rows in suites])[0])
    if any(len(rows) < 2 for rows in suites):
        return ConfidenceInterval(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    drawn = [rows[rng.integers(len(rows), size=(RESAMPLES, len(rows)))].mean(axis=1) for rows in suites]
    low, high = np.percentile(figure(drawn), [2.5, 97.5])
    return ConfidenceInterval(value, float(low), float(high))


def gain(suites: Sequence[Floats]) -> Floats:
    """The mean over the suites of what the first column is above the second, in proportion to the second."""
    return np.asarray(np.mean([rows[:, 0] / rows[:, 1] - 1 for rows in suites], axis=0))


def difference(suites: Sequence[Floats]) -> Floats:
    """The mean over the suites of the first column less the second."""
    return np.asarray(np.mean([rows[:, 0] - rows[:, 1] for rows in suites], axis=0))


def reduction(suites: Sequence[Floats]) -> Floats:
    """By how much of itself the second column is reduced in the first, as the means over the suites say."""
    less, more = (np.mean([rows[:, at] for rows in suites], axis=0) for at in (0, 1))
    return np.asarray(1 - less / more)


def share_above(suites: Sequence[Floats]) -> Floats:
    """The share of the suites in which the first column is above the second."""
    return np.asarray(np.mean([rows[:, 0] > rows[:, 1] for rows in suites], axis=0))


Metric: TypeAlias = Callable[[MeasuredRun], float]


@dataclass(frozen=True, eq=False)
class Analysis:
    """The runs of a matrix, those of suites that pass the gates apart from the others."""

    matrix: Matrix
    suites: Sequence[Suite]
    found: Mapping[PlannedRun, MeasuredRun]

    @cached_property
    def failed(self) -> list[GateFailure]:
        """Every gate that a run did not pass."""
        return [each for suite in self.suites for each in gate_failures(self.matrix, suite, self.found)]

    @cached_property
    def counted(self) -> list[Suite]:
        """The suites that pass every gate: all figures are of these alone."""
        wrong = {each.suite for each in self.failed}
        return [suite for suite in self.suites if suite not in wrong]

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants, in the order of the file."""
        return self.matrix.variants

    def has(self, *variants: str) -> bool:
        """Whether there are suites that count, in these variants."""
        return bool(self.counted) and set(variants) <= set(self.variants)

    def runs(self, suite: Suite, variant: str) -> list[MeasuredRun]:
        """The runs of a suite in one variant, by seed."""
        return [self.found[PlannedRun(suite, variant, seed)] for seed in self.matrix.seeds]

    def mean(self, metric: Metric, variant: str, suites: Sequence[Suite] | None = None) -> float:
        """The mean over suites of the mean over seeds; not a number where there is nothing to take it of."""
        several = self.counted if suites is None else suites
        values = [metric(run) for suite in several for run in self.runs(suite, variant)]
        return float(np.mean(values)) if values else math.nan

    def paired(
        self, figure: Statistic, metric: Metric, first: str, second: str, suites: Sequence[Suite] | None = None
    ) -> ConfidenceInterval:
        """A figure that compares two variants by one metric, with its interval over the seeds."""
        several = self.counted if suites is None else suites
        return bootstrap_interval([self._columns(suite, metric, (first, second)) for suite in several], figure)

    def slices(self) -> list[tuple[str, str, list[Suite]]]:
        """Every part of the suites that has one value on one axis: the axis, the value, the suites."""
        axes = [axis for axis in (self.counted[0].axes if self.counted else {}) if self._values(axis)[1:]]
        return [
            (axis, value, [suite for suite in self.counted if suite.axes[axis] == value])
            for axis in axes
            for value in self._values(axis)
        ]

    def apart(self, suite: Suite, variant: str) -> "LossGap":
        """How far the runs of a variant are from the reference, over the seeds."""
        pairs = zip(self.runs(suite, variant), self.runs(suite, REFERENCE), strict=True)
        each = [loss_gap(run, reference) for run, reference in pairs]
        return LossGap(*np.mean(each, axis=0).tolist())

    def _values(self, axis: str) -> list[str]:
        return list(dict.fromkeys(suite.axes[axis] for suite in self.counted))

    def _columns(self, suite: Suite, metric: Metric, variants: Sequence[str]) -> Floats:
        return np.array([[metric(run) for run in self.runs(suite, variant)] for variant in variants]).T


class LossGap(NamedTuple):
    """How far a run is from its reference: by losses of the same steps, and by the models in snapshots of the same steps.

    `loss` is the mean absolute difference and `most` the largest; `distance` is the mean L2 distance, `last` that of the
    last snapshot in proportion to the length of the reference's model. Not a number where nothing could be compared.
    """

    loss: float
    most: float
    distance: float
    last: float


def loss_gap(run: MeasuredRun, reference: MeasuredRun) -> LossGap:
    """How far one run is from another."""
    pairs = zip(run.losses, reference.losses, strict=False)
    losses = [abs(mine - theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    apart = run.distances or ()
    return LossGap(
        loss=float(np.mean(losses)) if losses else math.nan,
        most=max(losses, default=math.nan),
        distance=float(np.mean([distance for _, distance, _ in apart])) if apart else math.nan,
        last=apart[-1][1] / apart[-1][2] if apart and apart[-1][2] else math.nan,
    )
