"""Lightning's ModelParallelStrategy, of the Trainer and of Fabric: models that are sharded with FSDP2 over all workers."""

from typing import Any


def is_model_parallel(strategy: Any) -> bool:
    """Return True if a strategy of Lightning or Fabric leaves it to the script to shard its model."""
    return type(strategy).__name__ == "ModelParallelStrategy"


def is_tensor_parallel(strategy: Any) -> bool:
    """Return True if the strategy has groups of workers that train the same samples together.

    By default, all workers of a node are one such group."""
    if not is_model_parallel(strategy):
        return False
    size = strategy._tensor_parallel_size
    return bool((strategy.num_processes if size == "auto" else size) > 1)


def renew_mesh(strategy: Any) -> None:
    """Replace the device mesh of the strategy, if it has one, by a mesh over the present process group."""
    from torch.distributed.device_mesh import init_device_mesh  # a slow import

    if (mesh := strategy._device_mesh) is not None:
        strategy._device_mesh = init_device_mesh(
            mesh.device_type, tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names
        )
