"""What runs of a matrix come to: gates, means, intervals, divergence and claims, from numbers that were planted."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.events import Event, Seconds, Step
from holdfast.faults.schedule import Failure
from holdfast.lab.matrix import analysis as bootstrap
from holdfast.lab.matrix import runner
from holdfast.lab.matrix.analysis import Analysis, gate_failures, loss_gap
from holdfast.lab.matrix.config import Matrix
from holdfast.lab.matrix.figures import CAPTIONS, figures
from holdfast.lab.matrix.measured_run import MeasuredRun, losses
from holdfast.lab.matrix.runner import PAUSES, STOLEN, MatrixRunner, ProcessorTicks, processor_ticks, stolen_share
from holdfast.lab.matrix.suites import PlannedRun, Suite, all_suites, planned_runs
from holdfast.lab.matrix.summary import (
    aggregate,
    claims,
    complete,
    divergences,
    per_suite,
    remarks,
    sliced,
    stalls,
    tables,
    wall_clock,
)
from holdfast.sampler.digest import Samples

MATRIX = Matrix(
    steps=100,
    batch=32,
    seeds=(1, 2),
    datasets=("digits",),
    models=("mlp", "resnet18"),
    failures={"base": (Failure(step=20, kind="kill", targets=(1,)),)},
    variants=("reference", "blocking", "overlapped", "forward"),
)
MLP, RESNET = all_suites(MATRIX)
WALLS = {"reference": 10.0, "blocking": 20.0, "overlapped": 16.0, "forward": 12.5}
WAITED = {"reference": 4.0, "blocking": 4.0, "overlapped": 1.0, "forward": 1.0}


def measured(unit: PlannedRun) -> MeasuredRun:
    """A run as it should be; the second seed takes a tenth longer."""
    how, longer = unit.how, 1.0 if unit.seed == 1 else 1.1
    written = {"write": 3.0} if how.writer == "blocking" else {"enqueue": 0.03, "backpressure": 0.03}
    parts = {"snapshot": 0.5, "write": 0.0, "enqueue": 0.0, "backpressure": 0.0, "sync": 0.4, "overlapped": 0.0}
    return MeasuredRun(
        suite=unit.suite.name,
        variant=unit.variant,
        seed=unit.seed,
        digest="d",
        verdict="completed",
        because="all workers have finished",
        attempts=2 if how.fails and not how.is_live else 1,
        audit="pass",
        committed=100,
        restarts=1 if how.fails and not how.is_live else 0,
        samples_lost=0 if how.is_exact else 16,
        wall=WALLS[unit.variant] * longer,
        saves=4,
        bytes=1000,
        seconds={"compute": WALLS[unit.variant] * longer - 1, "recovery": 1.0},
        stall={"waited": WAITED[unit.variant], **parts, **written},
        struck=((20, "kill", "boundary", 1),) if how.fails else (),
        losses=(2.0, 1.0) if how.is_exact else (2.0, 1.5),
        distances=None if not how.fails else ((50, 0.0, 2.0), (100, 0.0 if how.is_exact else 0.5, 2.0)),
    )


def runs() -> dict[PlannedRun, MeasuredRun]:
    return {unit: measured(unit) for unit in planned_runs(MATRIX, [MLP, RESNET])}


def analysis(measured_runs: dict[PlannedRun, MeasuredRun] | None = None) -> Analysis:
    return Analysis(MATRIX, [MLP, RESNET], measured_runs or runs())


def test_a_suite_whose_runs_are_as_they_should_be_passes_every_gate() -> None:
    assert gate_failures(MATRIX, MLP, runs()) == []


@pytest.mark.parametrize(
    ("variant", "change", "gate"),
    [
        ("blocking", {"verdict": "gave-up"}, "completed"),
        ("blocking", {"committed": 99}, "steps"),
        ("overlapped", {"audit": "fail", "finding": "windows: twice"}, "audit"),
        ("overlapped", {"audit": "unknown"}, "audit"),
        ("overlapped", {"struck": ()}, "failures"),
        ("reference", {"struck": ((20, "kill", "boundary", 1),)}, "failures"),
        ("forward", {"struck": ((20, "kill", "boundary", 0),)}, "failures"),
        ("forward", {"restarts": 1, "attempts": 2}, "restarts"),
        ("blocking", {"attempts": 3}, "attempts"),
        ("blocking", {"saves": 0}, "saves"),
        ("overlapped", {"samples_lost": 1}, "samples"),
    ],
)
def test_one_run_that_is_not_right_keeps_its_suite_from_counting(
    variant: str, change: dict[str, object], gate: str
) -> None:
    measured_runs = runs()
    unit = PlannedRun(MLP, variant, 2)
    measured_runs[unit] = replace(measured_runs[unit], **change)  # type: ignore[arg-type]
    (wrong,) = gate_failures(MATRIX, MLP, measured_runs)
    assert (wrong.run, wrong.gate) == (f"{variant}-2", gate)
    of = analysis(measured_runs)
    assert of.counted == [RESNET]
    assert [row[:3] for row in tables(of)[-1].rows] == [[MLP.name, f"{variant}-2", gate]]
    assert {claim.id: claim.measured for claim in claims(of)}["gates"] == 0.5
    assert any(line.startswith("NOT COUNTED") and MLP.name in line for line in remarks(of))


def test_a_run_that_was_not_made_is_a_gate_that_fails() -> None:
    measured_runs = runs()
    del measured_runs[PlannedRun(MLP, "blocking", 1)]
    assert [(each.run, each.gate) for each in gate_failures(MATRIX, MLP, measured_runs)] == [("blocking-1", "measured")]


def test_a_suite_that_does_not_count_is_left_out_of_every_mean() -> None:
    measured_runs = runs()
    for seed in (1, 2):
        unit = PlannedRun(MLP, "blocking", seed)
        measured_runs[unit] = replace(measured_runs[unit], wall=1e6, audit="fail")
    assert analysis(measured_runs).mean(lambda run: run.wall, "blocking") == pytest.approx(21.0)


def test_without_a_suite_that_counts_claims_fail_and_no_figure_is_drawn() -> None:
    measured_runs = {unit: replace(run, audit="fail") for unit, run in runs().items()}
    of = analysis(measured_runs)
    assert {claim.id: claim.measured for claim in claims(of)} == {"pass-rate": 0.0, "gates": 0.0}
    assert figures(of) == {}
    assert [table.title[:11] for table in tables(of)] == ["Not counted"]


def row(rows: Sequence[Sequence[object]], name: str) -> list[object]:
    return next(list(each[1:]) for each in rows if each[0] == name)


def test_means_over_suites_are_those_of_the_papers_table_5() -> None:
    table = aggregate(analysis())
    assert table is not None
    assert table.columns == ["", *MATRIX.variants, "overlapped minus blocking", "95 % from", "to"]
    goodput = np.mean([100 / 20, 100 / 22])
    assert row(table.rows, "goodput, steps/s")[1] == pytest.approx(goodput, abs=1e-4)
    assert row(table.rows, "stall, s") == [4.0, 4.0, 1.0, 1.0, -3.0, -3.0, -3.0]
    assert row(table.rows, "stall for writing and queueing, s")[:4] == [3.0, 3.0, 0.06, 0.06]
    drops = row(table.rows, "goodput compared with the reference, %")
    assert drops[:4] == [0.0, -50.0, -37.5, -20.0]
    assert drops[4] == 12.5


def test_suites_are_ordered_by_the_gain_of_overlapping() -> None:
    measured_runs = runs()
    for seed in (1, 2):
        unit = PlannedRun(RESNET, "overlapped", seed)
        measured_runs[unit] = replace(measured_runs[unit], wall=measured_runs[unit].wall / 2)
    table = per_suite(analysis(measured_runs))
    assert table is not None
    assert [each[1] for each in table.rows] == ["resnet18", "mlp"]
    gained = [each[table.columns.index("goodput gained by overlapped, %")] for each in table.rows]
    assert gained == [150.0, 25.0]


def test_only_axes_with_several_values_are_shown() -> None:
    table = sliced(analysis())
    assert table is not None
    assert [each[:3] for each in table.rows] == [["model", "mlp", 1], ["model", "resnet18", 1]]
    assert table.rows[0][table.columns.index("stall reduced by, %")] == 75.0


def test_every_table_has_a_value_for_every_column() -> None:
    for table in tables(analysis()):
        assert table.rows
        assert {len(each) for each in table.rows} == {len(table.columns)}
    every, parts, clock = complete(analysis()), stalls(analysis()), wall_clock(analysis())
    assert every is not None
    assert len(every.rows) == 2
    assert parts is not None
    assert row(parts.rows, "blocking")[-1] == 1.0
    assert clock is not None
    assert row(clock.rows, "blocking")[1] == 21.0


def test_claims_are_the_papers_and_hold_where_the_numbers_do() -> None:
    measured_runs = {claim.id: claim for claim in claims(analysis())}
    assert {ident: claim.measured for ident, claim in measured_runs.items()} == {
        "pass-rate": 1.0,
        "gates": 1.0,
        "beats": 1.0,
        "gain": pytest.approx(0.25),
        "stall": 0.75,
        "write": 0.98,
        "exact": 0.0,
    }
    assert all(claim.holds for claim in measured_runs.values())
    assert [measured_runs[ident].expected for ident in ("stall", "write")] == [(0.57, None), (0.92, None)]


@pytest.mark.parametrize(
    "change",
    [
        {"sweep": {"save_every": (5,)}},
        {"failures": {"base": (*MATRIX.failures["base"], Failure(step=9, kind="delay"))}},
    ],
    ids=["a sweep", "a disk that fails"],
)
def test_sweeps_and_storage_faults_do_not_claim_the_papers_comparison(change: dict[str, object]) -> None:
    matrix = replace(MATRIX, **change)  # type: ignore[arg-type]
    several = all_suites(matrix)
    measured_runs = {unit: measured(unit) for unit in planned_runs(matrix, several)}
    storage = (9, "delay", "boundary", 0)
    if "failures" in change:
        measured_runs = {
            unit: replace(run, struck=(storage, *run.struck)) if run.struck else run
            for unit, run in measured_runs.items()
        }
    assert [claim.id for claim in claims(Analysis(matrix, several, measured_runs))] == ["pass-rate", "gates", "exact"]


def test_overlapping_that_loses_in_one_suite_does_not_beat_blocking_in_every_suite() -> None:
    measured_runs = runs()
    for seed in (1, 2):
        unit = PlannedRun(MLP, "overlapped", seed)
        measured_runs[unit] = replace(measured_runs[unit], wall=30.0)
    beats = next(claim for claim in claims(analysis(measured_runs)) if claim.id == "beats")
    assert beats.measured == 0.5
    assert not beats.holds
    assert beats.resolved


def test_a_restart_that_trains_something_else_is_not_exact() -> None:
    measured_runs = runs()
    unit = PlannedRun(MLP, "blocking", 1)
    measured_runs[unit] = replace(measured_runs[unit], losses=(2.0, 1.25))
    exact = next(claim for claim in claims(analysis(measured_runs)) if claim.id == "exact")
    assert exact.measured == 0.125  # the mean over the seeds
    assert not exact.holds


def test_divergence_is_of_the_same_steps_and_snapshots() -> None:
    run = measured(PlannedRun(MLP, "forward", 1))
    measured_runs = loss_gap(run, measured(PlannedRun(MLP, "reference", 1)))
    assert measured_runs == (0.25, 0.5, 0.25, 0.25)
    unknown = loss_gap(replace(run, losses=(None, None), distances=None), run)
    assert all(math.isnan(each) for each in unknown)
    table = divergences(analysis())
    assert table is not None
    assert [each[1] for each in table.rows] == ["blocking", "overlapped", "forward"] * 2
    assert table.rows[0][2:] == [0.0, 0.0, 0.0, 0.0]


def test_the_loss_of_a_step_is_the_mean_over_its_samples_in_the_last_attempt_that_trained_it() -> None:
    def step(attempt: int, rank: int, number: int, loss: float | None, count: int) -> Event:
        samples = Samples(count)
        what = Step(attempt, 2, rank, 0, number, number, samples, Seconds(0, 0, 0), loss=loss)
        return Event(0.0, f"rank-{rank}", what)

    events = [
        step(1, 0, 0, 9.0, 3),
        step(1, 1, 0, 9.0, 1),
        step(2, 0, 0, 1.0, 3),
        step(2, 1, 0, 5.0, 1),
        step(2, 0, 2, None, 3),
    ]
    assert losses(events) == (2.0, None, None)


def test_an_interval_is_drawn_over_seeds_and_keeps_the_runs_of_a_seed_together() -> None:
    rows = np.array([[2.0, 1.0], [20.0, 10.0], [200.0, 100.0]])  # each twice its pair, however large
    of = bootstrap.bootstrap_interval([rows], bootstrap.gain)
    assert of == (1.0, 1.0, 1.0)
    noisy = bootstrap.bootstrap_interval([np.array([[1.0, 1.0], [3.0, 1.0]])], bootstrap.gain)
    assert noisy == (1.0, 0.0, 2.0)
    alone = bootstrap.bootstrap_interval([rows[:1]], bootstrap.gain)
    assert alone.value == 1.0
    assert math.isnan(alone.low)


def test_measured_runs_are_read_back_as_they_were_written() -> None:
    run = measured(PlannedRun(Suite("digits", "mlp", "base"), "forward", 1))
    assert MeasuredRun.from_json(run.to_json()) == run
    assert math.isnan(MeasuredRun.from_json(replace(run, wall=math.nan).to_json()).wall)


def test_every_figure_has_a_caption_and_a_colour_for_each_variant() -> None:
    swept = replace(MATRIX, sweep={"save_every": (5, 10)})
    several = all_suites(swept)
    drawn = figures(Analysis(swept, several, {unit: measured(unit) for unit in planned_runs(swept, several)}))
    assert list(drawn) == list(CAPTIONS)
    sheet = drawn["goodput"]
    assert [text.get_text() for text in sheet.legends[0].get_texts()] == list(MATRIX.variants)


def test_stolen_processor_time_is_read_from_the_kernel(tmp_path: Path) -> None:
    statistics = tmp_path / "stat"
    statistics.write_text("cpu  100 0 50 800 20 0 10 20 7 7\ncpu0 1 2 3\n")
    before = processor_ticks(statistics)
    assert before == ProcessorTicks(stolen=20, total=1000)
    assert stolen_share(before, ProcessorTicks(stolen=70, total=1200)) == 0.25
    assert stolen_share(before, before) is None


@pytest.mark.parametrize("text", ["", "intr 5 6 7 8 9 1 2 3\n", "cpu 1 2 3\n", "cpu 1 2 3 4 5 6 7 eight\n"])
def test_a_system_that_does_not_say_it_is_believed_to_be_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert processor_ticks(tmp_path / "stat") is None
    assert processor_ticks(tmp_path / "nothing") is None
    assert stolen_share(None, ProcessorTicks(1, 2)) is None


@pytest.mark.parametrize(
    ("taken", "tries"),
    [([0.0], 1), ([None], 1), ([STOLEN], 1), ([0.5, 0.01], 2), ([0.5, 0.4, 0.3, 0.2], 1 + len(PAUSES))],
)
def test_a_run_from_which_others_took_the_processors_is_done_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, taken: list[float | None], tries: int
) -> None:
    unit = PlannedRun(MLP, "blocking", 1)
    done, slept = iter(taken), list[float]()
    monkeypatch.setattr(MatrixRunner, "_measured", lambda self, unit: replace(measured(unit), stolen=next(done)))
    monkeypatch.setattr(runner.time, "sleep", slept.append)
    measured_runs = MatrixRunner(MATRIX, [MLP], Path("unused"), {})._undisturbed(unit)
    assert (measured_runs.tries, measured_runs.stolen) == (tries, taken[-1])
    assert slept == list(PAUSES)[: tries - 1]
    assert next(done, "none left") == "none left"


@pytest.mark.parametrize("fails", [{"audit": "fail"}, {"verdict": "failed"}], ids=str)
def test_a_failed_run_is_not_done_again_until_it_passes(monkeypatch: pytest.MonkeyPatch, fails: dict[str, str]) -> None:
    monkeypatch.setattr(MatrixRunner, "_measured", lambda self, unit: replace(measured(unit), stolen=0.9, **fails))
    measured_runs = MatrixRunner(MATRIX, [MLP], Path("unused"), {})._undisturbed(PlannedRun(MLP, "blocking", 1))
    assert measured_runs.tries == 1


def test_remarks_report_the_processor_time_that_the_host_gave_to_others() -> None:
    runs = {unit: measured(unit) for unit in planned_runs(MATRIX, [MLP, RESNET])}
    assert not any("host" in line for line in remarks(Analysis(MATRIX, [MLP, RESNET], runs)))
    runs = {unit: replace(run, stolen=0.02, tries=1) for unit, run in runs.items()}
    first = next(iter(runs))
    runs[first] = replace(runs[first], stolen=0.18, tries=3)
    (line,) = [line for line in remarks(Analysis(MATRIX, [MLP, RESNET], runs)) if "host" in line]
    assert "3.0% of the processor time to other virtual machines on average, and at most 18.0% during a run" in line
    assert "repeated if this share is more than 10%; this happened to 1 of 16 runs" in line
