"""`holdfast advise`: the recovery to choose, how often to save, and what a failure will cost, from a run's history."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.console import say
from holdfast.errors import BadInput, StorageFailed
from holdfast.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from holdfast.advice.advice import Advice
    from holdfast.advice.estimate import Estimate
    from holdfast.advice.large_job import LargeJob
    from holdfast.advice.question import Question
    from holdfast.advice.saving import SaveCosts, SaveInterval
    from holdfast.events import Event
    from holdfast.server.advice import ServedAdvice

    AnyAdvice: TypeAlias = Advice | ServedAdvice

COLOUR, MARK, QUIET = "#2b6cb0", "#dd6b20", "#a0aec0"


def advise(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of its history.")],
    mtbf: Annotated[
        str,
        typer.Option(
            help="Mean time between failures of the whole job, for example 4h, 30m or 2d.  [default: as observed in RUN, or published figures of large clusters]"
        ),
    ] = "",
    mtbf_per_worker: Annotated[
        str, typer.Option(help="Mean time between failures of one worker, for example 5y.")
    ] = "",
    mtbf_per_node: Annotated[
        str, typer.Option(help="Mean time between failures of one node, for example 10d; needs --nodes.")
    ] = "",
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes of the job. A failure then takes all workers of one node.")
    ] = None,
    workers_lost: Annotated[
        str,
        typer.Option(
            help="Share of the workers, or of the blocks of a parameter server, that a failure takes, for example 1/8. Restart and skip cost the same for every share.  "
            "[default: one node if --nodes is given, otherwise one worker]"
        ),
    ] = "",
    workers: Annotated[
        int | None, typer.Option(help="Number of workers of a larger job, which is simulated from the costs of RUN.")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend of the job's collectives: gloo or nccl.  [default: nccl for a simulated job larger than a node]"
        ),
    ] = "",
    restart: Annotated[
        str,
        typer.Option(
            help="Time from a failure to the next step with a restart of all workers, for example 10m.  [default: as in RUN]"
        ),
    ] = "",
    replay: Annotated[
        str,
        typer.Option(
            help="Time from a loss to the next step if only the lost worker is replaced, under replay or partial, for example 90s.  [default: as in RUN, or --restart]"
        ),
    ] = "",
    stall: Annotated[
        str, typer.Option(help="Time by which a save delays training, for example 30s.  [default: as in RUN]")
    ] = "",
    step: Annotated[str, typer.Option(help="Time of a step, for example 6s.  [default: as in RUN]")] = "",
    storage: Annotated[
        str,
        typer.Option(
            help="Bytes that the shared storage reads or writes in a second, for all workers together, for example 5GB."
        ),
    ] = "",
    parameters: Annotated[
        str,
        typer.Option(
            help="Number of parameters of the model, for example 7B, if it is trained with AdamW in float32.  [default: from the size of a snapshot]"
        ),
    ] = "",
    bandwidth: Annotated[
        str,
        typer.Option(
            help="Bytes that a rank can send to the next rank in a second, for example 25GB.  [default: 1.25GB]"
        ),
    ] = "",
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Recommend only restart or replay, with which no sample is lost and the weights end the same.",
        ),
    ] = False,
    length: Annotated[str, typer.Option("--for", help="Length of the simulated job.")] = "54d",
    out: Annotated[Path | None, typer.Option(help="Folder for advice.json, advice.png and advice.pdf.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print also the cost under each recovery, and the reasons.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
) -> None:
    """Recommend a recovery strategy and a save interval, and estimate the cost of a failure. Example: holdfast advise runs/train --mtbf 4h"""
    if out:
        require("lab", "--out")
    from holdfast.advice.question import Question, fraction_of, seconds_of, size_of
    from holdfast.history.log import read_history
    from holdfast.runs.histories import open_history

    question = Question(
        mtbf=seconds_of(mtbf, "--mtbf") if mtbf else None,
        mtbf_per_worker=seconds_of(mtbf_per_worker, "--mtbf-per-worker") if mtbf_per_worker else None,
        mtbf_per_node=seconds_of(mtbf_per_node, "--mtbf-per-node") if mtbf_per_node else None,
        nodes=nodes,
        lost=fraction_of(workers_lost, "--workers-lost") if workers_lost else None,
        workers=workers,
        backend=backend or None,
        restart=seconds_of(restart, "--restart") if restart else None,
        replay=seconds_of(replay, "--replay") if replay else None,
        stall=seconds_of(stall, "--stall") if stall else None,
        step=seconds_of(step, "--step") if step else None,
        parameters=size_of(parameters, "--parameters") if parameters else None,
        bandwidth=size_of(bandwidth, "--bandwidth") if bandwidth else None,
        storage=size_of(storage, "--storage") if storage else None,
        exact=exact,
        length=seconds_of(length, "--for"),
    )
    with open_history(path) as history:
        advice = advice_on(read_history(history.files).events, question)
    if as_json:
        say(json.dumps(advice.to_json(), indent=1))
    else:
        _print(advice)
        if explain:
            _explain(advice)
        else:
            say("Add --explain for the cost under each recovery, and the reasons.")
    if out:
        _write(advice, question, out)
        say(f"advice: {out / 'advice.json'}, advice.png, advice.pdf")


def advice_on(history: "Sequence[Event]", question: "Question | None" = None) -> "AnyAdvice":
    from holdfast.advice.advice import advise
    from holdfast.server.advice import advise_served
    from holdfast.server.cost import is_served

    if not history:
        raise BadInput("this history is empty: name the folder of a run.")
    return advise_served(history, question) if is_served(history) else advise(history, question)


def _print(advice: "AnyAdvice") -> None:
    """Print the advice, the figures that decide it, and the assumptions."""
    say(advice.line)
    say(advice.figures[0])
    for line in advice.figures[1:]:
        say(f"- {line}")
    if advice.unknown:
        say("Assumed, because neither the history nor an option says it:")
        for line in advice.unknown:
            say(f"- {line}")


def _explain(advice: "AnyAdvice") -> None:
    from holdfast.advice.advice import Advice
    from holdfast.advice.question import in_words

    now = (
        f"every {advice.outlooks['restart'].interval.best}"
        if isinstance(advice, Advice)
        else f"--interval {advice.costs.interval}"
    )
    say("")
    table = Table(f"a failure costs, saving {now}", "seconds", "9 of 10 cases", "iterations", "9 of 10 cases", box=None)
    for name, price in advice.prices.items():
        seconds, iterations = price.seconds, price.iterations
        table.add_row(
            f"[bold]{name}[/]" if name == advice.recovery else name,
            in_words(seconds.value),
            f"{in_words(seconds.low)} to {in_words(seconds.high)}",
            f"{iterations.value:.3g}",
            f"{iterations.low:.3g} to {iterations.high:.3g}",
        )
    Console().print(table)
    for reason in advice.reasons:
        say(f"- {reason}")
    if isinstance(advice, Advice) and advice.large:
        _print_large(advice.large)


def _print_large(large: "LargeJob") -> None:
    from holdfast.advice.large_job import simulate_published_jobs

    say(f"\nThe same job with {large.workers} workers, simulated:")
    for line in large.assumed:
        say(f"- {line}")
    table = Table("recovery", "share of time that trains", "9 of 10 cases", "save every", box=None)
    for name, share in large.shares.items():
        table.add_row(name, f"{share.value:.1%}", _interval(share), f"{large.every[name]} steps")
    Console().print(table)
    say("\nThe same simulation of published jobs:")
    table = Table("job", "published", "simulated", "9 of 10 cases", box=None)
    jobs = simulate_published_jobs()
    for job, share in jobs:
        table.add_row(job.name, job.says, f"{share.value:.1%}", _interval(share))
    Console().print(table)
    for job, _ in jobs:
        say(f"- {job.name} ({job.source}): {job.assumed}.")


def _interval(share: "Estimate") -> str:
    return f"{share.low:.1%} to {share.high:.1%}"


def _write(advice: "AnyAdvice", question: "Question", out: Path) -> None:
    from matplotlib import rc_context

    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: name a folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "advice.json").write_text(json.dumps(advice.to_json(), indent=1) + "\n")
        sheet = figure(advice, question)
        with rc_context({"pdf.fonttype": 42}):  # embeds TrueType fonts, so that the text can be selected and searched
            for suffix in ("png", "pdf"):
                sheet.savefig(out / f"advice.{suffix}", dpi=150)
    except OSError as error:
        raise StorageFailed(f"cannot write to {out}: {error.strerror}; name another folder with --out.") from error


def figure(advice: "AnyAdvice", question: "Question") -> "Figure":
    """Plot the cost of a failure for each recovery strategy, and the training time for each save interval."""
    from matplotlib.figure import Figure

    from holdfast.advice.advice import Advice

    large = advice.large.shares if isinstance(advice, Advice) and advice.large else {}
    sheet = Figure(figsize=(11 + 3 * bool(large), 3.6), layout="constrained")
    axes = sheet.subplots(1, 3 + bool(large))
    seconds, iterations = (
        {name: getattr(price, part) for name, price in advice.prices.items()} for part in ("seconds", "iterations")
    )
    _draw_intervals(axes[0], seconds, "seconds that a failure costs")
    axes[0].set_xscale("symlog", linthresh=0.01)
    _draw_intervals(axes[1], iterations, "iterations that a failure costs")
    _draw_save_interval(axes[2], *_saving(advice, question))
    if large:
        percents = {name: share.times(100) for name, share in large.items()}
        _draw_intervals(axes[3], percents, f"% that trains, {question.workers} workers")
    sheet.suptitle(advice.line)
    return sheet


def _saving(advice: "AnyAdvice", question: "Question") -> "tuple[SaveCosts, SaveInterval, int, float]":
    """Return (save costs, best interval, the run's own interval, factor) for the recommended recovery strategy.

    `factor` is the share of time that remains for training after losses that do not depend on the save interval.
    """
    from holdfast.advice.advice import Advice
    from holdfast.advice.prices import saving_of

    if isinstance(advice, Advice):
        saving = saving_of(advice.costs, question, advice.mtbf.value, advice.recovery)
        outlook = advice.outlooks[advice.recovery]
        return saving, outlook.interval, advice.costs.save_every, outlook.effective / outlook.interval.effective
    price = advice.prices[advice.recovery]
    return price.saving, price.interval, advice.costs.interval, 1.0


def _draw_intervals(axes: "Axes", rows: "Mapping[str, Estimate]", label: str) -> None:
    for y, row in enumerate(rows.values()):
        axes.plot([row.low, row.high], [y, y], color=COLOUR, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axes.plot(row.value, y, "o", color=COLOUR)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_save_interval(axes: "Axes", saving: "SaveCosts", interval: "SaveInterval", now: int, left: float) -> None:
    import numpy as np

    from holdfast.advice.saving import slowdown

    first, last = (f(interval.best, now, interval.low, interval.high) for f in (min, max))
    every = np.unique(np.round(np.geomspace(max(1, first / 3), 3 * last, 200)))
    axes.plot(every, 100 * left / slowdown(every, saving), color=COLOUR)
    axes.axvline(interval.best, color=MARK, label=f"best: {interval.best}")
    if now != interval.best:
        axes.axvline(now, color=QUIET, linestyle="--", label=f"now: {now}")
    axes.set_xscale("log")
    axes.set_xlabel("steps between two saves")
    axes.set_ylabel("% of the wall clock that trains")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
