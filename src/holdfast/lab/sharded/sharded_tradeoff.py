"""The experiment sharded-tradeoff: lose shards of a sharded GPT, restore them in several ways, and count steps behind."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from holdfast.code_digest import modules_digest
from holdfast.errors import BadInput
from holdfast.lab.experiment import Experiment, Meter, Options, TrialLog
from holdfast.lab.result import Result, Value
from holdfast.lab.sharded import figures
from holdfast.lab.sharded.claims import claims, remarks, tables
from holdfast.lab.sharded.measured_costs import MeasuredCosts, with_lags
from holdfast.lab.sharded.shard_failures import FULL, LOST, QUICK, WORLD_SIZE, TradeoffSize
from holdfast.lab.sharded.trial_keys import LongRun, long_runs, planned_steps
from holdfast.lab.simulate.pools import map_in_processes
from holdfast.report.files import prepare

MEASURED_BY = (  # the modules that compute the numbers in the log of trials; other code may change between two runs
    "holdfast.checkpoint.sharding",
    "holdfast.lab.sharded.cuda_graphs",
    "holdfast.lab.sharded.gpt_training",
    "holdfast.lab.sharded.shard_failures",
    "holdfast.lab.sharded.shard_trials",
    "holdfast.lab.sharded.simulated_shards",
    "holdfast.lab.sharded.training_text",
    "holdfast.lab.sharded.trial_keys",
    "holdfast.live.sharded.lost_shards",
    "holdfast.theory.rate",
)


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: train without failures, then recover from each failure in every way and train on."""
    import torch  # takes a second

    from holdfast.lab.sharded.training_text import load_text

    chosen = QUICK if options.quick else FULL
    if not options.quick and not torch.cuda.is_available():
        raise BadInput(
            "sharded-tradeoff trains 101 million parameters and found no CUDA device: add --quick for a small run."
        )
    seeds = options.trial_count(FULL.seeds, QUICK.seeds)
    size = replace(chosen, seeds=seeds, repeated_seeds=min(seeds, chosen.repeated_seeds))
    prepare(options.out)
    text = load_text(options.data, size.text)
    model = size.model
    config: dict[str, Value] = {
        "seed": options.seed,
        "undisturbed runs": seeds,
        "failures": f"at {size.early + size.late} steps of each undisturbed run, each with every strategy",
        "ranks": WORLD_SIZE,
        "lost": f"{', '.join(map(str, LOST[:-1]))} or {LOST[-1]} of the ranks",
        "text": f"{text.name}, {len(text.trained):,} bytes",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "model": f"a GPT of width {model.width} with {model.layers} layers, {model.heads} heads and a context of "
        f"{model.context} bytes",
        "batch": f"{model.batch} sequences",
        "learning rate": f"{model.rate:g} after a warm-up of {model.warm_up} steps",
        "steps of an undisturbed run": size.steps,
        "measured after a failure": f"{size.losses} losses, {size.spacing} steps apart. For each loss, the weights of "
        f"{size.averaged} steps are averaged. The weights of the first {size.settle} steps after a failure are not used",
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
    planned = planned_steps(size, options.seed)
    name = f"sharded-tradeoff-{'quick' if options.quick else 'full'}-{options.seed}-{text}"
    with closing(options.open_log(name, modules_digest(*MEASURED_BY))) as log:
        missing = {key: steps for key, steps in planned.items() if log.get(key) is None}
        if missing:
            _train(size, options, log, missing, meter)
        return with_lags(size, options.seed, log.known)


def _train(size: TradeoffSize, options: Options, log: TrialLog, missing: Mapping[str, int], meter: Meter) -> None:
    from holdfast.lab.sharded.shard_trials import TradeoffTrials

    progress = meter("sharded-tradeoff: training steps", sum(missing.values()))

    def record(key: str, value: float) -> None:
        log.record(key, value)
        if key in missing:
            progress(missing[key])

    work = TradeoffTrials(size, options.data, options.seed, dict(log.known))
    # The longest parts first, and run 0 last of them: long runs train its model again.
    parts: list[int | LongRun] = [*reversed(range(size.seeds)), *long_runs(size)]
    map_in_processes(work, parts, jobs=min(options.jobs, len(parts)), on_report=record)


EXPERIMENT = Experiment(
    name="sharded-tradeoff",
    title="steps that the loss of a shard of a sharded model costs, by what is put in its place",
    source="ours, after SCAR and CheckFree",
    run=run,
)
