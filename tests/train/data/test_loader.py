"""Shares are loaded as the geometry says, under a key of their own, whoever loads them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, default_collate, get_worker_info

from holdfast.errors import BadInput
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan
from holdfast.train.data import loader as loading
from holdfast.train.data import phases as requesting
from holdfast.train.data.loader import ShareDataset, checked_options
from holdfast.train.data.phases import requests


class Drawn:
    """A dataset whose samples are their number and whatever the generator draws."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


GEOMETRY = SamplePlan(samples=50, batch=10, epochs=2, seed=3)


def loaded(dataset: Any = None, *, workers: int = 0, parts: int = 1, start: int = 0) -> list[list[Any]]:
    shares = ShareDataset(dataset or Drawn(50), parts, default_collate)
    several = loading.load(shares, requests(GEOMETRY, start, 1, 3), workers)
    return [[[column.tolist() for column in part] for part in parts] for _, parts in several]


@given(start=st.integers(0, 9), world=st.integers(1, 10), chunk=st.sampled_from([1, 30, 1000]))
def test_every_rank_requests_its_share_of_every_window(start: int, world: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requesting, "CHUNK", chunk)
        ranks = [list(requests(GEOMETRY, start, rank, world)) for rank in range(world)]
    for step, shares in enumerate(zip(*ranks, strict=True), start):
        at = GEOMETRY.position(step)
        for rank, share in enumerate(shares):
            assert np.array_equal(share.ids, GEOMETRY.share(at, rank, world))
            assert share.samples == Samples.of(share.ids)
        assert len({share.key for share in shares}) == world
    assert len(ranks[0]) == GEOMETRY.steps - start


def test_to_go_on_anywhere_costs_the_window_and_not_the_epoch() -> None:
    huge = SamplePlan(samples=10**9, batch=64, epochs=3)
    start = 2 * huge.steps_per_epoch - 1
    first = next(requests(huge, start, 0, 4))
    assert np.array_equal(first.ids, huge.share(huge.position(start), 0, 4))


def test_random_numbers_are_the_same_in_this_process_in_others_in_parts_and_after_a_resume() -> None:
    here = loaded()
    assert loaded(workers=2) == here
    assert loaded(start=4) == here[4:]
    joined = [[[*first, *second] for first, second in zip(*parts, strict=True)] for parts in loaded(parts=2)]
    assert joined == [parts[0] for parts in here]


def test_training_draws_the_same_whether_it_was_loaded_here_or_in_other_processes() -> None:
    """The dataset draws too, and training goes on from where it stopped."""

    def drawn(dataset: Any, workers: int) -> list[float]:
        several = loading.load(ShareDataset(dataset, 1, default_collate), requests(GEOMETRY, 0, 0, 2), workers)
        return [random.random() + float(np.random.random()) + float(torch.rand(())) for _ in several]

    for dataset in (Drawn(50), list(range(50))):
        assert drawn(dataset, workers=2) == drawn(dataset, workers=0)
    assert drawn(Drawn(50), workers=0) != drawn(list(range(50)), workers=0)


def test_a_dataset_that_gives_several_samples_at_once_is_asked_for_them() -> None:
    asked: list[list[int]] = []

    class Several(Subset[Any]):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return super().__getitems__(indices)

    assert loaded(Several(Drawn(50), range(50))) == loaded()  # type: ignore[arg-type]
    assert [len(each) for each in asked] == [3] * GEOMETRY.steps


@given(count=st.integers(1, 99), parts=st.integers(1, 20))
def test_parts_are_contiguous_and_differ_by_at_most_one(count: int, parts: int) -> None:
    ranges = loading.divided(count, parts)
    assert [index for part in ranges for index in part] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert len(ranges) == parts


def seen_by_init(_: int) -> None:
    random.seed(5)  # harmless: every share is loaded under its own key
    info = get_worker_info()
    assert isinstance(info.dataset, Drawn)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "worker_init_fn": seen_by_init},
        {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60},
        {"num_workers": 0, "pin_memory": False},
    ],
)
def test_options_of_the_loader_change_nothing_that_is_loaded(options: dict[str, Any]) -> None:
    shares = ShareDataset(Drawn(50), 1, default_collate)
    several = loading.load(shares, requests(GEOMETRY, 0, 1, 3), **checked_options(0, options))
    assert [[[column.tolist() for column in part] for part in parts] for _, parts in several] == loaded()


@pytest.mark.parametrize(
    ("workers", "loader", "line"),
    [
        (0, {"shuffle": True}, "in an order that comes from the seed"),
        (0, {"batch_size": 4}, "give global_batch"),
        (0, {"collate_fn": list}, "collate_fn="),
        (0, {"nothing": 1}, "no option 'nothing'"),
        (2, {"num_workers": 3}, "differ: give one of them"),
        (0, {"num_workers": -1}, "num_workers must be 0 .* or more"),
    ],
)
def test_options_that_would_change_the_samples_are_refused(workers: int, loader: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        checked_options(workers, loader)


def test_options_that_torch_refuses_are_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="refuses the options of the run: prefetch_factor"):
        loading.load(ShareDataset(Drawn(50), 1, default_collate), iter(()), 0, prefetch_factor=2)
