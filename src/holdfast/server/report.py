"""The report page about runs on the parameter server: phases of an iteration, losses, and the cost of failures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.audit.verdicts import Finding, audit_run
from holdfast.finding import counted
from holdfast.history.log import read_history
from holdfast.report import figures
from holdfast.report.figures import picture
from holdfast.report.page import Cell, Column, Number, Page, Picture, Table, duration
from holdfast.report.run_data import audit_statements
from holdfast.server.cost import PARTS, Served, served_cost

COLOURS = {
    "pull": "#90cdf4",
    "compute": "#2b6cb0",
    "push": "#63b3ed",
    "apply": "#2c5282",
    "checkpoint": "#dd6b20",
    "other": "#a0aec0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A parameter-server run in a report; `findings` are the results of its audit, or None while it trains."""

    name: str
    cost: Served
    findings: Sequence[Finding] | None


def served_run(path: Path, name: str, *, audited: bool = True) -> ServedRun:
    findings = audit_run(path) if audited else None
    return ServedRun(name=name, cost=served_cost(read_history(path).events), findings=findings)


def page(runs: Sequence[ServedRun], facts: Mapping[str, str], *, live: bool = False) -> Page:
    """Return a report page on `runs`; `facts` say how the page was made. A `live` page changes while a run trains."""
    one = runs[0] if len(runs) == 1 else None
    return Page(
        title=one.name if one else f"{len(runs)} runs on the parameter server",
        lead=_lead(runs),
        statements=audit_statements(
            {f"{r.name}: all blocks, pushes and saves are accounted for": r.findings for r in runs}
        ),
        scoreboard="checks of the audit pass" if one else "audits pass",
        brief=one is not None,
        numbers=_numbers(one.cost) if one else [],
        pictures=list(_pictures(runs)),
        tables=list(_tables(runs)),
        remarks=[remark for run in runs for remark in _remarks(run)],
        facts=facts,
        live=live,
    )


def _lead(runs: Sequence[ServedRun]) -> str:
    return "; ".join(
        f"{run.name}: {run.cost.workload}, {counted(run.cost.iterations, 'iteration')} in {duration(run.cost.wall)}, "
        f"{counted(len(run.cost.failures), 'failure')}"
        for run in runs[:6]
    ) + ("; ..." if len(runs) > 6 else ".")


def _numbers(cost: Served) -> list[Number]:
    milliseconds = 1000 * sum(cost.seconds.values()) / max(cost.iterations, 1)
    last = next((loss for loss in reversed(cost.losses) if loss is not None), None)
    blocks_lost = sum(failure.blocks for failure in cost.failures)
    numbers = [
        Number("iterations", f"{cost.iterations:,}", f"of {milliseconds:.1f} ms each, on average"),
        Number("wall clock", duration(cost.wall)),
        Number("waiting for saves", f"{cost.checkpoint_share:.1%}", f"of an iteration, {counted(cost.saves, 'save')}"),
        Number("failures", f"{len(cost.failures)}", f"{blocks_lost:,} blocks lost"),
    ]
    if last is not None:
        numbers.insert(0, Number("loss", f"{last:.5g}", f"criterion {cost.criterion:.5g}"))
    return numbers


def _pictures(runs: Sequence[ServedRun]) -> Iterator[Picture]:
    parts = {
        run.name: {part: 1000 * seconds / max(run.cost.iterations, 1) for part, seconds in run.cost.seconds.items()}
        for run in runs
        if run.cost.iterations
    }
    if parts:
        text = "; ".join(
            f"{name}: " + ", ".join(f"{part} {value:.1f} ms" for part, value in values.items())
            for name, values in parts.items()
        )
        yield picture(
            figures.shares(parts, COLOURS, "mean milliseconds of an iteration"),
            name="parts",
            title="Parts of an iteration",
            caption="The mean over all iterations. Where workers or nodes work in parallel, the slowest counts.",
            alt=f"Parts of an iteration. {text}.",
            wide=True,
        )
    lines = {
        run.name: [(float(at), loss) for at, loss in enumerate(run.cost.losses) if loss is not None] for run in runs
    }
    if lines := {name: points for name, points in lines.items() if points}:
        failures = [float(values.iteration) for values in runs[0].cost.failures] if len(runs) == 1 else []
        yield figures.loss_picture(lines, failures, "iteration")


def _tables(runs: Sequence[ServedRun]) -> Iterator[Table]:
    columns = [*PARTS, "other"]
    times: list[list[Cell]] = []
    for run in runs:
        milliseconds = (1000 * run.cost.seconds[part] / max(run.cost.iterations, 1) for part in columns)
        times.append([run.name, run.cost.iterations, run.cost.saves, *milliseconds])
    yield Table(
        title="Parts of an iteration, mean milliseconds",
        columns=[Column("run"), Column("iterations"), Column("saves"), *(Column(part, ".2f") for part in columns)],
        rows=times,
    )
    rows: list[list[Cell]] = []
    for run in runs:
        for failure in run.cost.failures:
            lost, counts = ", ".join(failure.members), (failure.iteration, failure.blocks, failure.restored)
            rows.append([run.name, lost, *counts, failure.size, failure.regained, failure.seconds])
    if rows:
        names = [
            "run",
            "lost",
            "iteration",
            "blocks lost",
            "restored",
            "perturbation",
            "loss regained after, iterations",
        ]
        yield Table(title="Failures", columns=[*map(Column, names), Column("continues after, s", ".2f")], rows=rows)


def _remarks(run: ServedRun) -> Iterator[str]:
    if run.findings is None:
        yield f"{run.name} is still training: it is audited once it has ended."
