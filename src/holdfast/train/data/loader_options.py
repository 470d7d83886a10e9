"""The options that a script may pass to torch's DataLoader, and why the others are refused."""

from collections.abc import Mapping
from typing import Any

from holdfast.errors import BadInput

TAKEN = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
)
_OURS = "the run decides the order of samples"
REFUSED = {
    "batch_size": f"{_OURS}: give global_batch",
    "shuffle": f"{_OURS}, in an order that comes from the seed: leave it out, or give run.batches(..., sampler=...)",
    "sampler": "give run.batches(..., sampler=...)",
    "batch_sampler": f"{_OURS}: leave it out, or give run.batches(..., sampler=...)",
    "drop_last": "samples that do not fill a step always wait for the next epoch: leave it out",
    "in_order": "steps that overtake each other could not be resumed: leave it out",
    "generator": "the run keys every generator: give a seed",
    "collate_fn": "give run.batches(..., collate_fn=...)",
    "dataset": "give it as the first argument",
}


def checked_options(num_workers: int, dataloader_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options for the run's DataLoader, with `num_workers`; raise BadInput for options it does not allow."""
    options = dict(dataloader_options or {})
    for name in options:
        if name in REFUSED:
            raise BadInput(f"dataloader_options={{{name!r}: ...}} is not possible: {REFUSED[name]}.")
        if name not in TAKEN:
            raise BadInput(f"dataloader_options has no option {name!r}: give one of {', '.join(TAKEN)}.")
    chosen = options.pop("num_workers", num_workers)
    if num_workers and chosen != num_workers:
        raise BadInput(
            f"num_workers={num_workers} and dataloader_options={{'num_workers': {chosen}}} differ: give one of them."
        )
    if not isinstance(chosen, int) or chosen < 0:
        raise BadInput(f"num_workers must be 0 (load in the training process) or more (got {chosen}).")
    return {"num_workers": chosen, **options}
