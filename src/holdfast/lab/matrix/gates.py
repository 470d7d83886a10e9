"""The quality gates: what must hold of every run of a suite before the suite counts. Pure.

They are the paper's (section 5.9): target steps, correctness, artifacts, consistent metadata. A suite that fails one is
shown with the reason and is part of no mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.lab.matrix.config import Matrix
from holdfast.lab.matrix.measured_run import MeasuredRun, Struck
from holdfast.lab.matrix.suites import Suite, Unit, restarts, schedule


@dataclass(frozen=True, slots=True)
class Failed:
    """A gate that a run did not pass, and why."""

    suite: Suite
    run: str
    gate: str
    why: str


def failed(matrix: Matrix, suite: Suite, found: Mapping[Unit, MeasuredRun]) -> list[Failed]:
    """Every gate that a run of this suite does not pass; none if the suite counts."""
    wrong: list[Failed] = []
    for variant in matrix.variants:
        for seed in matrix.seeds:
            unit = Unit(suite, variant, seed)
            checks = _run(matrix, unit, found[unit]) if unit in found else iter([("measured", "it was not run")])
            wrong += [Failed(suite, unit.name, gate, why) for gate, why in checks]
    return wrong


def counted(matrix: Matrix, several: Sequence[Suite], found: Mapping[Unit, MeasuredRun]) -> list[Suite]:
    """The suites that pass every gate."""
    return [suite for suite in several if not failed(matrix, suite, found)]


def expected(matrix: Matrix, unit: Unit) -> tuple[Struck, ...]:
    """The failures that are to strike a run, one for each rank; storage is struck as a whole, on record as rank 0."""
    several = [
        (failure.step, failure.kind, failure.point, rank)
        for failure in schedule(matrix, unit)
        for rank in failure.targets or (0,)
    ]
    return tuple(sorted(several))


def _run(matrix: Matrix, unit: Unit, run: MeasuredRun) -> Iterator[tuple[str, str]]:
    """The gates that one run does not pass."""
    if run.verdict != "completed":
        yield "completed", f"{run.verdict}: {run.because}"
    if run.committed != matrix.steps:
        yield "steps", f"{run.committed} of {matrix.steps} steps are committed"
    if run.audit != "pass":
        yield "audit", f"{run.audit}: {run.finding or 'nothing was trained'}"
    if run.struck != expected(matrix, unit):
        yield "failures", f"struck by {_listed(run.struck)}, where it was to be {_listed(expected(matrix, unit))}"
    if run.restarts != restarts(matrix, unit):
        yield "restarts", f"{run.restarts} restarts, where it was to be {restarts(matrix, unit)}"
    if run.verdict == "completed" and run.attempts != run.restarts + 1:
        yield "attempts", f"its supervisor tells of {run.attempts} attempts, its history of {run.restarts + 1}"
    if not run.saves:
        yield "saves", "nothing was saved"
    if run.samples_lost and unit.how.is_exact:
        yield "samples", f"{run.samples_lost} samples were not trained"


def _listed(several: Sequence[Struck]) -> str:
    return ", ".join(f"{kind} of rank {rank} at {step}:{point}" for step, kind, point, rank in several) or "nothing"
