"""A snapshot that somebody replaced or relabelled, with digests that match, is not what the history says was saved."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.utils.data import TensorDataset

from finished_run import failed_checks
from holdfast.checkpoint.digest import seal
from holdfast.train import attach
from training_script import Crash

SAMPLES = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))


def train(out: Path, until: int = 12) -> list[int]:
    """Train 12 steps with a snapshot after every 4; return the steps that were trained."""
    run = attach.attach(out, save_every=4, writer="blocking")
    trained = []
    try:
        model = run.replicate(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        for batch in run.batches(SAMPLES, global_batch=4, num_epochs=3):
            if batch.step == until:
                raise Crash
            x, y = batch
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            trained.append(batch.step)
    except Crash:
        pass
    finally:
        run.close()
    return trained


def relabel(checkpoints: Path, old: int, new: int) -> None:
    """Copy the snapshot of step `old` as that of step `new`, with positions and digests that match."""
    folder = checkpoints / f"step-{new:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoints / f"step-{old:08d}", folder)
    position: dict[str, Any] = {"step": new, "epoch": new // 4, "cursor": new % 4}
    extra = json.loads((folder / "extra.json").read_bytes())
    extra["position"] |= position
    text = json.dumps(extra).encode()
    (folder / "extra.json").write_bytes(text)
    record = json.loads((folder / "manifest.json").read_bytes()) | position
    record["extra"] = {"length": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
    del record["digest"]
    (folder / "manifest.json").write_bytes(seal(record))


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda place: relabel(place, 4, 8), 4),  # it was saved, with another state
        (lambda place: relabel(place, 8, 11), 8),  # it was never reached
        (lambda place: None, 8),
    ],
)
def test_a_run_resumes_only_from_what_it_has_saved(tmp_path: Path, change: Callable[[Path], None], first: int) -> None:
    train(tmp_path, until=10)
    change(tmp_path / "checkpoints")
    assert train(tmp_path) == [*range(first, 12)]
    assert failed_checks(tmp_path) == []
