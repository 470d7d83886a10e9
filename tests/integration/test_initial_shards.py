"""Sharded models start from the weights of other programs and of other runs: each rank reads its own rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from finished_run import events, failed_checks
from holdfast.runs.config import WeightsSource
from holdfast.weights.export import export
from supervisor_process import SUPPORT, RunScript, Start, Supervisor

HOW: dict[str, Any] = {"script": SUPPORT / "fsdp_script.py", "save_every": 5, "workers": 2, "keep_last": 9}
PLACES = ("torchtitan/step-1", "accelerate", "accelerate/pytorch_model_fsdp_0", "w.safetensors", "hf", "dcp", "w.pt")


@pytest.fixture(scope="module")
def weights(run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of one model, as three ranks save them with DCP, and in every other format."""
    folder = tmp_path_factory.mktemp("weights")
    run_script("dcp_folders.py", folder)
    assert len([*(folder / "torchtitan" / "step-1").glob("*.distcp")]) == 3
    expected = torch.load(folder / "expected.pt", weights_only=True)
    for name in ("w.safetensors", "dcp", "w.pt"):
        export(expected, str(folder / name))
    export(expected, str(folder / "hf"), shard_size="1KB")
    return folder


def completed(job: Supervisor) -> Path:
    result = job.result()
    assert result.get("verdict") == "completed", (result, job.stderr)
    assert failed_checks(job.out) == []
    return job.out


def source(place: Path, **how: Any) -> dict[str, Any]:
    return WeightsSource(place=str(place), **how).to_json()


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("place", PLACES)
def test_a_sharded_model_starts_with_the_bits_of_its_source(start: Start, weights: Path, place: str) -> None:
    out = completed(start({"epochs": 1}, source=source(weights / place), **HOW))
    assert_same(dict(hf.load(out, step=0, name="model")), torch.load(weights / "expected.pt", weights_only=True))
    assert len({event.what.weights for event in events(out, "recover")}) == 1


def test_a_run_starts_from_the_sharded_model_and_optimizer_of_another(start: Start, weights: Path) -> None:
    before = completed(start({"epochs": 1}, out="before", **{**HOW, "workers": 3}))
    out = completed(start({"epochs": 1}, source=source(before, take=("model", "optimizer")), **HOW))
    assert_same(dict(hf.load(out, step=0, name="model")), dict(hf.load(before, name="model")))
    first, last = (hf.load(run, step=step, name="optimizer") for run, step in ((out, 0), (before, None)))
    assert first["state"].keys() == last["state"].keys() != set()
    for number, moments in first["state"].items():
        assert_same(moments, last["state"][number])


def test_weights_of_another_model_are_refused_in_one_line(start: Start, weights: Path) -> None:
    result = start({"batch_norm": True}, source=source(weights / "torchtitan" / "step-1"), **HOW).result()
    assert result["verdict"] == "refused"
    assert "torchtitan/step-1 do not match model (1.weight is missing; 1.bias is missing;" in result["because"]
    assert "\n" not in result["because"]
