"""After a power cut at any commit, what the disk has of a run goes on to its end, and its audit passes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import power_cut
from holdfast.audit.verdicts import audit_run, worst
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.train.attach import attach

STEPS = 12


def train(out: Path) -> None:
    torch.seed()  # the seed of an earlier test must not become the seed of this run
    run = attach(out, save_every=4, writer="blocking")
    model = run.replicate(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    data = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    for (x,) in run.batches(data, global_batch=4, num_epochs=STEPS // 4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def commits(calls: list[power_cut.Call]) -> list[int]:
    """The calls after which a snapshot's name is on the disk: the folder of its manifest was synced."""
    named = [i for i, (name, args) in enumerate(calls) if name == "link" and args[-1].endswith("manifest.json")]
    return [next(i for i in range(at, len(calls)) if calls[i][0] == "fsync") for at in named]


@pytest.mark.parametrize("kept", power_cut.KEPT)
def test_a_run_whose_power_was_cut_after_a_commit_goes_on_and_passes_its_audit(tmp_path: Path, kept: str) -> None:
    calls: list[power_cut.Call] = []
    whole = tmp_path / "whole"
    whole.mkdir()
    with power_cut.recorded(whole, calls):
        train(whole)
    places = commits(calls)
    assert len(places) == 4  # steps 0, 4, 8 and the end
    disk, done = power_cut.Disk(), 0
    for number, place in enumerate(places):
        for call in calls[done : place + 1]:
            disk.apply(call)
        done = place + 1
        left = tmp_path / f"left-{number}"
        disk.left(kept, left)
        assert snapshot.newest(DirectoryStore(left / "checkpoints")).step == number * 4
        train(left)
        findings = audit_run(left)
        assert worst(findings) == "pass", (number, findings)


def test_the_same_check_catches_a_commit_that_does_not_wait_for_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.history.log.HistoryWriter.sync", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_run_whose_power_was_cut_after_a_commit_goes_on_and_passes_its_audit(tmp_path, "synced")
