"""`holdfast lab`: list and run experiments, and check your own model."""

import os
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.console import meter, say
from holdfast.errors import BadInput, Interrupted
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.lab.result import Result

lab = typer.Typer(help="Run experiments that test claims of papers and of this project.", no_args_is_help=True)


@lab.command("list")
def lab_list() -> None:
    """List the experiments. Example: holdfast lab list"""
    require("lab", "`holdfast lab`")
    from holdfast.lab.registry import EXPERIMENTS

    table = Table("name", "what it measures", "figure", box=None)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.title, experiment.source)
    Console().print(table)


@lab.command("run")
def lab_run(
    name: Annotated[str, typer.Argument(help="An experiment from `holdfast lab list`.")],
    out: Annotated[Path | None, typer.Option(help="Folder for result and report.  [default: results/NAME]")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with data sets; for sharded-tradeoff a text file.  [default: $HOLDFAST_DATA, or downloaded]"
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Number of simulated failures of each kind.  [default: the experiment's own]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Number of processes.  [default: one for each core]")] = None,
    panel: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this panel (a model with its data), such as mlr-mnist, mlr-covtype, mf-movielens, mf-jester, "
            "lda-20news, lda-reuters, cnn-mnist-layer or cnn-mnist-shard; repeatable. An unknown name lists the panels of the "
            "experiment.  [default: all]"
        ),
    ] = None,
    interval: Annotated[int, typer.Option(help="Iterations between two full checkpoints.")] = 8,
    workload: Annotated[
        str | None,
        typer.Option(
            help="A Python file with your own model, or a built-in workload such as mlr-digits, instead of the panels: see "
            'the page "Adding to the lab". An unknown name lists the built-in workloads.'
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A Python file with a checkpoint policy of your own, for priority-checkpoint; repeatable."),
    ] = None,
    on: Annotated[str | None, typer.Option(help="Where to run trials: ray.  [default: this machine]")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a Ray cluster.  [default: start one here]")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file that defines the runs of recovery-matrix, like the files in experiments/."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a small version on embedded data, in minutes.")] = False,
) -> None:
    """Run an experiment, print its claims, and write its report. Example: holdfast lab run qp-bound --quick"""
    require("lab", "`holdfast lab`")
    from holdfast.blocks.own_policy import own_rankings
    from holdfast.lab import result_page
    from holdfast.lab.experiment import Options, chosen
    from holdfast.lab.registry import EXPERIMENTS
    from holdfast.lab.result import command_line
    from holdfast.lab.simulate.pools import trial_cluster
    from holdfast.report.files import prepare
    from holdfast.workloads.registry import load_for_lab, own_errors

    (experiment,) = chosen([name], EXPERIMENTS, "experiment")
    if panel and not experiment.has_panels:
        raise BadInput(f"{name} has no panels: leave out --panel.")
    if panel and workload:
        raise BadInput("--panel and --workload both choose the model: leave out one of them.")
    if (workload or on) and not experiment.accepts_workload:
        raise BadInput(f"{name} has its own workloads and runs on this machine: leave out --workload and --on.")
    if policy and not experiment.accepts_policy:
        raise BadInput(f"{name} does not compare policies: leave out --policy, or run priority-checkpoint.")
    if config and not experiment.accepts_config:
        raise BadInput(f"{name} does not read a --config file: leave it out.")
    options = Options(
        seed=seed,
        trials=trials,
        jobs=os.cpu_count() or 1 if jobs is None else jobs,
        quick=quick,
        data=data,
        out=out or Path("results") / name,
        panels=tuple(panel or ()),
        interval=interval,
        config=config,
        policies=own_rankings(policy or ()),
    )
    folder = prepare(options.out)
    try:
        with own_errors(workload or ""), trial_cluster(on, address) as cluster, meter() as begin:
            model = None if workload is None else load_for_lab(workload, data)
            result = experiment.measure(replace(options, workload=model, cluster=cluster), begin)
    except KeyboardInterrupt:
        kept = f"; finished runs stay in {folder}, and the same command resumes" if experiment.accepts_config else ""
        raise Interrupted(f"interrupted{kept}") from None
    result = replace(result, command=command_line(sys.argv[1:]), date=date.today().isoformat())
    Console().print(_claims_table(result) if result.claims else _costs_table(result))
    for remark in result.remarks:
        Console().print(f"  {remark}", highlight=False)
    say(f"report: {result_page.write(result, folder)}")
    raise typer.Exit(0 if result.holds or workload else 1)


@lab.command("check")
def lab_check(
    workload: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A Python file with a function workload(data), or urgency(info, step)."),
    ],
    data: Annotated[Path | None, typer.Option(help="Folder that is passed to the function workload.")] = None,
) -> None:
    """Check that failures of your own model can be simulated, or check your own checkpoint policy. Example: holdfast lab check my_model.py"""
    require("lab", "`holdfast lab`")
    from holdfast.blocks.own_policy import defines_policy
    from holdfast.lab.partial.model_check import LIMIT, check
    from holdfast.workloads.registry import own_errors

    if defines_policy(workload):
        _check_policy(workload)
        return
    with own_errors(workload), meter() as begin:
        checked = check(workload, data=data, progress=begin("training to the criterion", LIMIT))
    for problem in checked.problems:
        say(f"{workload}: {problem}")
    if checked.problems:
        raise typer.Exit(1)
    say(f"no problem found in {workload}. {checked.summary}")


def _check_policy(path: str) -> None:
    from holdfast.blocks.own_policy import own_ranking

    try:
        own_ranking(path)
    except BadInput as problem:
        say(str(problem))
        raise typer.Exit(1) from None
    say(f"no problem found in {path}. urgency returns a number for each block, computed from the block's own entries.")


COSTS = "Costs of failures, in iterations (bound: by Theorem 3.2 of the SCAR paper)"


def _costs_table(result: "Result") -> Table:
    from holdfast.lab.confidence import ends_text

    policy = Column("policy", overflow="fold")  # the name of a file, of any length
    columns = ("recovery", policy, "saved", "lost", "cost, 95 %", "reduction", "bound")
    table = Table(*columns, title=COSTS, box=None, padding=(0, 2, 0, 0))
    for row in result.rows:
        cost = f"{row['cost_mean']:.2f} ({ends_text(row['cost_low'], row['cost_high'])})"
        name = row["policy"] if row["saves"] == "regular" else f"{row['policy']}, {row['saves']}"
        words = (row["recovery"], name, row["fraction"], row["lost"], cost)
        table.add_row(*words, f"{row['reduction']:.0%}", f"{row['bound_mean']:.1f}")
    return table


def _claims_table(result: "Result") -> Table:
    from holdfast.lab.result_page import expected, measured, verdict

    table = Table(result.experiment, "claim", "expected", "measured", title_justify="left")
    for claim in result.claims:
        style = "yellow" if not claim.resolved else "green" if claim.holds else "bold red"
        table.add_row(f"[{style}]{verdict(claim)}[/]", claim.claim, expected(claim), measured(claim))
    return table
