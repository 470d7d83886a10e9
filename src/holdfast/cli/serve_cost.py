"""The output of `holdfast cost` for runs on the parameter server: parts of an iteration, and costs of failures."""

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from holdfast.cli.console import cell, say, size
from holdfast.events import Event
from holdfast.finding import counted
from holdfast.server.cost import Outage, Served, measured_cost, served_cost


def print_served(
    histories: Mapping[str, Sequence[Event]], reference: Sequence[Event] | None, *, as_json: bool = False
) -> None:
    """Print the cost of each run, and how its convergence compares with `reference`, a run without failures."""
    runs = {name: served_cost(history) for name, history in histories.items()}
    other = served_cost(reference) if reference is not None else None
    measured = {name: measured_cost(run, other) if other else None for name, run in runs.items()}
    if as_json:
        costs = {name: {**run.to_json(), "measured_cost": measured[name]} for name, run in runs.items()}
        say(json.dumps(costs, indent=1))
        return
    for name, run in runs.items():
        if len(runs) > 1:
            say(name)
        _print_one(run, measured[name])


def _print_one(run: Served, measured: float | None) -> None:
    last = next((loss for loss in reversed(run.losses) if loss is not None), None)
    loss = "" if last is None else f"; loss {last:.6g}, criterion {run.criterion:.6g}"
    say(f"{run.workload}: {counted(run.iterations, 'iteration')} in {run.wall:.1f} s{loss}")
    saved = f"{counted(run.saves, 'save')} of {size(run.bytes)} together"
    say(f"checkpoints took {run.checkpoint_share:.1%} of the time of iterations: {saved}")
    table = Table("part of an iteration", "mean milliseconds", "share", box=None)
    total = sum(run.seconds.values()) or 1.0
    for part, seconds in run.seconds.items():
        table.add_row(part, f"{1000 * seconds / max(run.iterations, 1):.2f}", f"{seconds / total:.1%}")
    Console().print(table)
    if run.failures:
        Console().print(_failures(run))
        say(_cost(measured))


def _failures(run: Served) -> Table:
    moves = "blocks\nlost", "restored", "perturbation"
    heads = "lost", "iteration", *moves, "loss regained\nafter", "continues\nafter"
    table = Table(*heads, box=None)
    for outage in run.failures:
        counts = map(str, (outage.iteration, outage.blocks, outage.restored))
        moved = "unknown" if outage.size is None and outage.restored else f"{outage.size or 0:.4g}"
        seconds = "" if outage.seconds is None else f"{outage.seconds:.2f} s"
        table.add_row(cell(", ".join(outage.members)), *counts, moved, _regained(outage), seconds)
    return table


def _regained(outage: Outage) -> str:
    if outage.regained is not None:
        return counted(outage.regained, "iteration")
    return "not regained" if outage.restored else ""


def _cost(measured: float | None) -> str:
    hint = "give --reference RUN, a run of the same command without --inject, to measure it"
    return f"cost of the failures: {hint if measured is None else f'{measured:.2f} iterations'}"
