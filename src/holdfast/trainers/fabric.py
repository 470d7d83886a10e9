"""An adapter for Lightning's Fabric: four lines of a loop differ from the plain one.

    from holdfast.trainers.fabric import attach

    fabric = L.Fabric(devices=2, strategy="ddp")
    run = attach(fabric)
    model, optimizer = fabric.setup(model, optimizer)
    run.protect(model=model, optimizer=optimizer)
    for x, y in run.batches(dataset, global_batch=64, num_epochs=3):
        ...
        fabric.backward(loss)

The loop is the script's own, as without Fabric; precision, devices and printing are Fabric's. Do not pass the loader
for training to `setup_dataloaders`: batches come from the run. To accumulate gradients use `run.batches(...,
micro_batches=4)`, and not `fabric.no_backward_sync`.
"""

from typing import Any

from holdfast.distributed import ranks
from holdfast.errors import BadInput
from holdfast.train import attach as attaching
from holdfast.train.run import Run


def attach(fabric: Any, **options: Any) -> Run:
    """Return the run this process belongs to, as `holdfast.attach` does; it replicates the models that Fabric sets up.

    Call it before `fabric.setup`. Strategies other than DDP and a single device are refused: a rank must hold the whole
    state.
    """
    strategy = fabric.strategy
    if (name := type(strategy).__name__) not in ("DDPStrategy", "SingleDeviceStrategy"):
        raise BadInput(f"a run does not support Fabric's {name}: every worker must hold the whole model. Choose ddp.")
    ranks.leave()  # Fabric may have formed a group: the run forms its own, which finds a lost peer
    run = attaching.attach(**options)
    if fabric.world_size != run.world_size:
        raise BadInput(
            f"Fabric is configured for {fabric.world_size} workers, and {run.world_size} were started: give "
            "Fabric(strategy='ddp', devices=...) the number of workers on this machine (holdfast run --workers)."
        )
    options_of_ddp = getattr(strategy, "_ddp_kwargs", {})
    strategy.setup_module = lambda module: run.replicate(module, **options_of_ddp)
    return run
