"""Values that belong to one rank survive the loss of that rank, or the run restarts and says so."""

import itertools
from typing import Any

import pytest

from finished_run import different, events, failed_checks, last
from live_runs import LOOP
from supervisor_process import SUPPORT, Start, Supervisor

SCRIPT = SUPPORT / "hidden_state_script.py"
HOW: dict[str, Any] = {"script": SCRIPT, "workers": 3, "recovery": "replay", "save_every": 10}
LOST_VALUES = "rank {} was lost before the values it protects"


def assert_same_run(reference: Supervisor, job: Supervisor) -> None:
    for run in (reference, job):
        assert run.result().get("verdict") == "completed", run.stderr
    assert different(reference.out, job.out) == []
    assert last(reference.out).extra["own"] == last(job.out).extra["own"]
    assert failed_checks(job.out) == []


@pytest.mark.parametrize("point", ["boundary", "forward", "backward=0.5"])
def test_a_replacement_continues_with_the_values_of_the_rank_that_it_replaces(
    start: Start, start_reference: Start, point: str
) -> None:
    reference = start_reference(args=["2"], **HOW)
    failures = [
        {"step": step, "kind": "kill", "targets": [rank], "point": point} for rank, step in enumerate((13, 18, 24))
    ]
    job = start(args=["2"], failures=failures, **HOW)
    assert_same_run(reference, job)
    assert len([event for event in events(job.out, "regroup", "rank-1") if event.what.lost]) >= 2
    assert not events(job.out, "restart"), job.stderr


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_lost_before_its_values_of_the_step_exist_makes_the_run_restart_and_say_so(
    start: Start, start_reference: Start, rank: int
) -> None:
    reference = start_reference(args=["2"], **HOW)
    job = start(args=["2"], failures=[{"step": 14, "kind": "kill", "targets": [rank], "point": "optimizer"}], **HOW)
    assert_same_run(reference, job)
    assert len(events(job.out, "restart")) == 1
    assert LOST_VALUES.format(rank) in job.stderr


def test_a_run_without_failures_has_the_same_bits_with_every_recovery_though_shares_are_uneven(start: Start) -> None:
    task = {"model": "wide", "epochs": 2, "batch": 16}
    runs = [start(task, out=how, script=LOOP, workers=3, recovery=how) for how in ("restart", "replay", "forward")]
    for run in runs:
        assert run.result().get("verdict") == "completed", run.stderr
    assert [different(one.out, other.out) for one, other in itertools.pairwise(runs)] == [[], []]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["end", "plain"], ""),
        (["backward", "plain"], "protected state had changed since the step began"),
        (["end", "norm"], "rank 0 is lost, and its buffers with it"),
    ],
    ids=str,
)
def test_a_step_is_replayed_only_if_a_survivor_still_has_the_state_in_which_it_began(
    start: Start, args: list[str], why: str
) -> None:
    how = {**HOW, "script": SUPPORT / "meter_script.py", "args": args}
    reference = start(out="reference", **how)
    job = start(failures=[{"step": 13, "kind": "kill", "targets": [0], "point": "backward=0"}], **how)
    for run in (reference, job):
        assert run.result().get("verdict") == "completed", run.stderr
    assert different(reference.out, job.out) == []
    assert failed_checks(job.out) == []  # though a restart gives all ranks the batch-norm buffers of rank 0
    assert len(events(job.out, "restart")) == bool(why), job.stderr
    assert why in job.stderr, job.stderr


@pytest.mark.parametrize("args", [[], ["scheduler"]], ids=str)
def test_a_replacement_in_mid_epoch_undoes_what_the_script_changes_before_the_batches_of_the_epoch(
    start: Start, start_reference: Start, args: list[str]
) -> None:
    how = {**HOW, "script": SUPPORT / "epoch_sums_script.py", "args": args}
    reference = start_reference(**how)
    kills = [
        {"step": step, "kind": "kill", "targets": [rank], "point": "boundary"} for rank, step in ((1, 13), (2, 24))
    ]
    job = start(failures=kills[: 1 if args else 2], **how)  # step 13 is within an epoch, step 24 is the first of one
    assert_same_run(reference, job)
    assert len(events(job.out, "restart")) == bool(args), job.stderr
    assert ("the script changes optimizer and scheduler before the batches of an epoch" in job.stderr) == bool(args)
