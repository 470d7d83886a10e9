"""What the paper and the project claim of failures inside back-propagation, and whether one panel agrees.

What a reader should know of a panel beside its claims, and why those fail that do.

What one panel of `backprop-tradeoff` showed: trial by trial, and by the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab import confidence as interval
from holdfast.lab.backprop.panels import BackpropPanel
from holdfast.lab.backprop.performance_model import Overhead, Prices, immediate_rollback, mean_checkpoint_restart
from holdfast.lab.backprop.scenarios import BASELINE, INTERRUPTED, LATER, NOW, PHASES, POINTS, Cell, TrialOutcome
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.result import Claim

LEAST = 0.01  # of a mini-batch: an overhead below it is not told from none


@dataclass(frozen=True, slots=True, eq=False)
class PanelResults:
    """What one panel showed: trial by trial, and by the clock."""

    panel: BackpropPanel
    data: str
    quick: bool
    phases: tuple[int, ...]
    steps: int  # mini-batches of an epoch
    outcomes: list[TrialOutcome]
    slowdown: dict[Cell, Floats]
    prices: Prices
    predicted: dict[float, float]
    replayed: tuple[float, float]

    @property
    def label(self) -> str:
        """The panel for a reader, who must not take a quick run for the real one."""
        return f"{self.panel.name}, quick on {self.data}" if self.quick else self.panel.name

    def accuracy(self, phase: str, cell: Cell, when: str = NOW) -> Floats:
        """The accuracy of every trial."""
        return np.array([outcome.accuracy[phase, cell, when] for outcome in self.outcomes])

    def deviation(self, phase: str, cell: Cell, when: str = NOW) -> Floats:
        """The accuracy over that of Baseline in the same trial, less 1."""
        return self.accuracy(phase, cell, when) / np.maximum(self.accuracy(phase, BASELINE, when), 1e-9) - 1

    def took(self, strategy: str, point: float | None = None) -> ConfidenceInterval:
        """The slowdown of a strategy, over all its cells or those of one point."""
        cells = [c for c in INTERRUPTED if c.strategy == strategy and point in (None, c.point)]
        return interval.median(np.stack([self.slowdown[cell] for cell in cells], axis=1))

    def dearer(self, strategy: str) -> ConfidenceInterval:
        """How many times the work that checkpoint-restart does again outweighs that of a strategy, both as overhead."""
        again = mean_checkpoint_restart(self.prices, epoch=self.panel.epoch).replay / self.prices.minibatch
        value, low, high = (max(each - 1, LEAST) for each in self.took(strategy, POINTS[-1]))
        return ConfidenceInterval(again / value, again / high, again / low)

    def worst(self, strategy: str) -> tuple[str, Cell, ConfidenceInterval]:
        """The scenario in which a strategy is on average farthest from Baseline right after the mini-batch."""
        of = {
            (phase, cell): interval.mean_of_few(np.abs(self.deviation(phase, cell)))
            for phase in PHASES
            for cell in INTERRUPTED
            if cell.strategy == strategy
        }
        phase, cell = max(of, key=lambda each: of[each].value)
        return phase, cell, of[phase, cell]


PAPER = 0.055  # the largest relative deviation from Baseline that the paper reports


def claims(found: PanelResults) -> list[Claim]:
    """What the paper and the project claim, for one panel."""
    return [*_overhead_claims(found), *_accuracy_claims(found), *_model_claims(found)]


def _overhead_claims(found: PanelResults) -> list[Claim]:
    point, epoch = POINTS[-1], found.panel.epoch
    forward = "time of a mini-batch under forward, over one without a failure"
    replay = f"time of a mini-batch under replay, failed at {point:.0%}, over one without a failure"
    again = f"work that checkpoint-restart does again in an epoch of {epoch} mini-batches, over the overhead of"
    source = "section IV.F: two orders of magnitude"
    return [
        _claim(found, "forward-overhead", forward, "figures 3b, 4b: close to 1", (None, 1.1), found.took("forward")),
        _claim(found, "replay-overhead", replay, "figures 3b, 4b: almost 2", (None, 2.1), found.took("replay", point)),
        *(
            _claim(found, f"dearer-than-{each}", f"{again} {each}", source, (100, None), found.dearer(each))
            for each in ("replay", "forward")
        ),
    ]


def _claim(
    found: PanelResults,
    ident: str,
    text: str,
    source: str,
    expected: tuple[float | None, float | None],
    of: ConfidenceInterval,
) -> Claim:
    return Claim(
        id=f"{found.panel.name}-{ident}",
        claim=f"{found.label}: {text}",
        source=source,
        expected=expected,
        measured=of.value,
        interval=None if isnan(of.low) else (of.low, of.high),
    )


def _accuracy_claims(found: PanelResults) -> list[Claim]:
    return [
        *(_bound(found, strategy) for strategy in ("replay", "forward")),
        _claim(
            found,
            "forward-nearer",
            "mean distance from Baseline of forward, over that of replay",
            "section IV.F: much lower",
            (None, 1),
            _nearer(found),
        ),
    ]


def _bound(found: PanelResults, strategy: str) -> Claim:
    phase, cell, of = found.worst(strategy)
    text = f"largest mean distance from Baseline's accuracy under {strategy}, relative ({phase}, {cell.name})"
    return _claim(found, f"{strategy}-deviation", text, "section IV.F: up to 5.5 %", (None, PAPER), of)


def _nearer(found: PanelResults) -> ConfidenceInterval:
    """By trial: the distances of all scenarios under forward over those under replay."""
    forward, replay = (_distances(found, strategy) for strategy in ("forward", "replay"))
    value, low, high = interval.reduction(forward, replay)
    return ConfidenceInterval(1 - value, 1 - high, 1 - low)


def _model_claims(found: PanelResults) -> list[Claim]:
    ratio = np.stack([found.predicted[point] / found.slowdown[Cell("replay", point)] for point in POINTS], axis=1)
    predicted, measured = found.replayed
    return [
        _claim(
            found,
            "model-replay",
            "slowdown of replay by the performance model, over the measured one",
            "section IV.C",
            (0.85, 1.15),
            interval.median(ratio),
        ),
        Claim(
            id=f"{found.panel.name}-model-restart",
            claim=f"{found.label}: time to load a checkpoint and replay mini-batches by the performance model, over the measured one",
            source="section IV.C",
            expected=(0.8, 1.25),
            measured=predicted / measured,
        ),
    ]


def _distances(found: PanelResults, strategy: str) -> Floats:
    cells = [cell for cell in INTERRUPTED if cell.strategy == strategy]
    apart = np.stack([np.abs(found.deviation(phase, cell)) for phase in PHASES for cell in cells])
    return np.asarray(apart.mean(axis=0))


TOLERANCE = 0.05  # two ratios of times that differ by less agree


def remarks(found: PanelResults) -> list[str]:
    """What a reader should know beside the claims, and the cause of those that fail."""
    lines = [] if found.quick or not found.panel.note else [f"{found.panel.name}: {found.panel.note}"]
    lines += [_moved(found)]
    lines += [_deviations(found, when) for when in (NOW, LATER)]
    lines += [_restarts(found)]
    return lines + [_cause(found, claim) for claim in claims(found) if claim.resolved and not claim.holds]


def _moved(found: PanelResults) -> str:
    """How much of the accuracy one mini-batch moves at all: what a deviation should be seen beside."""
    moved = [interval.mean_of_few(found.deviation(phase, Cell("before"))) for phase in PHASES]
    words = ", ".join(f"{phase} {each.value:+.1%}" for phase, each in zip(PHASES, moved, strict=True))
    late = float(found.accuracy(PHASES[-1], BASELINE).mean())
    return f"{found.label}: Before against Baseline, relative: {words}; Baseline's accuracy, late: {late:.3f}."


def _deviations(found: PanelResults, when: str) -> str:
    parts = []
    for strategy in ("replay", "forward", "skip"):
        cells = [cell for cell in INTERRUPTED if cell.strategy == strategy]
        signed = np.mean([found.deviation(phase, cell, when) for phase in PHASES for cell in cells], axis=0)
        of = interval.mean_of_few(signed)
        parts.append(f"{strategy} {of.value:+.1%} ({of.low:+.1%} to {of.high:+.1%})")
    return f"{found.label}: accuracy against Baseline {when}, mean over all scenarios: {', '.join(parts)}."


def _restarts(found: PanelResults) -> str:
    prices = found.prices
    whole = mean_checkpoint_restart(prices, epoch=found.panel.epoch)
    rolled: Overhead = immediate_rollback(prices)
    return (
        f"{found.label}: a worker's mini-batch takes {_time(prices.minibatch)}, a save {_time(prices.save)}, a fresh process "
        f"{_time(prices.init)}, a load {_time(prices.load)}. By the performance model a failure costs checkpoint-restart "
        f"{_time(whole.replay)} of work done again and {_time(whole.restart)} of restart, and a save in every epoch; replay "
        f"{_time(rolled.replay)}, and {_time(rolled.restart)} where no spare waits; forward nothing. With the starts of "
        f"both counted, checkpoint-restart is {whole.total / rolled.total:.1f} times as dear as replay."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _cause(found: PanelResults, claim: Claim) -> str:
    """Why a claim fails, as far as the measurements say."""
    start = f"{claim.claim}: does not hold."
    if "-dearer-than-" in claim.id:
        half, needed = found.panel.epoch / 2, 100 * (claim.measured and found.panel.epoch / 2 / claim.measured)
        return (
            f"{start} Cause: an epoch of {found.panel.epoch} mini-batches loses {half:g} on average; to be 100 times as "
            f"dear it would have to lose {needed:.0f}. That follows from the paper's own epoch length and slowdowns."
        )
    if claim.id.endswith("-deviation"):
        strategy = claim.id.removesuffix("-deviation").rpartition("-")[2]
        phase, cell, _ = found.worst(strategy)
        before, base = (float(found.accuracy(phase, each).mean()) for each in (Cell("before"), BASELINE))
        return (
            f"{start} In that scenario accuracy is {before:.3f} before the mini-batch, {base:.3f} after it and "
            f"{float(found.accuracy(phase, cell).mean()):.3f} under {strategy}: the mini-batch alone moves it by "
            f"{abs(before / max(base, 1e-9) - 1):.1%}."
        )
    if claim.id.endswith("-overhead"):
        spread = ", ".join(f"{each:.2f}" for each in np.percentile(np.stack(list(found.slowdown.values())), (5, 95)))
        return f"{start} 5th and 95th percentile of all slowdowns: {spread}."
    if claim.id.endswith("-forward-nearer"):
        phases = ", ".join(f"{phase} {_pair(found, phase)}" for phase in PHASES)
        return f"{start} Mean distance of forward and of replay from Baseline, and Baseline's accuracy: {phases}."
    if claim.id.endswith("-model-restart"):
        return (
            f"{start} {_time(found.replayed[0])} were predicted and {_time(found.replayed[1])} measured: the prices and the "
            "replay were not taken at the same moment. Cause: not found; other work on the machine may be one."
        )
    return f"{start} Cause: {_uneven(found)}"


def _uneven(found: PanelResults) -> str:
    """The model of replay has all gradients take the same time: do they not, and does that explain what it took?"""
    until = [found.took("skip", point).value for point in POINTS]  # skip computes up to the failure, and no further
    taken = [found.took("replay", point).value for point in POINTS]
    modelled = [found.predicted[point] - 1 for point in POINTS]
    explained = all(abs((1 + part) / whole - 1) <= TOLERANCE for part, whole in zip(until, taken, strict=True))
    return (
        f"{'the model has all gradients take the same time' if explained else 'not found'}. Until the failure (at "
        f"{', '.join(f'{point:.0%}' for point in POINTS)}) {_listed(until)} of a mini-batch passed, by the model "
        f"{_listed(modelled)}; with a mini-batch after it that is {_listed([1 + part for part in until])}, and replay took "
        f"{_listed(taken)}."
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _pair(found: PanelResults, phase: str) -> str:
    apart = [
        np.mean([np.abs(found.deviation(phase, cell)).mean() for cell in INTERRUPTED if cell.strategy == strategy])
        for strategy in ("forward", "replay")
    ]
    return f"{apart[0]:.1%} and {apart[1]:.1%} at {found.accuracy(phase, BASELINE).mean():.3f}"
