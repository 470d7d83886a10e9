"""Measuring strategies: costs of the same failures, in a journal that survives a kill, whatever the number of jobs."""

import csv
import json
import resource
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import BadInput, StorageFailed
from holdfast.lab import confidence as interval
from holdfast.lab.experiment import Options, Progress, TrialLog, chosen
from holdfast.lab.partial import priority_checkpoint
from holdfast.lab.partial.comparison import Measurement, concentration, measure
from holdfast.lab.partial.panels import PANELS, distinct_panels, quick_notes
from holdfast.lab.partial.partial_recovery import strategy
from holdfast.lab.result import Claim
from holdfast.lab.result_page import write
from holdfast.lab.simulate.lanes import Trajectory
from holdfast.lab.simulate.strategy import lost_in_trial
from holdfast.workloads.mlr import mlr


def silent(what: str, total: int) -> Progress:
    return lambda done: None


def measured(out: Path, **options: int) -> Measurement:
    strategies = [strategy("full", Fraction(1), 8), strategy("partial", Fraction(1, 2), 8)]
    return measure("mlr", [mlr("digits")], strategies, Options(out=out, **options), 6, "journal", silent)[0]  # type: ignore[arg-type]


def test_full_recovery_of_a_deterministic_run_costs_the_iterations_since_the_checkpoint(tmp_path: Path) -> None:
    found = measured(tmp_path)
    costs = found.costs_of(strategy("full", Fraction(1), 8))
    assert costs.cost == pytest.approx(found.steps % 8, abs=1e-4)
    assert costs.whole.tolist() == (found.steps % 8).tolist()


def test_a_resumed_measurement_runs_only_missing_trials_and_finds_the_same_costs(tmp_path: Path) -> None:
    first = measured(tmp_path)
    lines = (tmp_path / "trials" / "journal.jsonl").read_text().splitlines()
    (tmp_path / "trials" / "journal.jsonl").write_text("\n".join(lines[:4]) + '\n["torn')
    again = measured(tmp_path)
    for each in first.strategies:
        assert np.array_equal(first.strategies[each].cost, again.strategies[each].cost)
    kept = [
        json.loads(line)[1]
        for line in (tmp_path / "trials" / "journal.jsonl").read_text().splitlines()
        if line.endswith("]")
    ]
    assert len(kept) == len(set(kept)) == len([line for line in lines if line])


def test_another_seed_never_meets_old_results(tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    measured(tmp_path)
    mixed, fresh = measured(tmp_path, seed=1), measured(tmp_path / "fresh", seed=1)
    for each in mixed.strategies:
        assert np.array_equal(mixed.strategies[each].cost, fresh.strategies[each].cost)


def test_a_trial_log_keeps_infinity_and_skips_torn_lines(tmp_path: Path) -> None:
    with closing(TrialLog(tmp_path / "j", "code")) as journal:
        journal.record("a", 3)
        journal.record("b", np.inf)
    with (tmp_path / "j").open("a") as file:
        file.write('["c", 1')
    with closing(TrialLog(tmp_path / "j", "code")) as again:
        assert again.known == {"a": 3, "b": np.inf}
        again.record("c", 2)
    with closing(TrialLog(tmp_path / "j", "code")) as last:
        assert last.known["c"] == 2


def test_a_trial_log_on_a_full_disk_raises_and_still_closes(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(TrialLog(tmp_path / "j", "code")) as journal:
        journal.record("a", 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (24, limits[1]))
        try:
            journal.record("b", 2)  # torn
            with pytest.raises(StorageFailed, match="free space and run again"):
                journal.record("c", 3)
            journal.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with closing(TrialLog(tmp_path / "j", "code")) as again:
        assert again.known == {"a": 1}


@pytest.mark.parametrize("experiment", [priority_checkpoint])
def test_rows_are_the_same_for_one_job_and_for_two_and_are_written_with_costs_and_bounds_as_figures(
    experiment: object, tmp_path: Path
) -> None:
    results = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        options = Options(quick=True, trials=6, jobs=jobs, panels=("mlr-mnist", "mf-jester"), out=out)
        results.append(experiment.run(options, silent))  # type: ignore[attr-defined]
    assert results[0].rows == results[1].rows
    write(results[0], tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["claims"]
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {results[0].experiment, "bound"}


def test_priority_checkpoints_are_cheaper_than_random_ones(tmp_path: Path) -> None:
    options = Options(quick=True, trials=10, panels=("mlr-mnist",), out=tmp_path)
    result = priority_checkpoint.run(options, silent)
    costs = {(row["policy"], row["frequency"]): row["cost_mean"] for row in result.rows if row["recovery"] == "partial"}
    assert costs["priority", 8] < costs["random", 8]
    assert costs["priority", 8] < costs["priority", 1]
    assert costs["priority", 1] == costs["round", 1] == costs["random", 1]
    ranking = result.tables[0]
    (row,) = (dict(zip(ranking.columns, row, strict=True)) for row in ranking.rows)
    assert [row[name] for name in ("priority", "random")] == [costs[name, 8] for name in ("priority", "random")]
    assert row["full (1x)"] == costs["round", 1]
    assert {row["panel"] for row in result.rows} == {"mlr-mnist"}
    assert (tmp_path / "trials.csv").read_text().count("\n") == 1 + 10 * len(result.rows)


@pytest.mark.parametrize(("moving", "share"), [(1, 1.0), (2, 0.5), (8, 1 / 8)])
def test_concentration_is_the_share_of_the_movement_that_one_small_save_could_hold(moving: int, share: float) -> None:
    workload = mlr("digits")
    weights = np.zeros((17, *workload.start()["weights"].shape))
    weights[:, : moving * len(workload.blocks) // 8] = np.arange(17).reshape(-1, 1, 1)
    run = Trajectory([{"weights": each} for each in weights], np.zeros(17))
    assert concentration(workload, run, 8) == pytest.approx(share)


def test_panels_come_in_their_usual_order_and_unknown_ones_are_refused() -> None:
    assert [panel.name for panel in chosen(["mf-jester", "mlr-mnist"], PANELS, "panel")] == ["mlr-mnist", "mf-jester"]
    assert len(chosen([], PANELS, "panel")) == 8
    with pytest.raises(BadInput, match="no panel 'mlr-iris'; choose among mlr-mnist"):
        chosen(["mlr-iris"], PANELS, "panel")


def test_the_interval_of_a_reduction_covers_the_true_value_in_about_95_percent() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        baseline = rng.exponential(4, size=60)
        low, high = interval.reduction(0.3 * baseline + rng.normal(0, 1, size=60), baseline)[1:]
        covered += low <= 0.7 <= high
    assert 0.88 <= covered / 200 <= 1


def test_a_baseline_without_cost_has_no_reduction_and_its_claim_does_not_hold() -> None:
    nothing = interval.reduction(np.zeros(3), np.zeros(3))
    assert np.isnan(nothing).all()
    assert not Claim(id="a", claim="b", source="c", expected=(0, 1), measured=nothing.value, interval=nothing[1:]).holds


def test_a_claim_whose_interval_spans_the_border_is_not_resolved() -> None:
    def claim(measured: float, low: float, high: float) -> Claim:
        return Claim(id="a", claim="b", source="c", expected=(0.5, 0.9), measured=measured, interval=(low, high))

    assert (claim(0.7, 0.6, 0.8).holds, claim(0.7, 0.6, 0.8).resolved) == (True, True)
    assert (claim(0.55, 0.4, 0.7).holds, claim(0.55, 0.4, 0.7).resolved) == (True, False)
    assert (claim(0.3, 0.2, 0.4).holds, claim(0.3, 0.2, 0.4).resolved) == (False, True)
    assert claim(0.7, 0.4, 0.95).resolved is False


def test_a_trial_can_be_reproduced_from_the_files_of_its_result(tmp_path: Path) -> None:
    priority_checkpoint.run(Options(quick=True, trials=5, seed=3, panels=("mlr-mnist",), out=tmp_path), silent)
    trials = list(csv.DictReader((tmp_path / "trials.csv").read_text().splitlines()))
    losses = list(csv.DictReader((tmp_path / "lost_blocks.csv").read_text().splitlines()))
    assert [loss["step"] for loss in losses] == [trial["step"] for trial in trials[:5]]
    for loss, trial in zip(losses, trials[:5], strict=True):
        lost = sorted(map(int, loss["order"].split()[: int(trial["lost_blocks"])]))
        assert lost == lost_in_trial(3, int(trial["trial"]), 64, Fraction(1, 2)).tolist()


def test_a_quick_run_uses_each_small_data_set_once() -> None:
    names = [panel.name for panel in distinct_panels((), quick=True)]
    assert names == ["mlr-mnist", "mf-movielens", "lda-20news", "cnn-mnist-layer", "cnn-mnist-shard"]
    assert len(distinct_panels((), quick=False)) == 8
    assert "mf-jester" in quick_notes(())[0]
