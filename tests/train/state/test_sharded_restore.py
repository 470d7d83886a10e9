"""A run of a sharded model continues with the same bits, also where its snapshots or its script are in the way."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from finished_run import events
from holdfast.audit.verdicts import audit_run, worst
from holdfast.checkpoint import payload, shard_file
from holdfast.checkpoint.digest import seal
from holdfast.errors import InitialWeightsLost
from holdfast.train import attach
from snapshots import same
from training_script import Crash

EPOCHS, STEPS = 3, 4  # steps of an epoch
SHARD = "shard-00000-of-00001.safetensors"


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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The state of a model that was trained without an interruption."""
    return train(tmp_path_factory.mktemp("uninterrupted"))


def shards(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoints/step-*/shard-*"))


def test_a_sharded_run_continues_with_the_same_bits(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    train(tmp_path / "b", until=5)
    assert same(train(tmp_path / "b"), uninterrupted)


@pytest.mark.parametrize("until", [5, 7, 9])
def test_what_a_script_changes_before_an_epoch_is_not_changed_twice(tmp_path: Path, until: int) -> None:
    expected = train(tmp_path / "a", changes=True)
    train(tmp_path / "b", until=until, changes=True)
    assert same(train(tmp_path / "b", changes=True), expected)


# What may have happened to the newest snapshot, whose folder is named.


def missing(newest: Path) -> None:
    (newest / SHARD).unlink()


def truncated(newest: Path) -> None:
    os.truncate(newest / SHARD, 900)


def enlarged(newest: Path) -> None:
    os.truncate(newest / SHARD, 20 << 30)


def of_another_step(newest: Path) -> None:
    shutil.copy(newest.with_name("step-00000004") / SHARD, newest / SHARD)


def of_another_run(newest: Path) -> None:
    shutil.copy(strangers(newest) / SHARD, newest / SHARD)


def all_of_another_run(newest: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(strangers(newest), newest)


def pipe(newest: Path) -> None:
    missing(newest)
    os.mkfifo(newest / SHARD)


def folder(newest: Path) -> None:
    missing(newest)
    (newest / SHARD).mkdir()


def a_rank_too_many(newest: Path) -> None:
    sealed_again(newest, lambda record: record["shards"].append(record["shards"][0]))


def of_an_absurd_length(newest: Path) -> None:
    sealed_again(newest, lambda record: record["shards"][0].__setitem__(0, 1 << 62))


def strangers(newest: Path) -> Path:
    """Return the folder of the same step of a run with other weights."""
    out = newest.parents[1].with_name("other")
    if not out.exists():
        train(out, until=7, changes=True)
    return out / "checkpoints" / newest.name


def sealed_again(newest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and make its own digest match."""
    record = json.loads((newest / "manifest.json").read_bytes())
    del record["digest"]
    change(record)
    (newest / "manifest.json").write_bytes(seal(record))


HAPPENED = (missing, truncated, enlarged, of_another_step, of_another_run, all_of_another_run, pipe, folder)


@pytest.mark.parametrize("happens", [*HAPPENED, a_rank_too_many, of_an_absurd_length])
def test_if_the_newest_snapshot_cannot_be_used_the_run_continues_exactly_from_the_one_before(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    uninterrupted: dict[str, torch.Tensor],
    happens: Callable[[Path], None],
) -> None:
    train(tmp_path / "b", until=7)
    happens(tmp_path / "b" / "checkpoints" / "step-00000006")
    with caplog.at_level(logging.WARNING):
        assert same(train(tmp_path / "b"), uninterrupted)
    (line,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert line.startswith("passed over the snapshot of step 6: ")
    assert "\n" not in line
    restored = [event.what.restored for event in events(tmp_path / "b", "recover")]
    assert restored == [None, 4]
    assert worst(audit_run(tmp_path / "b")) == "pass"


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
    with caplog.at_level(logging.WARNING), pytest.raises(InitialWeightsLost, match="starts at step 0"):
        train(tmp_path / "b")
    assert "training starts again at step 0" in caplog.text
    assert same(train(tmp_path / "b"), expected)
    assert worst(audit_run(tmp_path / "b")) == "pass"
