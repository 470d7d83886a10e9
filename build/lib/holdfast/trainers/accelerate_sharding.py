"""FSDP2 in Hugging Face's Trainer: checks of its sharding settings, and preparation of Accelerate for a run."""

from collections.abc import Iterator
from typing import Any

from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState

FSDP2 = 2


def is_sharded(trainer: Any) -> bool:
    """Return True if the Trainer shards its model over the workers, with `fsdp=True` or Accelerate's own settings."""
    return bool(trainer.is_fsdp_enabled or trainer.args.fsdp)


def unsupported_sharding(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield (option, reason) for options of the Trainer that shard its model in a way that a run does not support."""
    args = trainer.args
    if is_sharded(trainer) and _version(trainer) != FSDP2:
        yield f"fsdp of version {_version(trainer)}", "its shards cannot be saved; give fsdp_config={'version': 2}"
    config = args.parallelism_config
    if config is not None and not (is_sharded(trainer) and config.total_size == config.data_parallel_size):
        yield (
            "parallelism_config",
            "every worker trains samples of its own; give it dp_replicate_size and dp_shard_size, with fsdp=True",
        )


def enable_sharding(trainer: Any) -> None:
    """Prepare Accelerate to shard the model over the present process group, which is newer than Accelerate's own.

    Accelerate ignores `fsdp` on CPUs and would train the whole model on every worker. FSDP2 works on CPUs, so this
    function turns it on."""
    state, config = trainer.accelerator.state, trainer.accelerator.parallelism_config
    if not trainer.is_fsdp_enabled:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True
    if config is not None:
        config.device_mesh = None
        state.device_mesh = config.get_device_mesh(trainer.accelerator.device.type)


def _version(trainer: Any) -> int:
    if trainer.is_fsdp_enabled:
        return int(trainer.accelerator.state.fsdp_plugin.fsdp_version)
    return int(trainer.args.fsdp_plugin_args["fsdp_version"])
