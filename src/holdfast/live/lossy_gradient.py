"""The weight of each worker's gradients in a step during whose backward workers were lost. No I/O.

The gradient of a step is the sum of the workers' gradients, each a mean over that worker's samples and weighted by
their number. Gradients are summed bucket by bucket during backward. So a failure finds some buckets complete (summed
over all workers, the lost ones included) and others not. The simulation and live recovery both use these functions.
"""

from collections.abc import Collection, Sequence
from typing import TypeAlias

from holdfast.errors import BadInput

Weights: TypeAlias = tuple[float, ...]  # the factor for each worker's gradient before the sum
STRATEGIES = ("replay", "forward", "skip")


def normal(samples: Sequence[int]) -> Weights:
    """Return the weights of a step without a failure: each worker's number of samples divided by the total."""
    total = sum(samples)
    return tuple(count / total for count in samples)


def weights(strategy: str, *, completed: bool, samples: Sequence[int], casualties: Collection[int]) -> Weights | None:
    """Return each worker's weight in the sum of one bucket; None if the bucket contributes nothing to the step.

    `samples` are the numbers of samples by worker, `casualties` the lost workers. `completed` is True if the bucket was
    summed before the loss. The result depends on `strategy`:

    - `replay`: the exact step. Gradients of lost workers are computed again, so the weights are the normal ones.
    - `forward`: a completed bucket is kept, with the lost workers' gradients. Any other is summed over the survivors,
      weighted by their samples over the survivors' samples; if no survivor has a sample, it contributes nothing.
    - `skip`: the whole step is dropped, completed buckets too.

    Without casualties every strategy gives the normal weights."""
    if strategy not in STRATEGIES:
        raise BadInput(f"There is no strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}.")
    if not samples or min(samples) < 0 or not any(samples):
        raise BadInput(f"A step of {list(samples)} samples trains nothing: give a worker 1 or more.")
    lost = frozenset(casualties)
    if strangers := lost - frozenset(range(len(samples))):
        raise BadInput(f"Worker {min(strangers)} cannot be lost: there are workers 0 to {len(samples) - 1}.")
    if strategy == "forward" and len(lost) == len(samples):
        raise BadInput(f"forward needs a survivor, and all {len(samples)} workers are lost: choose restart.")
    if not lost or strategy == "replay" or (strategy == "forward" and completed):
        return normal(samples)
    if strategy == "skip":
        return None
    left = [0 if worker in lost else count for worker, count in enumerate(samples)]
    return normal(left) if any(left) else None
