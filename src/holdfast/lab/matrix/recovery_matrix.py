"""The experiment recovery-matrix: the same trainings under the same failures, recovered in several ways, on real workers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.result import Result, Row

if TYPE_CHECKING:
    from holdfast.lab.matrix.config import Matrix
    from holdfast.lab.matrix.measured_run import MeasuredRun

QUICK = Path(__file__).with_name("quick.toml")


def run(options: Options, meter: Meter) -> Result:
    """Execute every run that is not finished yet, and analyse all of them."""
    from holdfast.lab.matrix.analysis import Analysis
    from holdfast.lab.matrix.claims import claims, remarks
    from holdfast.lab.matrix.config import read_matrix
    from holdfast.lab.matrix.figures import CAPTIONS, figures
    from holdfast.lab.matrix.runner import MatrixRunner
    from holdfast.lab.matrix.suites import chosen_suites
    from holdfast.lab.matrix.tables import tables

    file = _config_file(options)
    matrix = read_matrix(file)
    if options.trials:
        matrix = replace(matrix, seeds=matrix.seeds[: options.trials])
    suites = chosen_suites(matrix, options.panels)
    runs = MatrixRunner.prepared(matrix, suites, options.out, options.data).run_all(meter)
    analysis = Analysis(matrix, suites, runs)
    drawn = figures(analysis)
    return Result(
        experiment="recovery-matrix",
        config=_config(file, matrix, len(suites)),
        rows=[row(measured) for measured in runs.values()],
        claims=claims(analysis),
        remarks=remarks(analysis),
        tables=tables(analysis),
        figures=drawn,
        captions={name: CAPTIONS[name] for name in drawn},
    )


def _config_file(options: Options) -> Path:
    if options.config and options.quick:
        raise BadInput("--quick has its own matrix: give --config or --quick, not both.")
    if options.config or options.quick:
        return options.config or QUICK
    raise BadInput("recovery-matrix needs --config FILE, such as experiments/matrix-cpu.toml, or --quick.")


def _config(file: Path, matrix: "Matrix", suites: int) -> Mapping[str, Any]:
    schedules = [f"{name} ({', '.join(map(_strike, failures))})" for name, failures in matrix.failures.items()]
    return {
        "matrix": file.name,
        "suites": suites,
        "variants": ", ".join(matrix.variants),
        "seeds": ", ".join(map(str, matrix.seeds)),
        "steps": matrix.steps,
        "batch": matrix.batch,
        "workers": matrix.workers,
        "save_every": matrix.save_every,
        "max_inflight": matrix.max_inflight,
        "optimizer": matrix.optimizer,
        "failures": "; ".join(schedules),
    }


def _strike(failure: Any) -> str:
    ranks = f" of rank {', '.join(map(str, failure.targets))}" if failure.targets else ""
    return f"{failure.kind}{ranks} at {failure.step}:{failure.point}"


def row(run: "MeasuredRun") -> Row:
    """Return one run as a row of the result."""
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


EXPERIMENT = Experiment(
    name="recovery-matrix",
    title="goodput and exactness of restart, replay, forward and skip under the same failures, on real workers",
    source="ECRL, tables 5 to 8",
    has_panels=True,
    accepts_config=True,
    run=run,
)
