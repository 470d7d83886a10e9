"""An adapter for Lightning Fabric; a training script needs four more lines.

    from holdfast.trainers.fabric import attach

    fabric = L.Fabric(devices=2, strategy="ddp")
    run = attach(fabric)
    model, optimizer = fabric.setup(model, optimizer)
    run.protect(model=model, optimizer=optimizer)
    for x, y in run.batches(dataset, global_batch=64, num_epochs=3):
        ...
        fabric.backward(loss)

The script keeps its own loop, and Fabric provides precision, devices and printing. Do not pass the training loader to
`setup_dataloaders`, because batches come from the run. To accumulate gradients use `run.batches(..., micro_batches=4)`
instead of `fabric.no_backward_sync`. docs/sharded.md describes models that are sharded, with ModelParallelStrategy.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from holdfast.distributed import ranks
from holdfast.errors import BadInput
from holdfast.train import attach as attaching
from holdfast.train.run import Run
from holdfast.trainers.model_parallel import is_model_parallel, is_tensor_parallel, renew_mesh


def attach(fabric: Any, **options: Any) -> Run:
    """Return the run that this process belongs to, as `holdfast.attach` does, for a script with Lightning Fabric.

    Call this function before `fabric.setup`. The `options` are the parameters of `holdfast.attach`. The run wraps
    each model that Fabric sets up, as `run.replicate` does. With Fabric's ModelParallelStrategy, the script shards its
    models instead. If Fabric has any strategy other than DDP, ModelParallelStrategy and a single device, this function
    raises `holdfast.BadInput`."""
    strategy = fabric.strategy
    _check_strategy(strategy)
    ranks.leave()  # Fabric may have formed a process group; the run forms its own, which detects a lost peer
    run = attaching.attach(**options)
    if fabric.world_size != run.world_size:
        raise BadInput(
            f"Fabric is configured for {fabric.world_size} workers, and {run.world_size} were started: give "
            "Fabric(strategy='ddp', devices=...) the number of workers on this machine (holdfast run --workers)."
        )
    if is_model_parallel(strategy):
        renew_mesh(strategy)
        if run.world_size > 1:
            strategy.setup_module = functools.partial(_set_up_sharded, strategy.setup_module)
        return run
    options_of_ddp = getattr(strategy, "_ddp_kwargs", {})
    strategy.setup_module = lambda module: run.replicate(module, **options_of_ddp)
    return run


def _check_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if name not in ("DDPStrategy", "SingleDeviceStrategy") and not is_model_parallel(strategy):
        raise BadInput(
            f"a run does not support Fabric's {name}: its state cannot be saved. Choose ddp, or ModelParallelStrategy for a "
            "sharded model."
        )
    if is_tensor_parallel(strategy):
        raise BadInput(
            "a run on Fabric does not support tensor parallelism, because workers train different samples: give "
            "ModelParallelStrategy tensor_parallel_size=1 and data_parallel_size, the number of workers."
        )


def _set_up_sharded(set_up: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    from holdfast.train.sharded import check_all_sharded  # a slow import

    model = set_up(module)
    check_all_sharded(model)
    return model
