"""What the paper and the project claim of failures inside back-propagation, and whether one panel agrees."""

from math import isnan

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab import interval
from holdfast.lab.backprop.found import Found
from holdfast.lab.backprop.scenarios import INTERRUPTED, PHASES, POINTS, Cell
from holdfast.lab.interval import Interval
from holdfast.lab.result import Claim

PAPER = 0.055  # the largest relative deviation from Baseline that the paper reports


def claims(found: Found) -> list[Claim]:
    """What the paper and the project claim, for one panel."""
    return [*_overhead_claims(found), *_accuracy_claims(found), *_model_claims(found)]


def _overhead_claims(found: Found) -> list[Claim]:
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
    found: Found, ident: str, text: str, source: str, expected: tuple[float | None, float | None], of: Interval
) -> Claim:
    return Claim(
        id=f"{found.panel.name}-{ident}",
        claim=f"{found.label}: {text}",
        source=source,
        expected=expected,
        measured=of.value,
        interval=None if isnan(of.low) else (of.low, of.high),
    )


def _accuracy_claims(found: Found) -> list[Claim]:
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


def _bound(found: Found, strategy: str) -> Claim:
    phase, cell, of = found.worst(strategy)
    text = f"largest mean distance from Baseline's accuracy under {strategy}, relative ({phase}, {cell.name})"
    return _claim(found, f"{strategy}-deviation", text, "section IV.F: up to 5.5 %", (None, PAPER), of)


def _nearer(found: Found) -> Interval:
    """By trial: the distances of all scenarios under forward over those under replay."""
    forward, replay = (_distances(found, strategy) for strategy in ("forward", "replay"))
    value, low, high = interval.reduction(forward, replay)
    return Interval(1 - value, 1 - high, 1 - low)


def _model_claims(found: Found) -> list[Claim]:
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


def _distances(found: Found, strategy: str) -> Floats:
    cells = [cell for cell in INTERRUPTED if cell.strategy == strategy]
    apart = np.stack([np.abs(found.deviation(phase, cell)) for phase in PHASES for cell in cells])
    return np.asarray(apart.mean(axis=0))
