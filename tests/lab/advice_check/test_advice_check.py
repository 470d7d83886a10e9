"""The experiment on the advice: it predicts before it measures, counts what was not as predicted, and strikes real runs."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from fake_histories import calm
from holdfast.advice.estimate import INFERRED, Estimate
from holdfast.advice.prices import prices
from holdfast.advice.question import Question
from holdfast.advice.run_costs import run_costs
from holdfast.faults.schedule import Failure
from holdfast.lab.advice_check import advice_check, measurements
from holdfast.lab.advice_check.measurements import (
    FACTORS,
    AdviceCase,
    Sweep,
    coverage,
    intervals_to_sweep,
    kill_schedule,
    resampled_sweep,
)
from holdfast.lab.experiment import Options
from holdfast.lab.partial.panels import PANELS
from supervisor_process import StartCommand


def case(
    cost: float, *, strategy: str = "restart", unit: str = "seconds", failure: str = "killed in step 3"
) -> AdviceCase:
    return AdviceCase("small", failure, strategy, unit, Estimate(2.0, 1.0, 4.0, INFERRED), cost)


def test_a_case_holds_if_its_cost_lies_in_the_interval() -> None:
    assert [case(cost).holds for cost in (0.9, 1.0, 4.0, 4.1)] == [False, True, True, False]
    assert coverage([case(0.9), case(2.0)]) == 0.5
    assert np.isnan(coverage([]))


def test_wrong_predictions_are_counted_above_and_below_their_interval() -> None:
    early = case(9.0, unit="iterations", failure="after iteration 2, before the first save")
    line = advice_check._misses("runs", [case(2.0), case(0.5), early])
    assert "2 of 3 measured costs are outside their predicted intervals: 1 are higher, and 1 are lower." in line
    assert "1 of these 2 failures struck before the first save" in line
    assert advice_check._misses("runs", [case(2.0)]) == "runs: all 1 measured costs are in their predicted intervals."


def test_a_prediction_that_is_wrong_too_often_is_a_claim_that_does_not_hold() -> None:
    cases = [case(2.0), case(9.0), case(2.0, unit="iterations")]
    claims = {claim.id: claim for claim in advice_check._coverages(cases, [case(3.0)])}
    assert not claims["real-seconds"].holds
    assert claims["real-iterations"].holds
    assert claims["simulated"].holds
    assert not claims["cases"].holds  # two different ones are no evidence


def test_the_goodput_of_the_recommended_interval_is_compared_with_the_best_of_the_sweep() -> None:
    sweep = Sweep(
        "small", "real", 10.0, [1, 2, 4, 8, 16], np.array([[0.5, 0.8, 0.9, 1.0, 0.7], [0.5, 0.8, 0.9, 0.8, 0.7]])
    )
    assert sweep.recommended == pytest.approx(1.0)
    worse = Sweep("small", "real", 10.0, [1, 2, 4, 8, 16], np.array([[0.5, 0.8, 0.8, 1.0, 0.7]]))
    assert worse.recommended == pytest.approx(0.8)
    assert not advice_check._sweep_claim(worse).holds


def test_the_recommended_interval_is_near_the_best_where_costs_are_resampled() -> None:
    costs = run_costs(calm().events)
    mtbf, every = intervals_to_sweep(costs)
    assert every == sorted(every)
    assert every[2] / every[0] == pytest.approx(1 / FACTORS[0], rel=0.2)
    assert resampled_sweep("calm", costs, [mtbf / 15], seed=0).recommended > 0.97


def test_failures_of_a_sweep_come_from_its_seed_and_lie_in_the_run() -> None:
    struck = kill_schedule(50.0, 600, seed=1)
    assert struck == kill_schedule(50.0, 600, seed=1)
    assert struck != kill_schedule(50.0, 600, seed=2)
    assert all(1 <= failure.step < 600 for failure in struck)
    assert 4 <= len(struck) <= 24


def test_kills_come_from_the_seed_and_leave_time_for_a_replacement() -> None:
    drawn = [measurements.scheduled_kills(seed) for seed in range(20)]
    assert drawn[3] == measurements.scheduled_kills(3)
    assert len({failure for pair in drawn for failure in pair}) > 20
    assert all(second.step - first.step >= 70 for first, second in drawn)


def test_simulated_failures_are_predicted_from_a_run_without_one(tmp_path: Path) -> None:
    workload = PANELS["mlr-mnist"].workload(None, quick=True)
    options = Options(out=tmp_path / "result", trials=4)
    cases = measurements._simulated_cases(workload, options, 4, lambda what, total: lambda done: None)
    assert len(cases) == 4 * len(measurements.strategies(8))
    assert len({case.predicted for case in cases}) <= len(measurements.strategies(8))  # predicted without a failure
    assert coverage(cases) >= 0.8


def test_a_figure_shows_every_kind_of_case() -> None:
    sweep = Sweep("small", "real", 10.0, [1, 2, 4, 8, 16], np.array([[0.5, 0.8, 0.9, 0.8, 0.7]]))
    sheet = advice_check.figure([case(2.0)], [case(9.0, unit="iterations")], [sweep])
    assert sheet.axes[0].get_xlabel() == "cost of a kill, seconds"


HISTORIES = """
import pickle, sys
from pathlib import Path
from holdfast.lab.advice_check.measurements import history_of
folder = Path(sys.argv[1])
configs = pickle.loads((folder / "configs").read_bytes())
(folder / "histories").write_bytes(pickle.dumps([history_of(config, folder) for config in configs]))
"""


def test_a_real_run_is_killed_and_read(start_command: StartCommand, tmp_path: Path) -> None:
    struck = (Failure(step=47, kind="kill", targets=(2,)),)
    configs = (
        measurements.run_config("small", steps=40, save_every=15),
        measurements.run_config("small", "forward", struck, steps=80),
    )
    # In another process, because a supervisor must not fork after torch has started threads in other tests.
    (tmp_path / "configs").write_bytes(pickle.dumps(configs))
    ran = start_command(tmp_path, instead=HISTORIES)
    assert ran.wait() == 0, ran.stderr
    quiet, history = pickle.loads((tmp_path / "histories").read_bytes())
    costs = run_costs(quiet)
    cases = measurements._killed_cases("small", costs, prices(costs, Question())["forward"], history)
    assert [case.unit for case in cases] == ["seconds", "iterations"]
    assert cases[0].failure == "killed in step 47"
    assert 0 <= cases[0].measured < 60
    assert cases[1].holds
