"""The demo: the smallest experiments that show what holdfast is about, each in seconds."""

from collections.abc import Iterator
from pathlib import Path

from holdfast.lab import partial_recovery, qp_bound, report
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.result import Result, prepare


def run(out: Path, meter: Meter) -> Iterator[tuple[Result, Path]]:
    """Run each part and write its report; yields the result and the path of the report."""
    for name, part, options in (
        ("qp-bound", qp_bound.run, Options(quick=True)),
        ("partial-recovery", partial_recovery.run, Options()),
    ):
        folder = prepare(out / name)
        result = part(options, meter)
        yield result, report.write(result, folder)
