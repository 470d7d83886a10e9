"""The experiment recovery-matrix: the same training with the same failures under several recovery methods."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.lab.experiment import Experiment, Meter, Options, chosen
from holdfast.lab.result import Result, Row

if TYPE_CHECKING:
    from holdfast.lab.matrix.config import Matrix
    from holdfast.lab.matrix.measured_run import MeasuredRun

QUICK = Path(__file__).with_name("quick.toml")


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: train each combination of settings that is not finished yet, and analyse all runs."""
    from holdfast.lab.matrix.analysis import Analysis
    from holdfast.lab.matrix.config import read_matrix
    from holdfast.lab.matrix.figures import CAPTIONS, figures
    from holdfast.lab.matrix.runner import MatrixRunner
    from holdfast.lab.matrix.suites import all_suites
    from holdfast.lab.matrix.summary import claims, remarks, tables

    if options.config and options.quick:
        raise BadInput("--quick has its own matrix: give --config or --quick, not both.")
    if not (options.config or options.quick):
        raise BadInput("recovery-matrix needs --config FILE, such as experiments/matrix-cpu.toml, or --quick.")
    file = options.config or QUICK
    matrix = read_matrix(file)
    if options.trials:
        matrix = replace(matrix, seeds=matrix.seeds[: options.trials])
    suites = chosen(options.panels, {suite.name: suite for suite in all_suites(matrix)}, "suite")
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


def _config(file: Path, matrix: "Matrix", suites: int) -> Mapping[str, Any]:
    schedules = []
    for name, failures in matrix.failures.items():
        words = []
        for failure in failures:
            ranks = f" of rank {', '.join(map(str, failure.targets))}" if failure.targets else ""
            words.append(f"{failure.kind}{ranks} at {failure.step}:{failure.point}")
        schedules.append(f"{name} ({', '.join(words)})")
    settings = ("steps", "batch", "workers", "save_every", "max_inflight", "optimizer")
    return {
        "matrix": file.name,
        "suites": suites,
        "variants": ", ".join(matrix.variants),
        "seeds": ", ".join(map(str, matrix.seeds)),
        **{name: getattr(matrix, name) for name in settings},
        "failures": "; ".join(schedules),
    }


def row(run: "MeasuredRun") -> Row:
    costs = ("committed", "rolled_back", "samples_lost", "restarts", "saves", "bytes")
    return {
        **{name: getattr(run, name) for name in ("suite", "variant", "seed", "verdict", "audit", "goodput")},
        "wall_s": run.wall,
        **{name: getattr(run, name) for name in costs},
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
