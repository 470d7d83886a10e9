"""Models with tensor parallelism and FSDP2: exact after every kill, and each sample is trained by one group of ranks."""

from pathlib import Path
from typing import Any

import pytest

from finished_run import different, distance, events, failed_checks, losses
from supervisor_process import SUPPORT, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "tensor_parallel_script.py", "save_every": 5, "workers": 4}
POINTS = ("forward=0.5", "backward=0.5", "optimizer", "save")  # test_sharded_live has more of them


def completed(job: Supervisor) -> Path:
    result = job.result(within=300.0)
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job.out


def kills(*points: str) -> list[dict[str, Any]]:
    return [
        {"step": 4 + 3 * number, "kind": "kill", "targets": [number % 4], "point": point}
        for number, point in enumerate(points)
    ]


@pytest.mark.parametrize(
    ("task", "points"),
    [({"batch": 9}, POINTS), ({"replicas": 2}, ("forward=0.5", "save"))],
    ids=["two groups with uneven batches", "two replicas"],
)
def test_killed_at_every_point_of_a_step_it_ends_with_the_bits_of_a_run_that_never_failed(
    start: Start, task: dict[str, Any], points: tuple[str, ...]
) -> None:
    reference = start(task, out="reference", **HOW)
    job = start(task, failures=kills(*points), max_restarts=9, **HOW)
    out = completed(job)
    assert len(events(out, "restart", "supervisor")) == len(points)
    assert different(completed(reference), out) == []


def test_the_ranks_of_a_group_train_and_evaluate_the_same_samples(start: Start) -> None:
    job = start({"evaluates": True, "epochs": 1}, **HOW)
    out = completed(job)
    shares = [[event.what.samples for event in events(out, "step", f"rank-{rank}")] for rank in range(4)]
    assert shares[0] == shares[1] != shares[2] == shares[3]
    assert "evaluated 96 samples, mean label" in (out / "logs" / "attempt-0001" / "rank-0.out").read_text()


def test_with_uneven_batches_it_agrees_to_rounding_with_a_run_on_one_rank(start: Start) -> None:
    task = {"batch": 9, "dropout": 0.0, "evaluates": True}
    alone = start(task | {"tensor_parallel": 1}, out="alone", **{**HOW, "workers": 1})
    out = completed(start(task, **HOW))
    reference = completed(alone)
    assert 0 < distance(reference, out) < 1e-4
    assert losses(out) == pytest.approx(losses(reference), abs=1e-5)


def test_with_another_number_of_ranks_it_agrees_to_rounding_and_the_audit_passes(
    start: Start, start_reference: Start
) -> None:
    failures = [{"step": step, "kind": "kill", "targets": [1]} for step in (4, 9)]
    reference = start_reference({"dropout": 0.0}, **HOW)
    out = completed(start({"dropout": 0.0}, failures=failures, workers_after=[2, 4], **HOW))
    assert [event.what.world for event in events(out, "attempt", "rank-0")] == [4, 2, 4]
    assert 0 < distance(completed(reference), out) < 1e-4


def test_with_groups_of_another_size_it_agrees_to_rounding_and_the_audit_passes(
    start: Start, start_reference: Start
) -> None:
    failures = [{"step": step, "kind": "kill", "targets": [1]} for step in (4, 8, 12)]
    reference = start_reference({"dropout": 0.0}, **HOW)
    out = completed(start({"dropout": 0.0, "tensor_parallel": [2, 4, 1, 2]}, failures=failures, **HOW))
    assert [event.what.tensor_parallel for event in events(out, "plan", "rank-0")] == [2, 4, 1, 2]
    assert [event.what.rng for event in events(out, "recover", "rank-3")] == ["keyed"] * 4
    assert 0 < distance(completed(reference), out) < 1e-4


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"workers": 3}, "3 ranks cannot be divided into tensor-parallel groups of 2: start a multiple of 2"),
        ({"recovery": "replay"}, "a model with tensor parallelism cannot recover live: leave out --recovery replay"),
    ],
)
def test_what_cannot_train_with_tensor_parallelism_is_refused(
    start: Start, options: dict[str, Any], because: str
) -> None:
    result = start({}, **(HOW | options)).result()
    assert result["verdict"] == "refused"
    assert because in result["because"]
