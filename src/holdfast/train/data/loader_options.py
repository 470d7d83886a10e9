"""Which options of torch's DataLoader a script may pass on, and why not the others."""

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
_OURS = "the run decides which samples come when"
REFUSED = {
    "batch_size": f"{_OURS}: give global_batch",
    "shuffle": f"{_OURS}, in an order that comes from the seed: leave it out",
    "sampler": f"{_OURS}: leave it out",
    "batch_sampler": f"{_OURS}: leave it out",
    "drop_last": "what does not fill a window always waits for the next epoch: leave it out",
    "in_order": "windows that overtake each other could not be resumed: leave it out",
    "generator": "the run keys every generator: give a seed",
    "collate_fn": "give run.batches(..., collate=...)",
    "dataset": "give it as the first argument",
}


def checked(workers: int, loader: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options for the DataLoader of a run, with how many processes load."""
    options = dict(loader or {})
    for name in options:
        if name in REFUSED:
            raise BadInput(f"loader={{{name!r}: ...}} cannot be: {REFUSED[name]}")
        if name not in TAKEN:
            raise BadInput(f"a DataLoader has no option {name!r}: there are {', '.join(TAKEN)}")
    given = options.pop("num_workers", workers)
    if workers and given != workers:
        raise BadInput(f"workers={workers} and loader={{'num_workers': {given}}} differ: give one of them")
    if not isinstance(given, int) or given < 0:
        raise BadInput(f"{given} workers cannot load anything: give 0 (load in this process) or more")
    return {"num_workers": given, **options}
