"""Flipped bits in real runs: found within the interval, the rank named, and undone without a trace in the result."""

from typing import Any

import pytest

from finished_run import different, events, failed_checks
from holdfast.audit.verdicts import audit_run
from holdfast.runs.config import RunConfig
from supervisor_process import SUPPORT, Start, Supervisor

LOOP = SUPPORT / "training_script.py"
HOW: dict[str, Any] = {"script": LOOP, "workers": 3, "save_every": 8, "witness_every": 5}
TASK = {"epochs": 5}  # 30 steps


def flip(step: int, point: str, rank: int) -> dict[str, Any]:
    return {"kind": "flip", "step": step, "point": point, "targets": [rank]}


def completed(job: Supervisor) -> Supervisor:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job


def test_flipped_bits_of_replicas_are_found_within_the_interval_and_leave_no_trace(start: Start) -> None:
    reference = start(TASK, out="reference", script=LOOP, workers=3, save_every=8)
    flips = [flip(6, "weight=30", 1), flip(18, "moment=23", 2)]
    job = completed(start(TASK, out="flipped", failures=flips, **HOW))
    found = [event.what for event in events(job.out, "corruption")]
    assert [(what.step, what.agreed, what.culprit) for what in found] == [(8, 5, 1), (20, 16, 2)]
    assert [(event.what.kind, event.what.rank) for event in events(job.out, "detect")] == [
        ("corruption", 1),
        ("corruption", 2),
    ]
    assert [event.what.restored for event in events(job.out, "recover", "rank-0")] == [None, 0, 16]
    assert completed(reference)
    assert different(reference.out, job.out) == []


def test_a_shard_that_differs_from_its_copy_is_found_but_a_replaced_worker_is_no_false_alarm(start: Start) -> None:
    how: dict[str, Any] = {"script": SUPPORT / "fsdp_script.py", "workers": 3, "save_every": 8}
    task = {"averaged": True, "batch_norm": True, "epochs": 3}
    failures = [{"kind": "kill", "step": 5, "targets": [1]}, flip(14, "weight=22", 2)]
    reference = start(task, out="reference", **how)
    job = completed(start(task, out="flipped", recovery="replay", witness_every=4, failures=failures, **how))
    found = [event.what for event in events(job.out, "corruption")]
    assert [(what.step, what.agreed, what.ranks) for what in found] == [(16, 12, (0, 2))]
    assert [event.what.step for event in events(job.out, "witnessed", "rank-1")] == [0, 4, 8, 12, 8, 12, 16, 20, 24]
    checks = {finding.check: finding.because for finding in audit_run(job.out)}
    assert "the shard of rank 2 was wrong" in checks["no_corruption_remains"]
    assert completed(reference)
    assert different(reference.out, job.out) == []


def test_replicas_of_a_sharded_model_are_compared_without_live_recovery(start: Start) -> None:
    how: dict[str, Any] = {"script": SUPPORT / "fsdp_script.py", "workers": 4, "save_every": 8}
    task = {"averaged": True, "replicas": 2}
    reference = start(task, out="reference", **how)
    job = completed(start(task, out="flipped", witness_every=4, failures=[flip(10, "weight=22", 3)], **how))
    found = [event.what for event in events(job.out, "corruption")]
    assert [(what.step, what.agreed, what.ranks) for what in found] == [(12, 8, (1, 3))]
    witnessed = [event.what for event in events(job.out, "witnessed", "rank-3")]
    assert {(what.group, what.copy) for what in witnessed} == {(1, None)}
    assert completed(reference)
    assert different(reference.out, job.out) == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"witness_every": 0}, "--witness-every must be 1 or more (got 0)"),
        ({"witness_every": 9, "keep_last": 1}, "--witness-every needs --keep-last 2 or more (got 1)"),
        ({"witness_every": 9, "workers": 1}, "--witness-every compares the states of workers, so it needs 2 or more"),
    ],
)
def test_settings_that_cannot_compare_anything_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match="--witness-every") as refused:
        RunConfig(script="train.py", **{"workers": 3, **settings}).check_world(1)
    assert why in str(refused.value)


def test_a_model_that_is_not_replicated_is_refused_in_one_line(start: Start) -> None:
    job = start({**TASK, "replicated": False}, **HOW)
    result = job.result()
    assert result["verdict"] == "refused"
    assert "--witness-every compares the copies of a state" in result["because"]


def test_shards_without_a_copy_are_refused_in_one_line(start: Start) -> None:
    job = start({}, **{**HOW, "script": SUPPORT / "fsdp_script.py", "workers": 2})
    result = job.result()
    assert result["verdict"] == "refused"
    assert "hybrid sharding" in result["because"]
