"""Sharded models: how many gradient reductions a backward has, and models of which a part is not sharded."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.errors import BadInput
from holdfast.train.sharded import ShardedModels, check_all_sharded


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which the other one does not exist: its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def reductions(model: nn.Module) -> list[tuple[int, int]]:
    """Return what is reported in two backward passes: the reductions that were started so far, and the number of all."""
    posted: list[tuple[int, int]] = []
    ShardedModels([model]).watch_backward(lambda works, count: posted.append((len(works), count)))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return posted


def test_modules_that_are_sharded_together_are_reduced_together(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([model[0], model[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert reductions(model) == [(0, 2), (1, 2), (2, 2)] * 2


def test_frozen_modules_are_not_reduced(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0].requires_grad_(False), mesh=mesh)
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert reductions(model) == [(0, 2), (1, 2), (2, 2)] * 2


def test_a_model_of_which_a_part_is_not_sharded() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BadInput, match=r"^2 trained parameters are not sharded \(0\.weight; 0\.bias\), so"):
        check_all_sharded(nn.Sequential(nn.Linear(2, 2), frozen))
