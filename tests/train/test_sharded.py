"""Sharded models: meshes, how many gradient reductions a backward has, and what cannot be sharded or weighted."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from attached_runs import attach
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure
from holdfast.train.inject import Injection
from holdfast.train.sharded import ShardedModels, backend_of_dims, check_all_sharded, make_mesh
from holdfast.train.state.protect_checks import check_one_split
from holdfast.train.state.protected import Protected


def of_ranks(size: int) -> Iterator[Ranks]:
    """The first of several ranks, of which the others do not exist: its collectives do nothing."""
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    yield Ranks(rank=0, size=size, store=store, grouped=True, device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield from of_ranks(8)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    for _ in of_ranks(2):
        yield init_device_mesh("cpu", (2,))


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


@pytest.mark.parametrize(
    ("replicas", "tensor_parallel", "dims"),
    [
        (1, 1, {"shard": 8}),
        (2, 1, {"replicate": 2, "shard": 4}),
        (1, 2, {"shard": 4, "tensor": 2}),
        (1, 8, {"shard": 1, "tensor": 8}),
        (2, 2, {"replicate": 2, "shard": 2, "tensor": 2}),
    ],
)
def test_the_dimensions_of_a_mesh(ranks: Ranks, replicas: int, tensor_parallel: int, dims: dict[str, int]) -> None:
    mesh = make_mesh(ranks, replicas, tensor_parallel)
    assert dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) == dims
    assert mesh.mesh.flatten().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cuda", "gloo", {"replicate": "gloo", "shard": "gloo"}),  # ranks that share a GPU
        ("cuda", "cpu:gloo,cuda:nccl", None),
        ("cuda", "holdfast_sharded", None),  # the group of a live recovery, which new groups must use, too
        ("cpu", "gloo", None),
    ],
)
def test_the_groups_of_a_mesh_use_gloo_where_ranks_share_a_gpu(
    device: str, backend: str, expected: dict[str, str] | None
) -> None:
    assert backend_of_dims(torch.device(device), backend, ("replicate", "shard")) == expected


@pytest.mark.parametrize(
    ("replicas", "tensor_parallel", "message"),
    [
        (1, 3, "8 ranks cannot be divided into tensor-parallel groups of 3: start a multiple of 3 workers"),
        (1, 0, "8 ranks cannot be divided into tensor-parallel groups of 0"),
        (3, 1, "8 ranks cannot be divided into 3 replicas of the model: choose a number that divides 8"),
        (8, 2, "4 tensor-parallel groups of 2 ranks cannot be divided into 8 replicas of the model"),
    ],
)
def test_ranks_that_cannot_be_divided(ranks: Ranks, replicas: int, tensor_parallel: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_mesh(ranks, replicas, tensor_parallel)


def test_a_run_has_tensor_parallel_groups_of_one_size_which_it_knows_before_it_protects() -> None:
    run, late = attach(), attach()
    late.protect(model=nn.Linear(2, 2))
    for ranks in of_ranks(8):
        run._session.ranks, late._session.ranks = ranks, replace(ranks)
        run.device_mesh(tensor_parallel=2)
        assert (run._session.ranks.share, run._session.ranks.shares) == (0, 4)
        assert run.mesh.shape == (8,)  # for another model
        run.device_mesh(tensor_parallel=2)
        with pytest.raises(BadInput, match="this run has a mesh with tensor_parallel=2, and 4 would divide"):
            run.device_mesh(tensor_parallel=4)
        with pytest.raises(BadInput, match=r"comes after run\.protect, which restores by it: make the mesh first"):
            late.device_mesh(tensor_parallel=2)


def test_tensor_parallelism_on_a_mesh_that_the_run_did_not_make(ranks: Ranks) -> None:
    mesh = make_mesh(ranks, 1, 2)
    model = nn.Sequential(nn.Linear(4, 16))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    check_one_split(Protected({"model": model}))
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(BadInput, match=r"^0\.weight is sharded along two dimensions .*\(tensor_parallel=N\)\.$"):
        check_one_split(Protected({"model": model}))


def test_gradients_of_replicas_on_one_rank_each_cannot_be_weighted(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=make_mesh(ranks, 8, 1))
    assert reductions(model) == []  # FSDP does not call what would weight them
    with pytest.raises(BadInput, match="each replica is on one rank, where FSDP cannot weight its gradients"):
        ShardedModels([model]).set_weight(0.5)


def test_a_failure_within_a_backward_that_reduces_no_shards_is_refused(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=make_mesh(ranks, 1, 8)["shard"])
    injection = Injection([Failure(step=3, kind="kill", point="backward=0.5", targets=(0,))], 0, 1, (), None)
    with pytest.raises(BadInput, match=r"No failure can strike at backward=0\.5: no model is replicated"):
        injection.watch([], [], ShardedModels([model]))
