"""What bits depend on beside the state is compared where a run goes on."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.errors import BadInput
from holdfast.train import attach
from training_script import Crash


def data(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator))


def train(out: Path, samples: TensorDataset, *, until: int = 12, unfreezes: bool = False) -> None:
    run = attach.attach(out, save_every=4, writer="blocking")
    try:
        model = run.replicate(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))
        optimizer = torch.optim.SGD(model[-1].parameters() if unfreezes else model.parameters(), lr=0.1)  # type: ignore[index]
        run.protect(model=model, optimizer=optimizer)
        with suppress(Crash):
            for batch in run.batches(samples, global_batch=4, num_epochs=3):
                if batch.step == until:
                    raise Crash
                if unfreezes and batch.step == 5:
                    optimizer.add_param_group({"params": model[0].parameters()})  # type: ignore[index]
                x, y = batch
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        run.close()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_other_samples_are_refused_before_they_are_trained_on(tmp_path: Path) -> None:
    train(tmp_path, data(), until=6)
    with pytest.raises(BadInput, match=r"holds other samples than when this run was saved. A split or shuffle before"):
        train(tmp_path, data(seed=2))
    train(tmp_path, data())


@pytest.mark.parametrize("number", [1, 2])
def test_another_number_of_threads_is_told(
    tmp_path: Path, threads: None, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    torch.set_num_threads(1)
    train(tmp_path, data(), until=6)
    torch.set_num_threads(number)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, data())
    assert ("trained with 1 threads per worker and resumes with 2" in caplog.text) is (number == 2)


def test_groups_of_an_optimizer_that_come_later_are_refused_when_they_are_first_saved(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"optimizer has groups of \[2, 2\] parameters, and had \[2\] when it was prot"):
        train(tmp_path, data(), unfreezes=True)
