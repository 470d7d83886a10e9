"""Workers die, and the others go on in their own processes: the world shrinks and grows back, and the audit agrees."""

import json
from pathlib import Path
from typing import Any

import pytest

from finished_run import different, events, failed_checks
from holdfast.cost.breakdown import cost_breakdown
from holdfast.errors import BadInput
from holdfast.history.log import read_history
from holdfast.runs.config import RunConfig
from holdfast.supervise.scale_request import scale
from live_runs import EPOCHS, LOOP, PATIENCE, WORKERS, fingerprints, run_with_live_recovery
from supervisor_process import Start, wait_until

KILLS = [[1], [0], [1, 3]]


@pytest.mark.parametrize("lost", KILLS, ids=str)
@pytest.mark.parametrize("recovery", ["forward", "skip"])
def test_survivors_continue_in_their_processes_and_declare_exactly_the_lost_samples(
    start: Start, recovery: str, lost: list[int]
) -> None:
    job = run_with_live_recovery(start, recovery, [{"step": 12, "kind": "kill", "targets": lost}])
    pids = {rank: {event.what.pid for event in events(job.out, "attempt", f"rank-{rank}")} for rank in range(WORKERS)}
    assert all(len(each) == 1 + (rank in lost) for rank, each in pids.items())
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
    declared = {event.what.missing for event in events(job.out, "regroup") if event.what.lost}
    assert all(0 < len(each) <= 16 for each in declared)
    worlds = [event.what.world for event in events(job.out, "step", "rank-2")]
    assert worlds[0] == worlds[-1] == WORKERS
    assert min(worlds) < WORKERS
    assert failed_checks(job.out) == []


def test_a_gradient_scaler_takes_a_dropped_step_for_an_overflow(start: Start) -> None:
    job = run_with_live_recovery(start, "skip", [{"step": 12, "kind": "kill", "targets": [2]}], scaler=True)
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
    assert failed_checks(job.out) == []


@pytest.mark.parametrize("lost", KILLS[:2], ids=str)
def test_a_dropped_step_does_not_change_a_protected_average_of_the_weights(start: Start, lost: list[int]) -> None:
    failures = [{"step": 12, "kind": "kill", "targets": lost, "point": "backward=0"}]
    job = run_with_live_recovery(start, "skip", failures, averaged=True, patience=0.4)
    assert any(event.what.missing for event in events(job.out, "regroup"))
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
    assert failed_checks(job.out) == []


@pytest.mark.parametrize("lost", KILLS[1:], ids=str)
def test_a_replayed_step_is_the_exact_step(start: Start, lost: list[int]) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": WORKERS, "recovery": "replay", "save_every": 10}
    model = "wide" if 0 in lost else "normed"
    reference = start({"model": model, "epochs": EPOCHS}, out="reference", **how)
    job = run_with_live_recovery(start, "replay", [{"step": 12, "kind": "kill", "targets": lost}], model=model)
    assert reference.result()["verdict"] == "completed", reference.stderr
    assert different(reference.out, job.out) == []
    assert not any(event.what.missing for event in events(job.out, "regroup"))
    assert failed_checks(job.out) == []


def test_buffers_that_only_a_lost_rank_had_are_restored_from_a_snapshot(start: Start) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": 3, "recovery": "replay", "save_every": 10}
    task = {"model": "normed", "epochs": 5}
    reference = start(task, out="reference", **how)
    job = start(task, failures=[{"step": 12, "kind": "kill", "targets": [0]}], **how)
    assert job.result().get("verdict") == "completed", job.stderr
    assert len(events(job.out, "restart")) == 1
    assert reference.result()["verdict"] == "completed", reference.stderr
    assert different(reference.out, job.out) == []
    assert failed_checks(job.out) == []
    (cost,) = cost_breakdown(
        read_history(job.out / "history").events
    ).failures  # one failure, however many it took with it
    assert (cost.kind, cost.rank, cost.step, cost.ended_attempt) == ("kill", 0, 12, True)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"workers": 2, "recovery": "skip", "spares": -1}, "--spares must be 0 or more"),
        ({"workers": 2, "recovery": "skip", "workers_after": (3,)}, "workers_after is for restarts"),
        ({"workers": 2, "recovery": "backward"}, "there is no recovery 'backward'"),
    ],
)
def test_settings_that_cannot_recover_live_are_refused_in_one_line(how: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        RunConfig(script="train.py", **how)


def test_one_worker_alone_cannot_recover_live_and_one_on_each_of_several_nodes_can() -> None:
    config = RunConfig(script="train.py", workers=1, recovery="forward")
    with pytest.raises(BadInput, match="needs 2 workers or more"):
        config.check_world(1)
    config.check_world(2)


@pytest.mark.parametrize(
    ("task", "recovery", "why"),
    [
        ({"replicated": False}, "forward", "write model = run.replicate(model) before the optimizer is made"),
        ({"eager": True, "micro_batches": 2}, "forward", "step only where batch.is_last is true"),
        ({"eager": True, "micro_batches": 2}, "restart", "step only where batch.is_last is true"),
        ({"steps_every": 2}, "skip", "With live recovery, step the optimizer in every step"),
    ],
    ids=str,
)
def test_a_script_whose_ranks_would_diverge_is_refused_in_one_line(
    start: Start, task: dict[str, Any], recovery: str, why: str
) -> None:
    job = start(task, script=LOOP, workers=2, recovery=recovery)
    result = job.result()
    assert result.get("verdict") == "refused", (result, job.stderr)
    assert why in job.stderr
    assert not events(job.out, "restart")


@pytest.mark.parametrize("recovery", ["replay", "forward"])
def test_a_spare_replaces_a_lost_worker_and_a_new_spare_is_started(start: Start, recovery: str) -> None:
    how: dict[str, Any] = {"script": LOOP, "workers": 2, "recovery": recovery, "spares": 1, "save_every": 20}
    task = {"epochs": EPOCHS, "patience": PATIENCE}
    job = start(task, failures=[{"step": step, "kind": "kill", "targets": [1]} for step in (8, 16)], **how)
    assert job.result().get("verdict") == "completed", job.stderr
    assert not events(job.out, "restart"), job.stderr
    started = {path.stem for path in (job.out / "logs" / "attempt-0001").glob("*.out")}
    assert started == {"rank-0", "rank-1", "worker-2", "worker-3", "worker-4"}
    assert all(len(each) == 1 for each in fingerprints(job.out).values())
    assert failed_checks(job.out) == []
    if recovery == "replay":
        reference = start(task, out="reference", **how)
        assert reference.result()["verdict"] == "completed", reference.stderr
        assert different(reference.out, job.out) == []


def test_workers_are_suspended_and_resumed_in_their_own_processes(start: Start, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    task = {"epochs": 25, "pause": 0.2, "until": str(enough)}
    job = start(task, script=LOOP, workers=WORKERS, recovery="forward")
    wait_until(lambda: (job.out / "history" / "rank-0.jsonl").exists(), "the first rank")
    fewer, all_again = scale(job.out, 2), scale(job.out, WORKERS)
    enough.touch()
    assert job.result().get("verdict") == "completed", job.stderr
    assert (fewer.workers, all_again.workers) == (2, WORKERS)
    for rank in range(WORKERS):
        lives = [event.what.pid for event in events(job.out, "attempt", f"rank-{rank}")]
        assert (len(lives), len({*lives})) == (2 if rank >= 2 else 1, 1)
    assert {event.what.world for event in events(job.out, "step")} == {2, WORKERS}
    assert not any(event.what.missing or event.what.lost for event in events(job.out, "regroup"))
    assert failed_checks(job.out) == []


@pytest.mark.parametrize(
    ("recovery", "workers", "why"),
    [
        ("restart", 1, "recovers by restart, and only live recovery can put workers to sleep"),
        ("forward", 3, "--workers must be between 1 and 2"),
        ("forward", 0, "--workers must be between 1 and 2"),
        ("forward", 1, "no run is active in"),
    ],
)
def test_scaling_that_is_impossible_is_refused_in_one_line(
    tmp_path: Path, recovery: str, workers: int, why: str
) -> None:
    config = RunConfig(script="train.py", workers=2, recovery=recovery)
    (tmp_path / "run.json").write_text(json.dumps(config.to_json()))
    with pytest.raises(BadInput, match=why):
        scale(tmp_path, workers)
