"""What the gradient of a step is once workers were lost in its backward: how much each of them counts, bucket by bucket.

A step's gradient is the sum of the workers' own gradients, each a mean over that worker's samples and weighted by them.
Gradients are summed bucket by bucket while backward goes on, so a failure finds some buckets completed (summed over
everybody, the casualties included) and the others not. The simulation and live recovery both ask here what becomes of
a bucket. Nothing here touches a tensor, a process or a clock.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from holdfast.errors import BadInput

Weights: TypeAlias = tuple[float, ...]
"""By what each worker's gradient is multiplied before the sum, in the order of the workers; 0 contributes nothing."""

STRATEGIES = ("replay", "forward", "skip")


def normal(samples: Sequence[int]) -> Weights:
    """The weights of a step in which nothing fails: each worker's samples over those of all."""
    return _over(samples, sum(samples))


def weights(strategy: str, *, completed: bool, samples: Sequence[int], casualties: Collection[int]) -> Weights | None:
    """The weights with which a bucket enters the failed step; None: it enters with nothing.

    - `replay`: the exact step. The casualties' gradients are computed again, so all count as if nothing had failed.
    - `forward`: a completed bucket is kept, casualties included. Any other is summed over the survivors, weighted by
      their samples over the survivors' samples; nobody has a gradient of it if no survivor has a sample.
    - `skip`: the whole step is dropped, completed buckets too.

    Without casualties nothing failed, and every strategy gives the normal weights.
    """
    lost = _checked(strategy, samples, casualties)
    if not lost or strategy == "replay" or (strategy == "forward" and completed):
        return normal(samples)
    if strategy == "skip":
        return None
    left = [0 if worker in lost else count for worker, count in enumerate(samples)]
    return _over(left, sum(left)) if any(left) else None


def missing(
    strategy: str, *, completed: Iterable[bool], samples: Sequence[int], casualties: Collection[int]
) -> tuple[int, ...]:
    """The workers whose samples the step lacks, in some bucket or in all: those that a run must declare as lost."""
    found = [weights(strategy, completed=each, samples=samples, casualties=casualties) for each in completed]
    return tuple(
        worker for worker, count in enumerate(samples) if count and not all(each and each[worker] for each in found)
    )


def _checked(strategy: str, samples: Sequence[int], casualties: Collection[int]) -> frozenset[int]:
    """The casualties, once all three make sense together."""
    if strategy not in STRATEGIES:
        raise BadInput(f"there is no strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    if not samples or min(samples) < 0 or not any(samples):
        raise BadInput(f"a step of {list(samples)} samples trains nothing: give some worker 1 or more")
    lost = frozenset(casualties)
    strangers = lost - frozenset(range(len(samples)))
    if strangers:
        raise BadInput(f"worker {min(strangers)} cannot be lost: there are workers 0 to {len(samples) - 1}")
    if strategy == "forward" and len(lost) == len(samples):
        raise BadInput(f"forward needs a survivor: all {len(samples)} workers are casualties; choose restart")
    return lost


def _over(samples: Iterable[int], total: int) -> Weights:
    return tuple(count / total for count in samples)
