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
instead of `fabric.no_backward_sync`.
"""

from typing import Any

from holdfast.distributed import ranks
from holdfast.errors import BadInput
from holdfast.train import attach as attaching
from holdfast.train.run import Run


def attach(fabric: Any, **options: Any) -> Run:
    """Return the run of this process, as `holdfast.attach` does; the run replicates the models that Fabric sets up.

    Call this function before `fabric.setup`. `options` are those of `holdfast.attach`. Raise BadInput for strategies
    other than DDP and a single device, because every rank must hold the whole state."""
    strategy = fabric.strategy
    if (name := type(strategy).__name__) not in ("DDPStrategy", "SingleDeviceStrategy"):
        raise BadInput(f"a run does not support Fabric's {name}: every worker must hold the whole model. Choose ddp.")
    ranks.leave()  # Fabric may have formed a process group; the run forms its own, which detects a lost peer
    run = attaching.attach(**options)
    if fabric.world_size != run.world_size:
        raise BadInput(
            f"Fabric is configured for {fabric.world_size} workers, and {run.world_size} were started: give "
            "Fabric(strategy='ddp', devices=...) the number of workers on this machine (holdfast run --workers)."
        )
    options_of_ddp = getattr(strategy, "_ddp_kwargs", {})
    strategy.setup_module = lambda module: run.replicate(module, **options_of_ddp)
    return run
