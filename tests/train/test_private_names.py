"""The private names of torch, numpy and Python that holdfast uses: a new release may rename or remove any of them."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d  # type: ignore[attr-defined]  # public
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

HASH_STORE = dist.HashStore()  # type: ignore[attr-defined]  # public


@pytest.fixture(scope="module")
def ddp() -> DistributedDataParallel:
    group = dist.ProcessGroupGloo(HASH_STORE, 0, 1)  # type: ignore[attr-defined]  # public
    process_group = ProcessGroup(0, 1)  # type: ignore[call-arg]
    process_group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, group)
    return DistributedDataParallel(nn.Linear(1, 1), process_group=process_group)


REDUCER = (
    "prepare_for_forward",
    "prepare_for_backward",
    "_push_all_rebuilt_params",
    "_rebuild_buckets",
    "_get_zeros_like_grad_buckets",
)
DDP = (
    "modules_buffers",
    "require_forward_param_sync",
    "require_backward_grad_sync",
    "_build_params_for_reducer",
    "_delay_all_reduce_all_params",
    "_get_active_ddp_module",
    "_has_rebuilt_buckets",
    "_join_config",
    "_lazy_init_ran",
    "_sync_buffers",
)
OTHERS: list[tuple[object, str, str]] = [
    (distributed_c10d._world, "pg_map", "distributed/process_group.py lists the groups of a script with it"),
    (ProcessGroup, "_get_sequence_number_for_group", "distributed/process_group.py sees use of a group by it"),
    (dist.ProcessGroupGloo, "_set_default_timeout", "distributed/gloo_link.py turns timeouts off with it"),  # type: ignore[attr-defined]
    (torch, "_foreach_copy_", "live/state_transfer.py and checkpoint/device.py copy many tensors with it"),
    (FSDPModule, "_get_fsdp_state", "train/sharded.py recognises modules that are sharded together by it"),
    (torch.utils._pytree, "tree_flatten", "train/evaluation.py takes nested values apart with it"),
    (random, "_inst", "train/state/rng.py keys Python's generator with it"),
    (np.random.mtrand, "_rand", "train/observe/script_state.py recognises numpy's generator by it"),
    (nn.Linear(1, 1), "_parameters", "train/observe/script_state.py searches modules by it"),
    (nn.Linear(1, 1), "_buffers", "train/observe/script_state.py searches modules by it"),
    (
        nn.Linear(1, 1),
        "_modules",
        "train/observe/script_state.py and train/replicate.py find a module's children by it",
    ),
]


@pytest.mark.parametrize("name", DDP)
def test_ddp_has_the_attributes_that_replicate_uses(ddp: DistributedDataParallel, name: str) -> None:
    assert hasattr(ddp, name), (
        f"torch {torch.__version__} has no DistributedDataParallel.{name}: adapt train/replicate.py."
    )


@pytest.mark.parametrize("name", REDUCER)
def test_the_reducer_has_the_methods_that_replicate_uses(ddp: DistributedDataParallel, name: str) -> None:
    assert hasattr(ddp.reducer, name), f"torch {torch.__version__} has no Reducer.{name}: adapt train/replicate.py."


@pytest.mark.parametrize(("owner", "name", "use"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_other_private_names_exist(owner: object, name: str, use: str) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} (torch {torch.__version__}, numpy {np.__version__}): {use}."


def test_tensor_backward_looks_up_torch_autograd_backward_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live recovery replaces torch.autograd.backward (live/backward_guard.py) and must see every backward of a script."""
    calls: list[object] = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **options: calls.append(args))
    torch.ones(1, requires_grad=True).sum().backward()
    assert len(calls) == 1
