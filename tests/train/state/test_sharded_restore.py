"""A run of a sharded model continues with the same bits, also where its snapshots or its script are in the way."""

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from holdfast.audit.verdicts import audit_run, worst
from holdfast.checkpoint import payload, shard_file
from holdfast.errors import StorageFailed
from holdfast.train import attach
from snapshots import same
from training_script import Crash

EPOCHS, STEPS = 3, 4  # steps of an epoch


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(out: Path, *, until: int = EPOCHS * STEPS, changes: bool = False) -> dict[str, torch.Tensor]:
    """Train a sharded model up to step `until`, and return its parameters and moments.

    If it `changes`, the script changes its weights before each epoch."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator))
    run = attach.attach(out, save_every=2, writer="blocking", seed=5)
    try:
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.1), nn.Linear(5, 1))
        fully_shard(model, mesh=run.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.protect(model=model, optimizer=optimizer)
        with suppress(Crash):
            for epoch in run.epochs(data, global_batch=4, num_epochs=EPOCHS):
                if changes:
                    with torch.no_grad():
                        model[0].weight.mul_(0.9)
                for batch in epoch:
                    if batch.step == until:
                        raise Crash
                    x, y = batch
                    (model(x) - y).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        state = {**model.state_dict(), **{f"{n}": s["exp_avg"] for n, s in optimizer.state_dict()["state"].items()}}
        return {name: value.full_tensor() for name, value in state.items()}
    finally:
        run.close()


def shards(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoints/step-*/shard-*"))


def test_a_sharded_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    expected = train(tmp_path / "a")
    train(tmp_path / "b", until=5)
    assert same(train(tmp_path / "b"), expected)


@pytest.mark.parametrize("until", [5, 7, 9])
def test_what_a_script_changes_before_an_epoch_is_not_changed_twice(tmp_path: Path, until: int) -> None:
    expected = train(tmp_path / "a", changes=True)
    train(tmp_path / "b", until=until, changes=True)
    assert same(train(tmp_path / "b", changes=True), expected)


def test_a_run_whose_snapshots_are_all_damaged_starts_again_with_its_first_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (payload, shard_file):
        monkeypatch.setattr(module, "CHUNK", 256)
    monkeypatch.setattr(shard_file, "SEGMENT", 256)
    expected = train(tmp_path / "a")
    train(tmp_path / "b", until=7)
    assert len(shards(tmp_path / "b")) == 2
    for path in shards(tmp_path / "b"):
        content = bytearray(path.read_bytes())
        digests = math.ceil(len(content) / (256 + payload.DIGEST_BYTES)) * payload.DIGEST_BYTES
        content[-digests - 1] ^= 1  # in the last chunk of values, so that others were read by then
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING), pytest.raises(StorageFailed, match="starts at step 0"):
        train(tmp_path / "b")
    assert "training starts again at step 0" in caplog.text
    assert same(train(tmp_path / "b"), expected)
    assert worst(audit_run(tmp_path / "b")) == "pass"
