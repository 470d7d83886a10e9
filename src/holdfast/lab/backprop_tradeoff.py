"""Figures 2 to 4 of "lossy forward recovery": accuracy against overhead when workers are lost inside back-propagation."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import isnan

import numpy as np

from holdfast.blocks import Floats
from holdfast.cost.overhead import Overhead, Prices, checkpoint_restart, immediate_rollback, mean_checkpoint_restart
from holdfast.lab import backprop_figures, interval
from holdfast.lab.comparison import trials_folder
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.interval import Interval
from holdfast.lab.journal import Journal
from holdfast.lab.result import Claim, Result, Row, prepare, replace_text
from holdfast.lab.scenarios import (
    BASELINE,
    INTERRUPTED,
    LATER,
    MEASURED,
    NOW,
    PHASES,
    POINTS,
    Cell,
    Outcome,
    Scenarios,
    loaded,
)
from holdfast.lab.subjects import WORKERS, Panel, chosen
from holdfast.simulate.pool import share_out

PAPER = 0.055  # the largest relative deviation from Baseline that the paper reports
LEAST = 0.01  # of a mini-batch: an overhead below it is not told from none


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What one panel showed: trial by trial, and by the clock."""

    panel: Panel
    data: str
    quick: bool
    phases: tuple[int, ...]
    steps: int  # mini-batches of an epoch
    outcomes: list[Outcome]
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

    def took(self, strategy: str, point: float | None = None) -> Interval:
        """The slowdown of a strategy, over all its cells or those of one point."""
        cells = [c for c in INTERRUPTED if c.strategy == strategy and point in (None, c.point)]
        return interval.median(np.stack([self.slowdown[cell] for cell in cells], axis=1))

    def dearer(self, strategy: str) -> Interval:
        """How many times the work that checkpoint-restart does again outweighs that of a strategy, both as overhead."""
        again = mean_checkpoint_restart(self.prices, epoch=self.panel.epoch).replay / self.prices.minibatch
        value, low, high = (max(each - 1, LEAST) for each in self.took(strategy, POINTS[-1]))
        return Interval(again / value, again / high, again / low)


def run(options: Options, meter: Meter) -> Result:
    """Compare the strategies on every panel."""
    trials, rounds = options.count(full=5, quick=2), 3 if options.quick else 15
    folder = prepare(options.out)
    panels = [_found(panel, options, trials, rounds, meter) for panel in chosen(options.panels)]
    rows = [row for found in panels for row in _rows(found)]
    replace_text(folder / "trials.csv", _csv(panels))
    replace_text(folder / "rows.csv", _table(rows))
    figures, lack = backprop_figures.drawn(rows)
    return Result(
        experiment="backprop-tradeoff",
        config={
            "seed": options.seed,
            "trials": trials,
            "rounds": rounds,
            "workers": WORKERS,
            "device": _device(),
            **_config(panels),
        },
        rows=rows,
        claims=[claim for found in panels for claim in claims(found)],
        remarks=[line for found in panels for line in remarks(found)] + lack,
        figures=figures,
        captions={name: backprop_figures.caption(name) for name in figures},
    )


def _found(panel: Panel, options: Options, trials: int, rounds: int, meter: Meter) -> Found:
    from holdfast.lab.slowdown import timed  # here, because importing PyTorch takes a second

    subject = loaded(panel.name, options.quick, options.data)
    clock = timed(subject, rounds, options.out, meter(f"{panel.name}: slowdowns", rounds))
    outcomes = _outcomes(panel, options, trials, meter)
    return Found(
        panel,
        subject.data,
        options.quick,
        subject.phases,
        len(subject.train[1]) // subject.batch,
        outcomes,
        clock.slowdown,
        clock.prices,
        clock.predicted,
        clock.replayed,
    )


def _outcomes(panel: Panel, options: Options, trials: int, meter: Meter) -> list[Outcome]:
    """Every trial, as far as possible from the journal; each process has one thread, so that none depends on --jobs."""
    progress = meter(f"{panel.name}: trials", trials * len(PHASES) * len(MEASURED))
    folder = trials_folder(options)
    with closing(Journal(folder / f"{panel.name}{'-quick' if options.quick else ''}.jsonl")) as journal:
        scenarios = Scenarios(panel.name, options.quick, options.data, options.seed, dict(journal.known))

        def hear(key: str, value: float) -> None:
            journal.note(key, value)
            progress(1)

        return share_out(scenarios, range(trials), jobs=min(options.jobs, trials), hear=hear)


def _rows(found: Found) -> Iterator[Row]:
    """The table: accuracies, then slowdowns, then what checkpoint-restart costs, then the training itself."""
    for phase, epoch in zip(PHASES, found.phases, strict=True):
        for cell, when in MEASURED:
            yield {**_named(found, "accuracy", cell), "phase": phase, "epoch": epoch, "when": when} | _accuracy(
                found, phase, cell, when
            )
    for cell in INTERRUPTED:
        took = interval.median(found.slowdown[cell][:, None])
        model = found.predicted[cell.point or 0] if cell.strategy == "replay" else 1.0
        yield {**_named(found, "slowdown", cell), **_spread("slowdown", took), "model": model}
    yield _restart_row(found)
    for epoch in range(len(found.outcomes[0].curve)):
        after = interval.few(np.array([outcome.curve[epoch] for outcome in found.outcomes]))
        yield {"panel": found.panel.name, "what": "training", "epoch": epoch, **_spread("accuracy", after)}


def _named(found: Found, what: str, cell: Cell) -> Row:
    return {
        "panel": found.panel.name,
        "what": what,
        "strategy": cell.strategy,
        "point": cell.point,
        "survivors": cell.survivors,
    }


def _accuracy(found: Found, phase: str, cell: Cell, when: str) -> Row:
    deviation = found.deviation(phase, cell, when)
    return {
        "trials": len(found.outcomes),
        **_spread("accuracy", interval.few(found.accuracy(phase, cell, when))),
        **_spread("deviation", interval.few(deviation)),
        **_spread("distance", interval.few(np.abs(deviation))),
    }


def _spread(name: str, of: Interval) -> Row:
    return {name: of.value, f"{name}_low": of.low, f"{name}_high": of.high}


def _restart_row(found: Found) -> Row:
    prices, epoch = found.prices, found.panel.epoch
    mean = mean_checkpoint_restart(prices, epoch=epoch, saves=1)
    return {
        "panel": found.panel.name,
        "what": "checkpoint-restart",
        "paper_epoch": epoch,
        "minibatch_s": prices.minibatch,
        "save_s": prices.save,
        "init_s": prices.init,
        "load_s": prices.load,
        "replay_s": mean.replay,
        "worst_replay_s": checkpoint_restart(prices, since=epoch).replay,
        "checkpoint_s": mean.checkpoint,
        "restart_s": mean.restart,
        "replayed_predicted_s": found.replayed[0],
        "replayed_measured_s": found.replayed[1],
    }


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
    phase, cell, of = worst(found, strategy)
    text = f"largest mean distance from Baseline's accuracy under {strategy}, relative ({phase}, {cell.name})"
    return _claim(found, f"{strategy}-deviation", text, "section IV.F: up to 5.5 %", (None, PAPER), of)


def worst(found: Found, strategy: str) -> tuple[str, Cell, Interval]:
    """The scenario in which a strategy is on average farthest from Baseline right after the mini-batch."""
    of = {
        (phase, cell): interval.few(np.abs(found.deviation(phase, cell)))
        for phase in PHASES
        for cell in INTERRUPTED
        if cell.strategy == strategy
    }
    phase, cell = max(of, key=lambda each: of[each].value)
    return phase, cell, of[phase, cell]


def _nearer(found: Found) -> Interval:
    """By trial: the distances of all scenarios under forward over those under replay."""
    forward, replay = (_distances(found, strategy) for strategy in ("forward", "replay"))
    value, low, high = interval.reduction(forward, replay)
    return Interval(1 - value, 1 - high, 1 - low)


def _distances(found: Found, strategy: str) -> Floats:
    cells = [cell for cell in INTERRUPTED if cell.strategy == strategy]
    apart = np.stack([np.abs(found.deviation(phase, cell)) for phase in PHASES for cell in cells])
    return np.asarray(apart.mean(axis=0))


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


def remarks(found: Found) -> list[str]:
    """What a reader should know beside the claims, and the cause of those that fail."""
    lines = [] if found.quick or not found.panel.note else [f"{found.panel.name}: {found.panel.note}"]
    lines += [_moved(found)]
    lines += [_deviations(found, when) for when in (NOW, LATER)]
    lines += [_restarts(found)]
    return lines + [_cause(found, claim) for claim in claims(found) if claim.resolved and not claim.holds]


def _moved(found: Found) -> str:
    """How much of the accuracy one mini-batch moves at all: what a deviation should be seen beside."""
    moved = [interval.few(found.deviation(phase, Cell("before"))) for phase in PHASES]
    words = ", ".join(f"{phase} {each.value:+.1%}" for phase, each in zip(PHASES, moved, strict=True))
    late = float(found.accuracy(PHASES[-1], BASELINE).mean())
    return f"{found.label}: Before against Baseline, relative: {words}; Baseline's accuracy, late: {late:.3f}."


def _deviations(found: Found, when: str) -> str:
    parts = []
    for strategy in ("replay", "forward", "skip"):
        cells = [cell for cell in INTERRUPTED if cell.strategy == strategy]
        signed = np.mean([found.deviation(phase, cell, when) for phase in PHASES for cell in cells], axis=0)
        of = interval.few(signed)
        parts.append(f"{strategy} {of.value:+.1%} ({of.low:+.1%} to {of.high:+.1%})")
    return f"{found.label}: accuracy against Baseline {when}, mean over all scenarios: {', '.join(parts)}."


def _restarts(found: Found) -> str:
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


def _cause(found: Found, claim: Claim) -> str:
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
        phase, cell, _ = worst(found, strategy)
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
    return f"{start} Cause: not found."


def _pair(found: Found, phase: str) -> str:
    apart = [
        np.mean([np.abs(found.deviation(phase, cell)).mean() for cell in INTERRUPTED if cell.strategy == strategy])
        for strategy in ("forward", "replay")
    ]
    return f"{apart[0]:.1%} and {apart[1]:.1%} at {found.accuracy(phase, BASELINE).mean():.3f}"


def _config(panels: Sequence[Found]) -> Row:
    return {
        found.panel.name: f"{found.data} in epochs {', '.join(map(str, found.phases))} of {found.steps} mini-batches"
        for found in panels
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "processor"


def _csv(panels: Sequence[Found]) -> str:
    """Every trial of every cell."""
    return _table(
        [
            {**_named(found, "trial", cell), "trial": number, "phase": phase, "when": when, "accuracy": value}
            for found in panels
            for number, outcome in enumerate(found.outcomes)
            for (phase, cell, when), value in outcome.accuracy.items()
        ]
    )


def _table(rows: Sequence[Row]) -> str:
    """Rows as CSV, with a column for every name that some row has."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


EXPERIMENT = Experiment(
    name="backprop-tradeoff",
    title="accuracy and overhead of replay, forward and skip when workers are lost inside back-propagation",
    source="lossy forward recovery, figures 2 to 4",
    panels=True,
    run=run,
)
