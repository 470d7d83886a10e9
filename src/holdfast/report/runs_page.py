"""The report page about one training run, or about several runs in comparison."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from holdfast.audit.verdicts import SEVERITY
from holdfast.cost import compare
from holdfast.cost.breakdown import CAUSES
from holdfast.finding import counted
from holdfast.report import figures
from holdfast.report.figures import picture, styled
from holdfast.report.page import Cell, Column, Number, Page, Picture, Statement, Table, duration, slug
from holdfast.report.run_data import ReportedRun, audit_statements
from holdfast.report.timeline_figure import described, left_out, timeline

FOLDED = 12  # rows from which a table is folded
MOST_TIMELINES = 12


def page(runs: Sequence[ReportedRun], facts: Mapping[str, str], *, live: bool = False) -> Page:
    """Return a report page about one run in detail, or about several runs in comparison.

    `facts` has the command, date and environment. A page that is `live` reloads itself while the run trains."""
    one = runs[0] if len(runs) == 1 else None
    return Page(
        title=one.name if one else f"{len(runs)} runs",
        lead=_lead(runs),
        statements=_statements(runs),
        scoreboard="checks of the audit pass" if one else "audits pass",
        brief=one is not None,
        numbers=_numbers(one) if one else _compared(runs),
        pictures=list(_pictures(runs)) if any(run.cost.trained for run in runs) else [],
        tables=list(_tables(runs)),
        remarks=list(_remarks(runs)),
        facts=facts,
        live=live,
    )


def baseline(runs: Sequence[ReportedRun]) -> ReportedRun:
    """Return the run to compare others with: the first with blocking saves, or the first if there is none."""
    return next((run for run in runs if run.writer == "blocking"), runs[0])


def _lead(runs: Sequence[ReportedRun]) -> str:
    began = datetime.fromtimestamp(min(run.began for run in runs), UTC)
    when = f"begun on {began.day} {began:%B %Y at %H:%M} UTC"
    failures = sum(len(run.cost.failures) for run in runs)
    if len(runs) > 1:
        return f"{', '.join(run.name for run in runs[:6])}{', ...' if len(runs) > 6 else ''}: {counted(failures, 'failure')} in all, {when}."
    (run,) = runs
    ended = run.cost.ended or ("still running, or killed" if run.findings is not None else "still running")
    steps = f"{run.cost.committed:,} committed steps in {duration(run.cost.wall)}"
    return f"{steps}, {counted(failures, 'failure')}, {ended}; {when}."


def _statements(runs: Sequence[ReportedRun]) -> list[Statement]:
    lossy = {run.name: run.settings["recovery"] in ("forward", "skip") for run in runs}
    claims = {name: ", except those declared lost" * is_lossy for name, is_lossy in lossy.items()}
    return audit_statements({f"{r.name}: every sample was trained once{claims[r.name]}": r.findings for r in runs})


def _numbers(run: ReportedRun) -> list[Number]:
    cost = run.cost
    numbers = [
        Number("goodput", f"{cost.goodput:.3g}", "committed steps per second"),
        Number("wall clock", duration(cost.wall), f"{counted(len(cost.attempts), 'attempt')}"),
        Number("committed", f"{cost.committed:,}", f"of {cost.trained:,} steps trained"),
        Number("stall", f"{run.stall_share:.1%}", f"of the time, for {counted(len(cost.saves), 'save')}"),
        Number("failures", f"{len(cost.failures)}", f"{counted(cost.restarts, 'restart')}"),
        Number("undone", f"{cost.rolled_back:,}", f"steps, {duration(cost.seconds['rework'])}"),
    ]
    if cost.samples_lost:
        numbers.append(Number("samples lost", f"{cost.samples_lost:,}", "declared by live recovery"))
    return numbers


def _compared(runs: Sequence[ReportedRun]) -> list[Number]:
    best = max(runs, key=lambda run: run.cost.goodput)
    base = baseline(runs)
    numbers = [Number("best goodput", f"{best.cost.goodput:.3g}", f"steps/s, {best.name}")]
    if best is not base and base.cost.goodput > 0:
        numbers.append(Number("gain", f"{best.cost.goodput / base.cost.goodput - 1:+.1%}", f"over {base.name}"))
    least = min(runs, key=lambda run: run.stall_share)
    numbers.append(Number("least stall", f"{least.stall_share:.1%}", f"of the time, {least.name}"))
    numbers.append(Number("failures", f"{sum(len(run.cost.failures) for run in runs)}", "in all runs"))
    numbers.append(Number("undone", f"{sum(run.cost.rolled_back for run in runs):,}", "steps in all runs"))
    return numbers


def _pictures(runs: Sequence[ReportedRun]) -> Iterator[Picture]:
    if len(runs) > 1:
        yield _goodput(runs)
    with styled():
        sheet = compare.figure({_label(run): run.cost for run in runs})
    largest = {run.name: sorted(run.cost.share.items(), key=lambda part: -part[1])[:3] for run in runs[:8]}
    shares = "; ".join(
        f"{name}: {', '.join(f'{cause} {share:.0%}' for cause, share in parts)}" for name, parts in largest.items()
    )
    yield picture(
        sheet,
        name="wall-clock",
        title="Wall clock by cause",
        caption="Seconds of wall clock by cause. Goodput is at the end of each bar.",
        alt=f"Wall clock by cause. {shares}.",
        wide=True,
    )
    lines = {_label(run): run.losses for run in runs if run.losses}
    if lines:
        failures = [failure.step for failure in runs[0].cost.failures] if len(runs) == 1 else []
        yield figures.loss_picture(lines, failures, "step")
    for run in (run for run in runs[:MOST_TIMELINES] if run.cost.trained):
        text = described(run.activity)
        yield picture(
            timeline(run.activity),
            name=f"timeline-{slug(run.name)}",
            title=f"Timeline of {run.name}",
            caption=f"{text} Above: progress of training. Below: activity of each rank. {left_out(run.activity)}".strip(),
            alt=text,
            wide=True,
        )


def _goodput(runs: Sequence[ReportedRun]) -> Picture:
    base, goodputs = baseline(runs), {_label(run): run.cost.goodput for run in runs}
    why = "the run with blocking saves" if base.writer == "blocking" else "the first run"
    return picture(
        figures.goodput(goodputs, _label(base)),
        name="goodput",
        title="Goodput",
        caption=f"Committed steps per second of wall clock, and the gain over {base.name}, {why} (grey).",
        alt="Goodput: " + ", ".join(f"{name} {value:.3g} steps/s" for name, value in goodputs.items()) + ".",
    )


def _label(run: ReportedRun) -> str:
    return run.name if len(run.name) <= 24 else f"…{run.name[-23:]}"


def _tables(runs: Sequence[ReportedRun]) -> Iterator[Table]:
    if len(runs) > 1:
        yield _side_by_side_table(runs)
    if len(runs) == 1:
        cost = runs[0].cost
        yield Table(
            title="Wall clock by cause",
            columns=[Column("cause"), Column("seconds", ".3f"), Column("share", ".1%")],
            rows=[[cause, cost.seconds[cause], cost.share[cause]] for cause in CAUSES],
        )
    else:
        yield Table(
            title="Wall clock by cause, seconds",
            columns=[Column("cause"), *(Column(run.name, ".3f") for run in runs)],
            rows=[[cause, *(run.cost.seconds[cause] for run in runs)] for cause in CAUSES],
        )
    if any(run.cost.failures for run in runs):
        yield _failures(runs)
    if any(run.cost.stragglers for run in runs):
        yield _stragglers(runs)
    yield Table(
        title="Attempts",
        columns=[*_run_column(runs), *map(Column, ("attempt", "workers", "ended", "restored", "steps", "undone", "committed")), Column("wall, s", ".2f")],
        rows=[
            [*_run_cell(runs, run), a.attempt, a.world, a.ended, a.restored, a.steps, a.rolled_back, a.committed, a.wall]
            for run in runs
            for a in run.cost.attempts
        ],
    )  # fmt: skip
    if any(run.cost.listed_saves for run in runs):
        yield _saves(runs)
    keys = list(runs[0].settings)
    yield Table(
        title="Settings",
        columns=[Column("run"), *map(Column, keys)],
        rows=[[run.name, *(run.settings.get(key) for key in keys)] for run in runs],
    )
    if len(runs) > 1 and any(run.findings for run in runs):
        yield _audit_table(runs)


def _run_column(runs: Sequence[ReportedRun]) -> list[Column]:
    return [Column("run")] if len(runs) > 1 else []


def _run_cell(runs: Sequence[ReportedRun], run: ReportedRun) -> list[Cell]:
    return [run.name] if len(runs) > 1 else []


def _side_by_side_table(runs: Sequence[ReportedRun]) -> Table:
    columns = {
        "run": Column("run"),
        "goodput": Column("goodput, steps/s", ".3f"),
        "wall": Column("wall, s", ".2f"),
        "committed": Column("committed"),
        "restarts": Column("restarts"),
        "rework_steps": Column("undone steps"),
        "samples_lost": Column("samples lost"),
        "trains_after": Column("trains after, s", ".2f"),
        "saves": Column("saves"),
        "stall": Column("stall, s", ".3f"),
        "stall_per_save": Column("stall a save, s", ".4f"),
    }
    rows = [[row[name] for name in columns] for row in compare.compare({run.name: run.cost for run in runs})]
    return Table(title="Runs side by side", columns=list(columns.values()), rows=rows)


def _failures(runs: Sequence[ReportedRun]) -> Table:
    seconds = (Column("detected after, s", ".3f"), Column("trains after, s", ".3f"))
    names = map(Column, ("attempt", "step", "failure", "rank", "detected"))
    rows: list[list[Cell]] = []
    for run in runs:
        for failure in run.cost.failures:
            which = (failure.attempt, failure.step, failure.name, failure.rank, failure.detected)
            lost = (failure.rework_steps, failure.samples_lost)
            rows.append([*_run_cell(runs, run), *which, failure.detection, failure.to_first_step, *lost])
    columns = [*_run_column(runs), *names, *seconds, Column("undone steps"), Column("samples lost")]
    return Table(title="Failures", columns=columns, rows=rows)


def _stragglers(runs: Sequence[ReportedRun]) -> Table:
    names = map(Column, ("attempt", "slow", "from step", "to step"))
    rows: list[list[Cell]] = [
        [*_run_cell(runs, run), slow.attempt, slow.name, slow.step, slow.until, slow.ratio, slow.seconds]
        for run in runs
        for slow in run.cost.stragglers
    ]
    columns = [*_run_column(runs), *names, Column("times as slow", ".2f"), Column("others waited, s", ".2f")]
    return Table(title="Slow ranks and nodes", columns=columns, rows=rows)


def _saves(runs: Sequence[ReportedRun]) -> Table:
    parts = ("waited", "snapshot", "enqueue", "backpressure", "write", "sync", "overlapped")
    saves = [(run, save) for run in runs for save in run.cost.saves]
    rows: list[list[Cell]] = []
    for run, save in sorted(saves, key=lambda row: -row[1].stall.waited):
        waits = (1000 * getattr(save.stall, part) for part in parts)
        durable = None if save.durable_after is None else 1000 * save.durable_after
        rows.append([*_run_cell(runs, run), save.attempt, save.step, save.bytes, *waits, durable])
    for run in runs:
        rows += [[*_run_cell(runs, run), *save, *[None] * (len(parts) + 1)] for save in run.cost.found_saves]
    names = [*map(Column, ("attempt", "step", "bytes")), *(Column(part, ".2f") for part in parts)]
    columns = [*_run_column(runs), *names, Column("durable after", ".1f")]
    return Table(title="Saves, milliseconds", columns=columns, rows=rows, folded=len(rows) > FOLDED)


def _audit_table(runs: Sequence[ReportedRun]) -> Table:
    rows = [(run.name, finding) for run in runs for finding in run.findings or ()]
    rows.sort(key=lambda row: -SEVERITY.index(row[1].verdict))
    cells = [[name, finding.verdict, finding.check.replace("_", " "), finding.because] for name, finding in rows]
    columns = list(map(Column, ("run", "verdict", "check", "because")))
    return Table(title="Audit", columns=columns, rows=cells, folded=True)


def _remarks(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for run in runs:
        cost = run.cost
        if not cost.trained:
            yield f"{run.name}: no step was trained yet, in {counted(len(cost.attempts), 'attempt')}."
        if run.findings is None:
            yield f"{run.name} is still running: it is audited when it has ended."
        if cost.away > 0:
            yield f"{run.name}: it was continued after it had ended; its wall clock leaves out the {duration(cost.away)} between."
        if cost.clock_back > 0:
            yield f"{run.name}: the clock went back by {duration(cost.clock_back)}; the wall clock leaves out that time."
        if cost.seconds["unaccounted"] > 0.1 * (cost.wall or 1.0):
            yield f"{run.name}: {cost.share['unaccounted']:.0%} of the wall clock has no recorded cause."
    if len(runs) > MOST_TIMELINES:
        yield f"Only the first {MOST_TIMELINES} runs have a timeline."
