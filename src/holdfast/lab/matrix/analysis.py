"""Statistics over the runs of a recovery matrix, and the quality gates that decide which runs count. Pure functions.

The gates come from the ECRL report (section 5.9). A suite (a data set, a model and a failure schedule) that fails a
gate is left out of every mean. Confidence intervals resample the seeds of each suite, with all variants (recovery
methods) of one seed together, because they began with the same weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.cost.breakdown import CAUSES
from holdfast.lab.confidence import RESAMPLES, ConfidenceInterval
from holdfast.lab.matrix.config import REFERENCE, Matrix
from holdfast.lab.matrix.measured_run import MeasuredRun, Struck
from holdfast.lab.matrix.suites import PlannedRun, Suite, expected_restarts, failure_schedule

Metric: TypeAlias = Callable[[MeasuredRun], float]
GOODPUT: Metric = attrgetter("goodput")
WAITED: Metric = attrgetter("waited")
WALL: Metric = attrgetter("wall")
Statistic: TypeAlias = Callable[[Sequence[Floats]], Floats]
"""A function that compares two variants (recovery methods), and returns a number for each bootstrap draw.

Its argument has an array for each suite, with a row for each draw and a column for each variant."""


@dataclass(frozen=True, slots=True)
class GateFailure:
    """A validity check that a run did not pass, with the reason."""

    suite: Suite
    run: str
    gate: str
    why: str


def gate_failures(matrix: Matrix, suite: Suite, measured: Mapping[PlannedRun, MeasuredRun]) -> list[GateFailure]:
    """Return the validity checks that the runs of `suite` (data set, model and failure schedule) did not pass."""
    failures: list[GateFailure] = []
    for variant, seed in product(matrix.variants, matrix.seeds):
        planned = PlannedRun(suite, variant, seed)
        run = measured.get(planned)
        gates = _failed_gates(matrix, planned, run) if run else [("measured", "it was not run")]
        failures += [GateFailure(suite, planned.name, gate, why) for gate, why in gates]
    return failures


def _failed_gates(matrix: Matrix, planned: PlannedRun, run: MeasuredRun) -> Iterator[tuple[str, str]]:
    schedule, restarts = failure_schedule(matrix, planned), expected_restarts(matrix, planned)
    # One strike for each rank; storage faults are recorded as rank 0.
    expected = [(f.step, f.kind, f.point, rank) for f in schedule for rank in f.targets or (0,)]
    strikes = tuple(sorted(expected))
    if run.verdict != "completed":
        yield "completed", f"{run.verdict}: {run.because}"
    if run.committed != matrix.steps:
        yield "steps", f"{run.committed} of {matrix.steps} steps are committed"
    if run.audit != "pass":
        yield "audit", f"{run.audit}: {run.finding or 'nothing was trained'}"
    if run.struck != strikes:
        yield "failures", f"struck by {_listed(run.struck)}, instead of {_listed(strikes)}"
    if run.restarts != restarts:
        yield "restarts", f"{run.restarts} restarts, instead of {restarts}"
    if run.verdict == "completed" and run.attempts != run.restarts + 1:
        yield "attempts", f"its supervisor reports {run.attempts} attempts, its history has {run.restarts + 1}"
    if not run.saves:
        yield "saves", "nothing was saved"
    if run.samples_lost and planned.how.is_exact:
        yield "samples", f"{run.samples_lost} samples were not trained"


def _listed(strikes: Sequence[Struck]) -> str:
    return ", ".join(f"{kind} of rank {rank} at {step}:{point}" for step, kind, point, rank in strikes) or "nothing"


def bootstrap_interval(suites: Sequence[Floats], statistic: Statistic, seed: int = 0) -> ConfidenceInterval:
    """Return the value of `statistic` for the given suites, with a 95 % bootstrap interval over the random seeds.

    The array of a suite has a row for each seed and a column for each compared recovery method. The interval is NaN if
    a suite has only one seed."""
    value = float(statistic([rows.mean(axis=0, keepdims=True) for rows in suites])[0])
    if any(len(rows) < 2 for rows in suites):
        return ConfidenceInterval(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    drawn = [rows[rng.integers(len(rows), size=(RESAMPLES, len(rows)))].mean(axis=1) for rows in suites]
    low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return ConfidenceInterval(value, float(low), float(high))


def gain(suites: Sequence[Floats]) -> Floats:
    """Return for each row the fraction by which column 0 exceeds column 1, as a mean over `suites`.

    The array of a suite has a row for each bootstrap draw and a column for each of two recovery methods."""
    return np.asarray(np.mean([rows[:, 0] / rows[:, 1] - 1 for rows in suites], axis=0))


def difference(suites: Sequence[Floats]) -> Floats:
    """Return for each row the difference of column 0 minus column 1, as a mean over `suites`.

    The array of a suite has a row for each bootstrap draw and a column for each of two recovery methods."""
    return np.asarray(np.mean([rows[:, 0] - rows[:, 1] for rows in suites], axis=0))


def reduction(suites: Sequence[Floats]) -> Floats:
    """Return for each row the fraction by which column 0 is below column 1, after averaging both over `suites`.

    The array of a suite has a row for each bootstrap draw and a column for each of two recovery methods."""
    less, more = (np.mean([rows[:, at] for rows in suites], axis=0) for at in (0, 1))
    return np.asarray(1 - less / more)


def wins(suites: Sequence[Floats]) -> Floats:
    """Return for each row the fraction of the `suites` in which column 0 exceeds column 1.

    The array of a suite has a row for each bootstrap draw and a column for each of two recovery methods."""
    return np.asarray(np.mean([rows[:, 0] > rows[:, 1] for rows in suites], axis=0))


@dataclass(frozen=True, eq=False)
class Analysis:
    """The measured runs of a recovery matrix, and statistics over the suites whose runs pass all validity checks."""

    matrix: Matrix
    suites: Sequence[Suite]
    measured: Mapping[PlannedRun, MeasuredRun]

    @cached_property
    def failed(self) -> list[GateFailure]:
        return [failure for suite in self.suites for failure in gate_failures(self.matrix, suite, self.measured)]

    @cached_property
    def counted(self) -> list[Suite]:
        """The suites whose runs all pass the validity checks."""
        failed = {failure.suite for failure in self.failed}
        return [suite for suite in self.suites if suite not in failed]

    @property
    def variants(self) -> tuple[str, ...]:
        return self.matrix.variants

    def has(self, *variants: str) -> bool:
        """Return True if all `variants` (recovery methods) were run and at least one suite is valid."""
        return bool(self.counted) and set(variants) <= set(self.variants)

    def runs(self, suite: Suite, variant: str) -> list[MeasuredRun]:
        return [self.measured[PlannedRun(suite, variant, seed)] for seed in self.matrix.seeds]

    def mean(self, metric: Metric, variant: str, suites: Sequence[Suite] | None = None) -> float:
        """Return the mean of `metric` under the recovery method `variant`, over `suites` (None: all valid suites)."""
        chosen = self.counted if suites is None else suites
        values = [metric(run) for suite in chosen for run in self.runs(suite, variant)]
        return float(np.mean(values)) if values else math.nan

    def mean_seconds(self, variant: str) -> dict[str, float]:
        return {c: self.mean(lambda run, cause=c: run.seconds.get(cause, 0.0), variant) for c in CAUSES}  # type: ignore[misc]

    def paired(
        self, statistic: Statistic, metric: Metric, first: str, second: str, suites: Sequence[Suite] | None = None
    ) -> ConfidenceInterval:
        """Compare the recovery methods `first` and `second` by `metric` in `suites` (None: all valid suites).

        Return the value of `statistic`, such as `gain`, with its confidence interval."""
        chosen = self.counted if suites is None else suites
        columns = [[[metric(run) for run in self.runs(suite, name)] for name in (first, second)] for suite in chosen]
        return bootstrap_interval([np.array(values).T for values in columns], statistic)

    def slices(self) -> list[tuple[str, str, list[Suite]]]:
        """Return the suites with each value of each axis, such as the model, as (axis, value, suites).

        Axes with only one value are left out."""
        axes = [axis for axis in (self.counted[0].axes if self.counted else {}) if self.values(axis)[1:]]
        return [
            (axis, value, [suite for suite in self.counted if suite.axes[axis] == value])
            for axis in axes
            for value in self.values(axis)
        ]

    def values(self, axis: str) -> list[str]:
        """Return the distinct values of the suites on `axis`, such as the model names on the axis "model"."""
        return list(dict.fromkeys(suite.axes[axis] for suite in self.counted))

    def loss_gap(self, suite: Suite, variant: str) -> "LossGap":
        """Return how much the losses and models of `suite` under `variant` differ from its runs without failures.

        The differences are means over the seeds."""
        pairs = zip(self.runs(suite, variant), self.runs(suite, REFERENCE), strict=True)
        return LossGap(*np.mean([loss_gap(run, reference) for run, reference in pairs], axis=0).tolist())


class LossGap(NamedTuple):
    """The differences in losses and models between a run and the same run without failures; NaN if unknown."""

    loss: float  # mean absolute difference at the same step
    most: float  # largest absolute difference
    distance: float  # mean L2 distance of the models in snapshots of the same step
    last: float  # distance of the last snapshots, over the norm of the reference model


def loss_gap(run: MeasuredRun, reference: MeasuredRun) -> LossGap:
    """Return the differences in losses and models between `run` and `reference`, the same run without failures."""
    pairs = zip(run.losses, reference.losses, strict=False)
    losses = [abs(mine - theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    distances = run.distances or ()
    return LossGap(
        loss=float(np.mean(losses)) if losses else math.nan,
        most=max(losses, default=math.nan),
        distance=float(np.mean([distance for _, distance, _ in distances])) if distances else math.nan,
        last=distances[-1][1] / distances[-1][2] if distances and distances[-1][2] else math.nan,
    )
