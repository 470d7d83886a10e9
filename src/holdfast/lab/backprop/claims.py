"""Results of backprop-tradeoff for one network, the claims of Nicolae et al. 2022 and of holdfast, and remarks for readers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab import confidence
from holdfast.lab.backprop import scenarios
from holdfast.lab.backprop.panels import WORKERS, BackpropPanel
from holdfast.lab.backprop.performance_model import Prices, checkpoint_restart, immediate_rollback
from holdfast.lab.backprop.scenarios import BASELINE, BEFORE, INTERRUPTED, LATER, NOW, PHASES, POINTS, FailureCase
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.result import Claim, Expected, ResultTable, Value

LEAST = 0.01  # part of a mini-batch: a smaller overhead cannot be distinguished from none
PAPER = 0.055  # the largest relative deviation from Baseline that the paper reports
TOLERANCE = 0.05  # ratios of times agree if they differ by less than this


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredTimes:
    """The measured slowdown of a mini-batch by each kind of failure, and the predictions of the performance model."""

    slowdown: dict[FailureCase, Floats]
    prices: Prices
    predicted: dict[float, float]  # slowdown if the mini-batch is repeated, by point of failure
    replayed: tuple[float, float]  # predicted and measured seconds to load a checkpoint and train again


@dataclass(frozen=True, slots=True, eq=False)
class PanelResults:
    """The measurements of one network on a data set; `phases` are the epochs in which failures were simulated."""

    panel: BackpropPanel
    data: str
    quick: bool
    phases: tuple[int, ...]
    steps: int  # mini-batches of an epoch
    outcomes: list[scenarios.TrialOutcome]
    times: MeasuredTimes

    @property
    def label(self) -> str:
        return f"{self.panel.name}, quick on {self.data}" if self.quick else self.panel.name

    def accuracy(self, phase: str, cell: FailureCase, when: str = NOW) -> Floats:
        """Return each trial's test accuracy after the failure `cell`, in the order of the trials.

        `phase` is "early", "middle" or "late" in training; `when` is "immediately" or "an epoch later"."""
        return np.array([outcome.accuracy[phase, cell, when] for outcome in self.outcomes])

    def deviation(self, phase: str, cell: FailureCase, when: str = NOW) -> Floats:
        """Return each trial's relative change of test accuracy by the failure `cell`, such as -0.1 for 10 % less.

        `phase` is "early", "middle" or "late" in training; `when` is "immediately" or "an epoch later"."""
        return self.accuracy(phase, cell, when) / np.maximum(self.accuracy(phase, BASELINE, when), 1e-9) - 1

    def distances(self, strategy: str, phases: Sequence[str] = PHASES) -> Floats:
        """Return each trial's mean absolute change of accuracy by failures under `strategy`, relative to no failure.

        Only failures in the given `phases` of training count: "early", "middle" or "late"."""
        cells = _cells(strategy)
        return np.asarray(np.mean([np.abs(self.deviation(phase, cell)) for phase in phases for cell in cells], axis=0))

    def median_slowdown(self, strategy: str, point: float | None = None) -> ConfidenceInterval:
        """Return the median slowdown of a mini-batch that fails during backward, under `strategy`.

        Only failures at the fraction `point` of backward count, or all failures if `point` is None."""
        cells = [cell for cell in _cells(strategy) if point in (None, cell.point)]
        return confidence.median(np.stack([self.times.slowdown[cell] for cell in cells], axis=1))

    def restart_cost_ratio(self, strategy: str) -> ConfidenceInterval:
        """Return the work that a restart from a checkpoint repeats, divided by the work that `strategy` repeats."""
        repeated = self.panel.epoch / 2  # on average, with a checkpoint in every epoch
        value, low, high = (max(slowdown - 1, LEAST) for slowdown in self.median_slowdown(strategy, POINTS[-1]))
        return ConfidenceInterval(repeated / value, repeated / high, repeated / low)

    def worst(self, strategy: str) -> tuple[str, FailureCase, ConfidenceInterval]:
        """Return the phase and the failure with the largest mean change of accuracy under `strategy`, with the mean."""
        distances = {
            (phase, cell): confidence.mean(np.abs(self.deviation(phase, cell)))
            for phase in PHASES
            for cell in _cells(strategy)
        }
        phase, cell = max(distances, key=lambda scenario: distances[scenario].value)
        return phase, cell, distances[phase, cell]


def _cells(strategy: str) -> list[FailureCase]:
    return [cell for cell in INTERRUPTED if cell.strategy == strategy]


def claims(results: PanelResults) -> list[Claim]:
    """Return the lossy-recovery paper's claims and our own about one network, each with its measured value."""

    def claim(ident: str, text: str, source: str, expected: Expected, estimate: ConfidenceInterval) -> Claim:
        ident, text = f"{results.panel.name}-{ident}", f"{results.label}: {text}"
        return Claim.of_estimate(ident, text, source, expected, estimate)

    point, slowdown, source = POINTS[-1], results.median_slowdown, "figures 3b, 4b"
    forward = "time of the failed mini-batch under `forward`, divided by the time of Baseline"
    replay = f"time of a mini-batch that failed at {point:.0%} under `replay`, divided by the time of Baseline"
    made = [
        claim("forward-overhead", forward, f"{source}: close to 1", (None, 1.1), slowdown("forward")),
        claim("replay-overhead", replay, f"{source}: almost 2", (None, 2.1), slowdown("replay", point)),
    ]
    epoch, orders = results.panel.epoch, "section IV.F: two orders of magnitude"
    repeated = (
        f"work that checkpoint-restart repeats ({epoch / 2:g} of {epoch} mini-batches), divided by the work added by"
    )
    for strategy in ("replay", "forward"):
        ratio = results.restart_cost_ratio(strategy)
        made.append(claim(f"dearer-than-{strategy}", f"{repeated} `{strategy}`", orders, (100, None), ratio))
    for strategy in ("replay", "forward"):
        phase, cell, distance = results.worst(strategy)
        text = f"`{strategy}`: largest mean difference of accuracy ({_words(phase, cell)})"
        made.append(claim(f"{strategy}-deviation", text, "section IV.F: up to 5.5 %", (None, PAPER), distance))
    value, low, high = confidence.reduction(results.distances("forward"), results.distances("replay"))
    nearer = "mean difference of accuracy under `forward`, divided by the mean difference of accuracy under `replay`"
    ratio = ConfidenceInterval(1 - value, 1 - high, 1 - low)
    made.append(claim("forward-nearer", nearer, "section IV.F: much lower", (None, 1), ratio))
    ratios = np.stack(
        [results.times.predicted[at] / results.times.slowdown[FailureCase("replay", at)] for at in POINTS], axis=1
    )
    model = "slowdown of a mini-batch under `replay`: predicted by the performance model, divided by measured"
    made.append(claim("model-replay", model, "section IV.C", (0.85, 1.15), confidence.median(ratios)))
    restart = (
        "time to load a checkpoint and train ten mini-batches: predicted by the performance model, divided by measured"
    )
    ident, words = f"{results.panel.name}-model-restart", f"{results.label}: {restart}"
    return [
        *made,
        Claim(ident, words, "section IV.C", (0.8, 1.25), results.times.replayed[0] / results.times.replayed[1]),
    ]


def _words(phase: str, cell: FailureCase) -> str:
    when = {"early": "early in training", "middle": "in the middle of training", "late": "late in training"}[phase]
    left = "" if cell.survivors is None else f", with {cell.survivors} of {WORKERS} workers left"
    return f"{when}, failure at {cell.point:.0%}{left}"


def remarks(results: PanelResults) -> list[str]:
    """Return sentences for the report on one network, such as why one of its claims does not hold."""
    label, prices = results.label, results.times.prices
    # As a scale for the deviations: how much one mini-batch changes the accuracy at all.
    moved = {phase: confidence.mean(results.deviation(phase, BEFORE)).value for phase in PHASES}
    words = ", ".join(f"{value:+.1%} ({phase})" for phase, value in moved.items())
    late = float(results.accuracy(PHASES[-1], BASELINE).mean())
    restart, rollback = checkpoint_restart(prices, since=results.panel.epoch / 2), immediate_rollback(prices)
    return [
        *([] if results.quick or not results.panel.note else [f"{results.panel.name}: {results.panel.note}"]),
        f"{label}: one mini-batch changes the accuracy even without a failure. The accuracy before the mini-batch, minus "
        f"Baseline's accuracy after it, is {words} of Baseline's accuracy. So if the accuracy changes by as much under a "
        f"strategy, the failure need not be the reason. Late in training, Baseline's accuracy is {late:.3f}.",
        f"{label}: measured times: {_time(prices.minibatch)} for one worker's share of a mini-batch, {_time(prices.save)} to save "
        f"a checkpoint, {_time(prices.load)} to load it, and {_time(prices.init)} to start a process.",
        f"{label}: from these times, the performance model of the paper predicts the cost of one failure. With "
        f"checkpoint-restart, the workers repeat {_time(restart.replay)} of work, and the restart takes "
        f"{_time(restart.restart)}; a save in every epoch comes in addition. With `replay`, the workers repeat "
        f"{_time(rollback.replay)} of work, and a new process takes {_time(rollback.restart)} to start if no spare worker "
        "waits. `forward` costs nothing.",
        f"{label}: if the start of a process counts for both strategies, a failure costs {restart.total / rollback.total:.1f} "
        f"times as much with checkpoint-restart ({_time(restart.total)}) as with `replay` ({_time(rollback.total)}).",
        *(_cause(results, claim) for claim in claims(results) if claim.resolved and not claim.holds),
    ]


def accuracy_table(panels: Sequence[PanelResults]) -> ResultTable:
    """Return a table of how much each strategy changes the accuracy on average, with the sign of the change."""
    rows: list[list[Value]] = []
    for results in panels:
        for strategy in ("replay", "forward", "skip"):
            row: list[Value] = [results.label, strategy]
            for when in (NOW, LATER):
                cells = [(phase, cell) for phase in PHASES for cell in _cells(strategy)]
                signed = np.mean([results.deviation(phase, cell, when) for phase, cell in cells], axis=0)
                row += [100 * value for value in confidence.mean(signed)]
            rows.append(row)
    columns = ["panel", "strategy", "directly after the mini-batch, %", "from", "to", "an epoch later, %", "from", "to"]
    title = (
        "Mean change of accuracy as a part of Baseline's accuracy, over all failures, with 95 % intervals (from, to)"
    )
    return ResultTable(title, columns, rows)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _cause(results: PanelResults, claim: Claim) -> str:
    """Return a sentence that says why `claim` fails, as far as the measurements show."""
    start = f"Why a claim does not hold ({claim.claim}):"
    if "-dearer-than-" in claim.id:
        strategy, half = claim.id.rpartition("-")[2], results.panel.epoch / 2
        added = claim.measured and half / claim.measured
        return (
            f"{start} with the paper's epochs of {results.panel.epoch} mini-batches, checkpoint-restart repeats {half:g} of them "
            f"on average. `{strategy}` adds the time of {added:.2g} mini-batches to the interrupted one. To cost 100 times as much, "
            f"checkpoint-restart would have to repeat {100 * added:.0f} mini-batches."
        )
    if claim.id.endswith("-deviation"):
        strategy = claim.id.removesuffix("-deviation").rpartition("-")[2]
        phase, cell, _ = results.worst(strategy)
        before, base, after = (float(results.accuracy(phase, c).mean()) for c in (BEFORE, BASELINE, cell))
        return (
            f"{start} the accuracy is {before:.3f} before this mini-batch, {base:.3f} after it without a failure, and "
            f"{after:.3f} after it under `{strategy}`. So the mini-batch alone changes the accuracy by "
            f"{abs(before / max(base, 1e-9) - 1):.1%}."
        )
    if claim.id.endswith("-overhead"):
        spread = np.percentile(np.stack(list(results.times.slowdown.values())), (5, 95))
        return f"{start} the 5th and 95th percentile of all measured slowdowns are {_listed(spread.tolist())}."
    if claim.id.endswith("-forward-nearer"):
        parts = []
        for phase in PHASES:
            forward, replay = (results.distances(strategy, [phase]).mean() for strategy in ("forward", "replay"))
            base = results.accuracy(phase, BASELINE).mean()
            parts.append(f"{phase}: {forward:.1%} and {replay:.1%}, Baseline's accuracy {base:.3f}")
        return f"{start} the mean differences of accuracy under `forward` and `replay` are {'; '.join(parts)}."
    if claim.id.endswith("-model-restart"):
        return (
            f"{start} {_time(results.times.replayed[0])} were predicted and {_time(results.times.replayed[1])} were measured. "
            "The prediction uses times that were measured at another moment. The cause was not found; other work on the "
            "machine may be one."
        )
    # The model of replay is off: gradients of unequal duration may explain it, because the model has them equal.
    until = [results.median_slowdown("skip", point).value for point in POINTS]  # skip computes only up to the failure
    taken = [results.median_slowdown("replay", point).value for point in POINTS]
    modelled = [results.times.predicted[point] - 1 for point in POINTS]
    explained = all(abs((1 + part) / whole - 1) <= TOLERANCE for part, whole in zip(until, taken, strict=True))
    return (
        f"{start} {'the model assumes that all gradients take the same time' if explained else 'the cause was not found'}. "
        f"Measured times until a failure at {', '.join(f'{point:.0%}' for point in POINTS)} are {_listed(until)} of a "
        f"mini-batch, and the model predicts {_listed(modelled)}. The measured times plus one mini-batch are "
        f"{_listed([1 + part for part in until])}, and `replay` took {_listed(taken)}."
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
