"""Runs that a test attaches in its own process, one after another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as TorchIterator
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter as StatefulIterator

from holdfast.train import attach as module
from holdfast.train.run import Run
from training_script import Task, train

TASK = Task(epochs=3)  # 18 steps
attached: list[Run] = []
loaders: WeakSet[Any] = WeakSet()  # iterators with loader processes


def _record_loaders(kind: type[Any]) -> None:
    """Add every new iterator of `kind` to `loaders`."""
    construct = kind.__init__

    def constructed(self: Any, *arguments: Any) -> None:
        loaders.add(self)
        construct(self, *arguments)

    kind.__init__ = constructed


for kind in (TorchIterator, StatefulIterator):
    _record_loaders(kind)


def end_loaders() -> None:
    """End the loader processes of abandoned runs.

    The garbage collector may close the queue of such a process before it finalizes the iterator, which then waits 5 s.
    """
    for loader in list(loaders):
        loader._shutdown_workers()
    loaders.clear()


def attach(*where: Path, **options: Any) -> Run:
    """Attach one of several runs of this process."""
    end_loaders()
    attached.append(module.attach(*where, **options))
    return attached[-1]


def run_to_end(out: Path, task: Task = TASK, **options: Any) -> Path:
    """Train a whole run in this process; return its folder."""
    train(attach(out, **{"save_every": 5, **options}), task)
    return out


@pytest.fixture(autouse=True)
def close_attached_runs() -> Iterator[None]:
    """Close what a test attached: a process has one run and closes it at its end, but this process has many."""
    yield
    while attached:
        attached.pop().close()
    end_loaders()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, because sums over threads may round differently from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
