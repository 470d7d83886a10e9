"""The demo: the smallest experiments that show what holdfast is about, each in seconds."""

from collections.abc import Iterator
from pathlib import Path

from holdfast.lab import partial_recovery, qp_bound, report
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.result import Result, prepare


def run(out: Path, meter: Meter) -> Iterator[tuple[Result, Path]]:
    """Run each part and write its report; yields the result and the path of the report."""
    for part in (qp_bound, partial_recovery):
        folder = prepare(out / part.EXPERIMENT.name)
        options = Options(quick=True, trials=100, panels=("mlr-mnist",), out=folder)
        result = part.run(options, meter)
        yield result, report.write(result, folder)
