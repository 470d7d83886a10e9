"""The recovery matrix: the same trainings under the same failures, recovered from in several ways, on real workers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.matrix.config import BLOCKING, OVERLAPPED
from holdfast.lab.matrix.measured_run import MeasuredRun
from holdfast.lab.result import Result, Row

if TYPE_CHECKING:
    from holdfast.lab.matrix.analysis import Analysis
    from holdfast.lab.matrix.config import Matrix

QUICK = Path(__file__).with_name("quick.toml")


def run(options: Options, meter: Meter) -> Result:
    """Do every run that is not done yet, then see what they come to."""
    from holdfast.lab.matrix.analysis import Analysis
    from holdfast.lab.matrix.claims import claims
    from holdfast.lab.matrix.config import read_matrix
    from holdfast.lab.matrix.figures import CAPTIONS, figures
    from holdfast.lab.matrix.runner import MatrixRunner
    from holdfast.lab.matrix.suites import chosen_suites
    from holdfast.lab.matrix.tables import tables

    file = _file(options)
    matrix = read_matrix(file)
    if options.trials:
        matrix = replace(matrix, seeds=matrix.seeds[: options.trials])
    suites = chosen_suites(matrix, options.panels)
    found = Analysis(matrix, suites, MatrixRunner.of(matrix, suites, options.out, options.data).all(meter))
    drawn = figures(found)
    return Result(
        experiment="recovery-matrix",
        config=_config(file, matrix, found),
        rows=[row(each) for each in found.found.values()],
        claims=claims(found),
        remarks=remarks(found),
        tables=tables(found),
        figures=drawn,
        captions={name: CAPTIONS[name] for name in drawn},
    )


def _file(options: Options) -> Path:
    if options.config and options.quick:
        raise BadInput("--quick has a matrix of its own: give --config or --quick, not both")
    if options.config or options.quick:
        return options.config or QUICK
    raise BadInput("recovery-matrix has no matrix to run: give --config FILE, such as experiments/matrix-cpu.toml, or --quick")  # fmt: skip


def _config(file: Path, matrix: "Matrix", found: "Analysis") -> Mapping[str, Any]:
    failures = [f"{name} ({', '.join(_struck(each) for each in matrix.failures[name])})" for name in matrix.failures]
    return {
        "matrix": file.name,
        "suites": len(found.suites),
        "variants": ", ".join(matrix.variants),
        "seeds": ", ".join(map(str, matrix.seeds)),
        "steps": matrix.steps,
        "batch": matrix.batch,
        "workers": matrix.workers,
        "save_every": matrix.save_every,
        "max_inflight": matrix.max_inflight,
        "optimizer": matrix.optimizer,
        "failures": "; ".join(failures),
    }


def _struck(failure: Any) -> str:
    who = f" of rank {', '.join(map(str, failure.targets))}" if failure.targets else ""
    return f"{failure.kind}{who} at {failure.step}:{failure.point}"


def row(run: MeasuredRun) -> Row:
    """One run, without what is too long for a table."""
    return {
        "suite": run.suite,
        "variant": run.variant,
        "seed": run.seed,
        "verdict": run.verdict,
        "audit": run.audit,
        "goodput": run.goodput,
        "wall_s": run.wall,
        "committed": run.committed,
        "rolled_back": run.rolled_back,
        "samples_lost": run.samples_lost,
        "restarts": run.restarts,
        "saves": run.saves,
        "bytes": run.bytes,
        **{f"stall_{part}_s": seconds for part, seconds in run.stall.items()},
        **{f"{cause}_s": seconds for cause, seconds in run.seconds.items()},
        "last_loss": next((loss for loss in reversed(run.losses) if loss is not None), None),
        "last_distance": run.distances[-1][1] if run.distances else None,
        "stolen": run.stolen,
        "tries": run.tries,
    }


def remarks(found: "Analysis") -> list[str]:
    """What a reader should know beside the claims."""
    lines = [
        "Wall clock, and so goodput, counts everything from the start of the supervisor to the end of the last worker: "
        "start-up, every recovery, and the wait for saves that are still in flight at the end.",
        "Writing and queueing on the training path is the time that steps waited for a save to be written, handed over or "
        "to find a place in the queue. The last save is waited for at the end, by nobody's step: that is in `closing`.",
    ]
    if found.failed:
        names = ", ".join(dict.fromkeys(each.suite.name for each in found.failed))
        lines.append(
            f"NOT COUNTED, since a run of theirs did not pass a quality gate: {names}. The last table says why."
        )
    if found.has(BLOCKING, OVERLAPPED):
        lines.append(_sizes(found))
    if any(run.stolen is not None for run in found.found.values()):
        lines.append(_disturbed(found))
    return lines


def _disturbed(found: "Analysis") -> str:
    """How much of the machine others had, by which it is decided how much its clock says."""
    runs = found.found.values()
    taken = [run.stolen for run in runs if run.stolen is not None]
    again = sum(run.tries > 1 for run in runs)
    return (
        f"The host of this virtual machine gave {sum(taken) / len(taken):.1%} of its processors to others on average, and at "
        f"most {max(taken):.1%} during a run that counts; {again} of {len(runs)} runs were done again because of that."
    )


def _sizes(found: "Analysis") -> str:
    """How large saves are beside steps, by which it is decided whether overlapping can gain anything."""
    size = found.mean(lambda run: float(run.bytes), BLOCKING) / 1e6
    step = found.mean(lambda run: run.seconds["compute"] / max(1, run.committed), BLOCKING)
    save = found.mean(lambda run: run.waited / max(1, run.saves), BLOCKING)
    less = found.mean(lambda run: run.waited / max(1, run.saves), OVERLAPPED)
    return (
        f"A save has {size:.3g} MB on average and a step takes {step:.3g} s; training waits {save:.3g} s for a save that "
        f"blocks and {less:.3g} s for one that is overlapped."
    )


EXPERIMENT = Experiment(
    name="recovery-matrix",
    title="goodput and exactness of restart, replay, forward and skip under the same failures, on real workers",
    source="ECRL, tables 5 to 8",
    panels=True,
    configured=True,
    run=run,
)
