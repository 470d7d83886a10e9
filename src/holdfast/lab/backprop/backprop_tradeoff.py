"""Figures 2 to 4 of Nicolae et al. 2022: accuracy and overhead when workers are lost during backward."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict

import numpy as np

from holdfast.code_digest import code_digest
from holdfast.lab import confidence
from holdfast.lab.backprop import figures, scenarios
from holdfast.lab.backprop.claims import PanelResults, accuracy_table, claims, remarks
from holdfast.lab.backprop.panels import PANELS, WORKERS, BackpropPanel
from holdfast.lab.backprop.performance_model import checkpoint_restart
from holdfast.lab.backprop.scenarios import INTERRUPTED, MEASURED, PHASES, FailureCase, Scenarios, TrialOutcome
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.experiment import Experiment, Meter, Options, chosen
from holdfast.lab.result import Result, Row
from holdfast.lab.simulate.pools import map_in_processes
from holdfast.report.files import csv_text, prepare, replace_text


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: on every network, repeat, complete or skip a mini-batch that failed, and compare the results."""
    import torch  # takes a second

    trials, rounds = options.trial_count(full=5, quick=2), 3 if options.quick else 15
    folder = prepare(options.out)
    panels = [_measure(panel, options, trials, rounds, meter) for panel in chosen(options.panels, PANELS, "panel")]
    rows = [row for results in panels for row in _rows(results)]
    accuracies = [
        {**_cell_columns(results, "trial", cell), "trial": number, "phase": phase, "when": when, "accuracy": value}
        for results in panels
        for number, outcome in enumerate(results.outcomes)
        for (phase, cell, when), value in outcome.accuracy.items()
    ]
    replace_text(folder / "trials.csv", _csv(accuracies))
    replace_text(folder / "rows.csv", _csv(rows))
    drawn = figures.all_figures(rows)
    described = {
        r.panel.name: f"data set {r.data}, epochs of {r.steps} mini-batches, failures in epochs "
        + ", ".join(f"{epoch} ({phase})" for epoch, phase in zip(r.phases, PHASES, strict=True))
        for r in panels
    }
    return Result(
        experiment="backprop-tradeoff",
        config={
            "seed": options.seed,
            "repetitions of each failure": trials,
            "measurements of each time": rounds,
            "simulated workers": WORKERS,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "processor",
            **described,
        },
        rows=rows,
        claims=[claim for results in panels for claim in claims(results)],
        remarks=[line for results in panels for line in remarks(results)],
        tables=[accuracy_table(panels)],
        figures=drawn,
        captions={name: figures.caption(name) for name in drawn},
    )


def _measure(panel: BackpropPanel, options: Options, trials: int, rounds: int, meter: Meter) -> PanelResults:
    from holdfast.lab.backprop.training import measure_times  # imports PyTorch

    task = scenarios.load_task(panel.name, options.quick, options.data)
    times = measure_times(task, rounds, options.out, meter(f"{panel.name}: slowdowns", rounds))
    steps, outcomes = len(task.train[1]) // task.batch, _outcomes(panel, options, trials, meter)
    return PanelResults(panel, task.data, options.quick, task.phases, steps, outcomes, times)


def _outcomes(panel: BackpropPanel, options: Options, trials: int, meter: Meter) -> list[TrialOutcome]:
    progress = meter(f"{panel.name}: trials", trials * len(PHASES) * len(MEASURED))
    name = f"{panel.name}-quick" if options.quick else panel.name
    with closing(options.open_log(name, code_digest())) as log:
        run_trial = Scenarios(panel.name, options.quick, options.data, options.seed, dict(log.known))

        def record(key: str, value: float) -> None:
            log.record(key, value)
            progress(1)

        return map_in_processes(run_trial, range(trials), jobs=min(options.jobs, trials), on_report=record)


def _rows(results: PanelResults) -> Iterator[Row]:
    for phase, epoch in zip(PHASES, results.phases, strict=True):
        for cell, when in MEASURED:
            deviation = results.deviation(phase, cell, when)
            yield {
                **_cell_columns(results, "accuracy", cell),
                **{"phase": phase, "epoch": epoch, "when": when, "trials": len(results.outcomes)},
                **_columns("accuracy", confidence.mean(results.accuracy(phase, cell, when))),
                **_columns("deviation", confidence.mean(deviation)),
                **_columns("distance", confidence.mean(np.abs(deviation))),
            }
    for cell in INTERRUPTED:
        slowdown = confidence.median(results.times.slowdown[cell][:, None])
        model = results.times.predicted[cell.point or 0] if cell.strategy == "replay" else 1.0
        yield {**_cell_columns(results, "slowdown", cell), **_columns("slowdown", slowdown), "model": model}
    prices, length = results.times.prices, results.panel.epoch
    mean = checkpoint_restart(prices, since=length / 2, saves=1)
    yield {
        "panel": results.panel.name,
        "what": "checkpoint-restart",
        "paper_epoch": length,
        **{f"{name}_s": getattr(prices, name) for name in ("minibatch", "save", "init", "load")},
        "replay_s": mean.replay,
        "worst_replay_s": checkpoint_restart(prices, since=length).replay,
        "checkpoint_s": mean.checkpoint,
        "restart_s": mean.restart,
        "replayed_predicted_s": results.times.replayed[0],
        "replayed_measured_s": results.times.replayed[1],
    }
    for epoch in range(len(results.outcomes[0].curve)):
        after = confidence.mean(np.array([outcome.curve[epoch] for outcome in results.outcomes]))
        yield {"panel": results.panel.name, "what": "training", "epoch": epoch, **_columns("accuracy", after)}


def _cell_columns(results: PanelResults, what: str, cell: FailureCase) -> Row:
    return {"panel": results.panel.name, "what": what, **asdict(cell)}


def _columns(name: str, estimate: ConfidenceInterval) -> Row:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _csv(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(names, [[row.get(name) for name in names] for row in rows])


EXPERIMENT = Experiment(
    name="backprop-tradeoff",
    title="accuracy and overhead of replay, forward and skip when workers are lost inside back-propagation",
    source="lossy forward recovery, figures 2 to 4",
    has_panels=True,
    run=run,
)
