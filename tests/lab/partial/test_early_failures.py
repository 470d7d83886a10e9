"""Failures before the first full checkpoint: the cost of first values and of the remedies, and their report."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from holdfast.lab.experiment import Options, Progress
from holdfast.lab.partial import early_failures
from holdfast.lab.partial.early_failures import APPROACHES, EARLY_FULL, FIRST, FRESH, OVER
from holdfast.lab.result_page import write
from holdfast.lab.simulate.lanes import iterations_to_criterion, start_as_given, trajectories
from holdfast.lab.simulate.strategy import CheckpointedRun, Trial, trial_stream
from holdfast.workloads.mf import MatrixFactorization
from holdfast.workloads.qp import QuadraticProgram
from holdfast.workloads.ratings import Ratings
from holdfast.workloads.reinit import renewed

STEP, TRIALS = 4, 6


def silent(label: str, total: int) -> Progress:
    return lambda done: None


def sparse() -> MatrixFactorization:
    """Few ratings and many factors, so that LR is far above the ratings at the start, as it is on MovieLens."""
    rng = np.random.default_rng(0)
    rows, columns = np.nonzero(rng.random((60, 240)) < 0.03)
    return MatrixFactorization(Ratings("sparse", 60, 240, rows, columns, 1 + 4 * rng.random(len(rows))), 20, SPARSE)


SPARSE = 46.8  # the criterion, which runs reach in some 45 iterations


def test_first_values_cost_more_than_starting_over_and_both_remedies_cost_less() -> None:
    workload = sparse()
    runs = trajectories(workload, [trial_stream(0, number) for number in range(TRIALS)])
    starts, costs = [], {}
    for approach in (OVER, FIRST, EARLY_FULL, FRESH):
        strategy = approach.strategy(8)
        for number, run in enumerate(runs):
            checkpointed = CheckpointedRun(
                run.states[: STEP + 1],
                workload.blocks,
                workload.norm,
                {strategy.policy},
                0,
                renew=lambda *arguments: renewed(workload, *arguments),
            )
            starts.append(checkpointed(Trial(strategy, STEP, number)))
    without = [run.crossed(workload.criterion) - STEP for run in runs]
    counts = iterations_to_criterion(workload, starts, start_as_given, limit=500).reshape(-1, TRIALS)
    costs = dict(zip(("over", "first", "early-full", "fresh"), (counts - without).mean(axis=1), strict=True))
    assert costs["over"] == pytest.approx(STEP, abs=1e-6)
    assert costs["first"] > costs["over"] > costs["early-full"] > costs["fresh"]


def test_every_approach_meets_the_same_failures_and_is_reported_with_its_bytes(tmp_path: Path) -> None:
    options = Options(quick=True, trials=6, panels=("mf-jester",), out=tmp_path)
    result = early_failures.run(options, silent)
    assert [row["way"] for row in result.rows] == [approach.name for approach in APPROACHES]
    costs = {row["way"]: row["early_cost"] for row in result.rows}
    assert costs["fresh values"] < costs["first values"]
    later = {row["way"]: row["later_cost"] for row in result.rows}
    assert later["fresh values"] == later["first values"] == later["early full saves"]
    assert [claim.id for claim in result.claims] == [
        "mf-jester-early-first",
        "mf-jester-early-full-first",
        "mf-jester-fresh-first",
        "mf-jester-fresh-over",
    ]
    assert all(claim.interval is not None for claim in result.claims)
    assert list(result.terms) == [f"`{approach.name}`" for approach in APPROACHES]
    (table,) = result.tables
    assert {len(row) for row in table.rows} == {len(table.columns)}
    written = {str(row[0]): row[-1] for row in table.rows}
    assert written["early saves"] == written["first values"]
    assert written["early full saves"] == float(written["first values"] or 0) + 3
    assert any("`early full saves` writes 3 whole states more than `first values`" in text for text in result.remarks)
    write(result, tmp_path)
    assert (tmp_path / "figures" / "early-failures.png").exists()


def test_an_own_model_without_a_rule_is_measured_without_fresh_values_and_claims(tmp_path: Path) -> None:
    options = Options(trials=4, workload=QuadraticProgram(), out=tmp_path)
    result = early_failures.run(options, silent)
    assert result.claims == []
    assert {row["recovery"] for row in result.rows} == {"full", "partial"}
    assert {Fraction(row["lost"]) for row in result.rows} == {Fraction(1, 2)}
