"""The weight of each worker's gradients in a step, if workers were lost during the step's backward pass. No I/O.

The gradient of a step is a weighted sum of the workers' gradients. Each is a mean over that worker's samples, and its
weight is proportional to their number. Gradients are summed bucket by bucket during backward. So at a failure some
buckets are complete (summed over all workers, including the lost workers), and the other buckets are not. The
simulation and live recovery both use these functions.
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
    """Return each worker's weight in the sum of one bucket of gradients; None if the bucket is left out of the step.

    `samples` are the numbers of samples by worker, `casualties` the lost workers. `completed` is True if the bucket was
    summed before the loss. The result depends on `strategy`:

    - `replay`: the exact step. Gradients of lost workers are computed again, so the weights are the normal ones.
    - `forward`: a completed bucket is kept, with the lost workers' gradients. A bucket that is not completed is summed
      over the survivors, each weighted by its share of the survivors' samples. If they have none, it is left out.
    - `skip`: the whole step is dropped, so every bucket is left out, even if it was completed.

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
