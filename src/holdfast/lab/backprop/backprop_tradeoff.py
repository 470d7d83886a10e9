"""Figures 2 to 4 of "lossy forward recovery": accuracy against overhead when workers are lost inside back-propagation."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from holdfast.lab import confidence as interval
from holdfast.lab.backprop import figures
from holdfast.lab.backprop.claims import PanelResults, claims, remarks
from holdfast.lab.backprop.panels import WORKERS, BackpropPanel, chosen_panels
from holdfast.lab.backprop.performance_model import checkpoint_restart, mean_checkpoint_restart
from holdfast.lab.backprop.scenarios import INTERRUPTED, MEASURED, PHASES, Cell, Scenarios, TrialOutcome, load_task
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial.comparison import trials_folder
from holdfast.lab.result import Result, Row
from holdfast.lab.simulate.process_pool import map_in_processes
from holdfast.lab.trial_log import TrialLog
from holdfast.report.files import prepare, replace_text


def run(options: Options, meter: Meter) -> Result:
    """Compare the strategies on every panel."""
    trials, rounds = options.count(full=5, quick=2), 3 if options.quick else 15
    folder = prepare(options.out)
    panels = [_found(panel, options, trials, rounds, meter) for panel in chosen_panels(options.panels)]
    rows = [row for found in panels for row in _rows(found)]
    replace_text(folder / "trials.csv", _csv(panels))
    replace_text(folder / "rows.csv", _table(rows))
    drawn, lack = figures.draw_figures(rows)
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
        figures=drawn,
        captions={name: figures.caption(name) for name in drawn},
    )


def _found(panel: BackpropPanel, options: Options, trials: int, rounds: int, meter: Meter) -> PanelResults:
    from holdfast.lab.backprop.slowdown import measure_times  # here, because importing PyTorch takes a second

    subject = load_task(panel.name, options.quick, options.data)
    clock = measure_times(subject, rounds, options.out, meter(f"{panel.name}: slowdowns", rounds))
    outcomes = _outcomes(panel, options, trials, meter)
    return PanelResults(
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


def _outcomes(panel: BackpropPanel, options: Options, trials: int, meter: Meter) -> list[TrialOutcome]:
    """Every trial, as far as possible from the journal; each process has one thread, so that none depends on --jobs."""
    progress = meter(f"{panel.name}: trials", trials * len(PHASES) * len(MEASURED))
    folder = trials_folder(options)
    with closing(TrialLog(folder / f"{panel.name}{'-quick' if options.quick else ''}.jsonl")) as journal:
        scenarios = Scenarios(panel.name, options.quick, options.data, options.seed, dict(journal.known))

        def hear(key: str, value: float) -> None:
            journal.note(key, value)
            progress(1)

        return map_in_processes(scenarios, range(trials), jobs=min(options.jobs, trials), hear=hear)


def _rows(found: PanelResults) -> Iterator[Row]:
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
        after = interval.mean_of_few(np.array([outcome.curve[epoch] for outcome in found.outcomes]))
        yield {"panel": found.panel.name, "what": "training", "epoch": epoch, **_spread("accuracy", after)}


def _named(found: PanelResults, what: str, cell: Cell) -> Row:
    return {
        "panel": found.panel.name,
        "what": what,
        "strategy": cell.strategy,
        "point": cell.point,
        "survivors": cell.survivors,
    }


def _accuracy(found: PanelResults, phase: str, cell: Cell, when: str) -> Row:
    deviation = found.deviation(phase, cell, when)
    return {
        "trials": len(found.outcomes),
        **_spread("accuracy", interval.mean_of_few(found.accuracy(phase, cell, when))),
        **_spread("deviation", interval.mean_of_few(deviation)),
        **_spread("distance", interval.mean_of_few(np.abs(deviation))),
    }


def _spread(name: str, of: ConfidenceInterval) -> Row:
    return {name: of.value, f"{name}_low": of.low, f"{name}_high": of.high}


def _restart_row(found: PanelResults) -> Row:
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


def _config(panels: Sequence[PanelResults]) -> Row:
    return {
        found.panel.name: f"{found.data} in epochs {', '.join(map(str, found.phases))} of {found.steps} mini-batches"
        for found in panels
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "processor"


def _csv(panels: Sequence[PanelResults]) -> str:
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
