"""`holdfast serve`: train on a parameter server, show the status of a run, and add nodes to a run."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import progress_bars, say
from holdfast.errors import BadInput
from holdfast.finding import counted
from holdfast.printable import printable
from holdfast.server.failure_detector import DEADLINE

if TYPE_CHECKING:
    from holdfast.faults.schedule import Schedule
    from holdfast.server.status import Status

serve = typer.Typer(help="Train on a fault-tolerant parameter server, which runs on Ray.", no_args_is_help=True)
FOREVER = 1000  # iterations; a run with fewer need not converge
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run on the parameter server.")]


@serve.command("train")
def train(
    workload: Annotated[
        str, typer.Option(help="A workload such as lda-20news, or a Python file that defines your own model.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the history and the checkpoints of the run.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes, which hold the blocks (parts) of the model.")] = 2,
    workers: Annotated[int, typer.Option(help="Number of workers, which hold the data.")] = 2,
    policy: Annotated[
        str,
        typer.Option(
            help="Policy that chooses the blocks to save: priority, relative, threshold, round, random or full, or a "
            "Python file with a policy of your own."
        ),
    ] = "priority",
    fraction: Annotated[str, typer.Option(help="Fraction of the model in each save.")] = "1/4",
    interval: Annotated[
        int, typer.Option(help="Number of iterations in which saves add up to the size of the model.")
    ] = 8,
    saves: Annotated[
        str,
        typer.Option(
            help="The first saves: regular, early (parts after 1, 2, 4, ... iterations, for the same bytes) or early-full "
            "(everything after 1, 2, 4, ... iterations)."
        ),
    ] = "regular",
    restore: Annotated[
        str,
        typer.Option(
            help="Blocks to restore after a node is lost: partial (the blocks of this node), full (all blocks), or fresh (as "
            "partial, but blocks that were never saved get new values by a rule of the model)."
        ),
    ] = "partial",
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Kill processes on purpose, as kill@ITERATION[:POINT][,WHO]: kill@7 (node 0), kill@7,node=1+2, "
            "kill@7:checkpoint,worker=0 or kill@5,controller. May be repeated. Points: boundary, apply, checkpoint, recovery.",
        ),
    ] = None,
    staleness: Annotated[int, typer.Option(help="Number of iterations that a worker may be ahead of the others.")] = 0,
    lost_after: Annotated[
        float,
        typer.Option(
            help="Seconds without an answer to a heartbeat after which a node or worker counts as lost. Raise it on a busy "
            "machine."
        ),
    ] = DEADLINE,
    iterations: Annotated[
        int,
        typer.Option(
            help="Maximum number of iterations. With the default, a run that does not converge exits with status 1."
        ),
    ] = FOREVER,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Folder with data sets.  [default: $HOLDFAST_DATA, or downloaded]")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Folder or URL (s3://...) for the checkpoints.  [default: in --out]")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Ray cluster.  [default: start Ray on this machine]")
    ] = None,
) -> None:
    """Train a model on a parameter server, which runs on Ray. Example: holdfast serve train --workload mlr-digits --out runs/digits --inject kill@7"""
    from holdfast.blocks.own_policy import is_file, own_ranking
    from holdfast.blocks.policy import Policy
    from holdfast.history.log import recall
    from holdfast.server.driver import serve as train_on_server
    from holdfast.server.settings import Settings
    from holdfast.server.status import missed_kills

    try:
        part = Fraction(1 if policy == "full" else fraction)
    except (ValueError, ZeroDivisionError):
        raise BadInput(f"{fraction!r} is not a fraction: write 1/4 or 0.25.") from None
    ranking = own_ranking(policy) if is_file(policy) else policy
    settings = Settings(
        workload=workload,
        nodes=nodes,
        workers=workers,
        policy=Policy(ranking=ranking, interval=interval, fraction=part, seed=seed, saves=saves),
        out=out.absolute(),
        store=str(out.absolute() / "checkpoints") if checkpoints is None else checkpoints,
        data=None if data is None else data.absolute(),
        recovery=restore,
        seed=seed,
        staleness=staleness,
        iterations=iterations,
        lost_after=lost_after,
        failures=_failures(inject or [], iterations),
    )
    members = f"{counted(nodes, 'node')} and {counted(workers, 'worker')}"
    with progress_bars() as bars:
        task = bars.add_task("starting", total=iterations)
        lines = _Lines(bars.console.print, settings.out)

        def report(status: "Status") -> None:
            lines.follow(f"training on {members}", status.failures)
            if status.loss is not None:
                counts = f"{status.saves} saves, {status.failures} failures"
                description = f"loss {status.loss:.6g}, {status.seconds * 1000:.0f} ms, {counts}"
                bars.update(task, completed=status.iteration, description=description)

        outcome = train_on_server(settings, address, report)
        lines.show_losses()
    result = "converged" if outcome.converged else "did not converge"
    loss = f"a loss of {outcome.loss:.6g}"
    say(f"{result} after {outcome.iterations} iterations with {loss}; history in {settings.history}")
    history = (event.what for event in recall(settings.history / "controller.jsonl", "struck", "lost"))
    for line in missed_kills(settings.failures, history, outcome.iterations):
        say(line)
    raise typer.Exit(0 if outcome.converged or iterations < FOREVER else 1)


class _Lines:
    """The lines that a run prints while it trains: that it begins, and each lost node or worker."""

    def __init__(self, show: Callable[..., None], run: Path) -> None:
        self._show, self._run = show, run
        self._trains, self._failures, self._shown = False, 0, 0

    def show(self, line: str) -> None:
        self._show(printable(line), markup=False, highlight=False, soft_wrap=True)

    def follow(self, begins: str, failures: int) -> None:
        """Show `begins` once, and lines on new failures if there are more than before."""
        if not self._trains:
            self._trains = True
            self.show(begins)
        if failures > self._failures:
            self._failures = failures
            self.show_losses()

    def show_losses(self) -> None:
        from holdfast.server.status import losses

        lines = losses(self._run)
        for line in lines[self._shown :]:
            self.show(line)
        self._shown = len(lines)


@serve.command("status")
def status(run: Run) -> None:
    """Show the progress of a run on the parameter server. Example: holdfast serve status runs/digits"""
    from holdfast.server.status import summary

    say("\n".join(summary(run)))


@serve.command("join")
def join(run: Run, nodes: Annotated[int, typer.Option(help="Number of nodes that join.")] = 1) -> None:
    """Add nodes to an active run. Parts of the model then move to the new nodes. Example: holdfast serve join runs/digits"""
    from holdfast.server.status import JoinRequest, require_running

    require_running(run)
    JoinRequest(run).write(nodes)
    say(f"{counted(nodes, 'node')} will join {run} at its next iteration")


def _failures(specs: list[str], iterations: int) -> "Schedule":
    from holdfast.faults.spec import parse_server

    failures = parse_server(specs)
    if late := [failure.step for failure in failures if failure.step >= iterations]:
        raise BadInput(
            f"No process can be killed at iteration {late[0]}: the run ends after {iterations} iterations, counted from 0. "
            "Choose an earlier one, or give more --iterations."
        )
    return failures
