"""How many iterations trials need from where they start to the criterion, in as many processes as one likes.

In go a workload and descriptions of trials; out comes one number for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.simulate.lanes import Description, Done, Start, run_lanes
from holdfast.lab.simulate.process_pool import Tell, share_out
from holdfast.workloads.workload import Workload


def as_given(start: Start) -> Start:
    """For trials that are described by their starts."""
    return start


def iterations(
    workload: Workload,
    trials: Sequence[Description],
    begin: Callable[[Description], Start],
    *,
    limit: int,
    jobs: int = 1,
    done: Done = lambda trial, count: None,
) -> Floats:
    """Iterations of each trial to the criterion, in fractions; infinite for one that is not there within the limit.

    A trial is a small description, and `begin` makes its start only when a lane is free: a thousand states of a large
    model never exist at once, nor do they travel between processes.
    """
    if jobs == 1 or len(trials) <= workload.lanes:
        return run_lanes(workload, trials, begin, limit, done)
    parts = [range(first, len(trials), jobs) for first in range(min(jobs, len(trials)))]
    work = _Part(workload, begin, limit)
    counts = share_out(work, [[(i, trials[i]) for i in part] for part in parts], jobs=jobs, hear=done)
    result = np.full(len(trials), np.inf)
    for part, found in zip(parts, counts, strict=True):
        result[part] = found
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some of the trials, each with its number among all."""

    workload: Workload
    begin: Callable[[Any], Start]
    limit: int

    def __call__(self, part: Sequence[tuple[int, Any]], tell: Tell) -> Floats:
        numbers, trials = zip(*part, strict=True)
        return run_lanes(
            self.workload, trials, self.begin, self.limit, lambda trial, count: tell(numbers[trial], count)
        )
