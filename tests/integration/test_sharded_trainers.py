"""Trainers whose models are sharded with FSDP2: killed, they end with the bits of a run that never failed."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finished_run import different, distance, events, failed_checks
from supervisor_process import SUPPORT, Start, Supervisor, driving

SCRIPTS = {
    "transformers": SUPPORT / "fsdp2_trainer_script.py",
    "lightning": SUPPORT / "fsdp2_lightning_script.py",
    "fabric": SUPPORT / "fsdp2_fabric_script.py",
}
KILLS: list[dict[str, Any]] = [
    {"step": 3, "kind": "kill", "targets": [1], "point": "forward=0.5"},
    {"step": 4, "kind": "kill", "targets": [0], "point": "backward=1"},
    {"step": 6, "kind": "kill", "targets": [0], "point": "optimizer"},
]


@pytest.fixture(scope="module")
def driver() -> Iterator[subprocess.Popen[str]]:
    """One process imports the trainers for all runs."""
    modules = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "torch.distributed.fsdp", "lightning")
    with driving(*modules) as process:
        yield process


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job.out


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_trainer_ends_with_the_bits_of_one_that_never_failed(start: Start, name: str, tmp_path: Path) -> None:
    task, how = {"folder": str(tmp_path)}, {"script": SCRIPTS[name], "workers": 2, "save_every": 2}
    reference, killed = start(task, out="reference", **how), start(task, failures=KILLS, **how)
    assert different(completed(reference), completed(killed)) == []
    assert len(events(killed.out, "restart", "supervisor")) == len(KILLS)
    files = [file.name for file in (killed.out / "checkpoints" / "step-00000008").glob("*.safetensors")]
    assert sorted(files) == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_with_another_number_of_workers_it_agrees_to_rounding_and_the_audit_passes(
    start: Start, name: str, tmp_path: Path
) -> None:
    task = {"folder": str(tmp_path), "dropout": 0.0}
    how = {"script": SCRIPTS[name], "workers": 4, "save_every": 2}
    reference = start(task, out="reference", **how)
    killed = start(task, failures=KILLS[:2], workers_after=[2, 1], **how)
    assert 0 < distance(completed(reference), completed(killed)) < 1e-4
    assert [event.what.world for event in events(killed.out, "attempt", "rank-0")] == [4, 2, 1]


def test_hybrid_sharding_with_transformers(start: Start, tmp_path: Path) -> None:
    task = {"folder": str(tmp_path), "replicas": 2, "checkpointing": True}
    how = {"script": SCRIPTS["transformers"], "workers": 4, "save_every": 2}
    reference, killed = start(task, out="reference", **how), start(task, failures=KILLS[:1], **how)
    assert different(completed(reference), completed(killed)) == []
