"""The experiment sharded-tradeoff: lose shards of a sharded GPT, restore them in several ways, and count steps behind."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from holdfast.code_digest import code_digest
from holdfast.errors import BadInput
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.result import Result, Value
from holdfast.lab.sharded import figures, measured_costs
from holdfast.lab.sharded.claims import claims, remarks, tables
from holdfast.lab.sharded.measured_costs import MeasuredCosts
from holdfast.lab.sharded.shard_failures import (
    FULL,
    LOST,
    QUICK,
    REPEATED,
    WORLD_SIZE,
    TradeoffSize,
    failures,
    trials,
)
from holdfast.lab.simulate.pools import map_in_processes
from holdfast.report.files import prepare


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: train without failures, then recover from each failure in every way and train on."""
    import torch  # takes a second

    from holdfast.lab.sharded.training_text import load_text

    chosen = QUICK if options.quick else FULL
    if not options.quick and not torch.cuda.is_available():
        raise BadInput(
            "sharded-tradeoff trains 116 million parameters and found no CUDA device: add --quick for a small run."
        )
    seeds = options.trial_count(FULL.seeds, QUICK.seeds)
    size = replace(chosen, seeds=seeds, repeated_seeds=min(seeds, chosen.repeated_seeds))
    prepare(options.out)
    text = load_text(options.data, size.text)
    config: dict[str, Value] = {
        "seed": options.seed,
        "runs": seeds,
        "failures": seeds * (size.early + size.late),
        "ranks": WORLD_SIZE,
        "lost": ", ".join(map(str, LOST)),
        "text": f"{text.name}, {len(text.trained):,} bytes",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "processor",
        "model": str(size.model),
        "steps": size.steps,
        "followed": size.follow,
    }
    known = _measure(size, options, text.digest, meter)
    return _result(MeasuredCosts(size, options.seed, known), config)


def _result(costs: MeasuredCosts, config: Mapping[str, Value]) -> Result:
    rows = list(costs.rows())
    return Result(
        experiment="sharded-tradeoff",
        config=config,
        rows=rows,
        claims=claims(costs),
        remarks=remarks(costs),
        tables=tables(costs),
        figures=figures.all_figures(rows),
        captions=figures.CAPTIONS,
    )


def _measure(size: TradeoffSize, options: Options, text: str, meter: Meter) -> dict[str, float]:
    """Measure what an earlier run has not measured, and return all numbers by key."""
    from holdfast.lab.sharded.shard_trials import SeedTrials

    goals = _goals(size, options.seed)
    name = f"sharded-tradeoff-{'quick' if options.quick else 'full'}-{options.seed}-{text}"
    with closing(options.open_log(name, code_digest())) as log:
        progress = meter("sharded-tradeoff: trials", len(goals))
        progress(sum(log.get(key) is not None for key in goals))

        def record(key: str, value: float) -> None:
            log.record(key, value)
            if key in goals:
                progress(1)

        work = SeedTrials(size, options.data, options.seed, dict(log.known))
        map_in_processes(work, range(size.seeds), jobs=min(options.jobs, size.seeds), on_report=record)
        return dict(log.known)


def _goals(size: TradeoffSize, seed: int) -> set[str]:
    """Return the keys of the numbers that are measured last in each trial and in each long run."""
    single = {
        measured_costs.lag_key(trial)
        for run in range(size.seeds)
        for failure in failures(size, seed, run)
        for trial in trials(size, failure)
    }
    long_runs = {
        measured_costs.repeated_key(run, rate, strategy.name, size.repeated_steps)
        for run in range(size.repeated_seeds)
        for rate in size.rates
        for strategy in REPEATED
    }
    return single | long_runs


EXPERIMENT = Experiment(
    name="sharded-tradeoff",
    title="steps that the loss of a shard of a sharded model costs, by what is put in its place",
    source="ours, after SCAR and CheckFree",
    run=run,
)
