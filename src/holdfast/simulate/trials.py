"""How many iterations trials need from where they start to the criterion, in as many processes as one likes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

import numpy as np

from holdfast.blocks import Floats
from holdfast.errors import WorkerLost
from holdfast.simulate.lanes import Done, Start, Trial, run_lanes
from holdfast.workloads.workload import Workload


def as_given(start: Start) -> Start:
    """For trials that are described by their starts."""
    return start


def iterations(
    workload: Workload,
    trials: Sequence[Trial],
    begin: Callable[[Trial], Start],
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
    return _shared_out(workload, trials, begin, limit, jobs, done)


def _shared_out(
    workload: Workload,
    trials: Sequence[Trial],
    begin: Callable[[Trial], Start],
    limit: int,
    jobs: int,
    done: Done,
) -> Floats:
    """Each process is given the workload once, takes every `jobs`-th trial, and tells of each that is done."""
    parts = [range(first, len(trials), jobs) for first in range(min(jobs, len(trials)))]
    context = get_context("spawn")  # a fork of a process with threads (progress bars, BLAS) can deadlock
    finished: SimpleQueue[tuple[int, float]] = context.SimpleQueue()
    result = np.full(len(trials), np.inf)
    with ProcessPoolExecutor(len(parts), context, initializer=_adopt, initargs=(workload, begin, finished)) as pool:
        futures = {pool.submit(_run, [trials[i] for i in part], list(part), limit): part for part in parts}
        pending = set(futures)
        while pending:
            pending = wait(pending, timeout=0.2).not_done
            while not finished.empty():
                done(*finished.get())
        for future, part in futures.items():
            result[part] = _result(future)
    return result


def _result(future: "Future[Floats]") -> Floats:
    try:
        return future.result()
    except BrokenProcessPool as error:
        line = "a process that ran trials was killed, perhaps for want of memory: run fewer --jobs"
        raise WorkerLost(line) from error


_adopted: list[Any] = []  # in a worker process: what it was started for


def _adopt(*what: Any) -> None:
    _adopted[:] = what


def _run(trials: Sequence[Any], numbers: Sequence[int], limit: int) -> Floats:
    workload, begin, finished = _adopted
    return run_lanes(workload, trials, begin, limit, lambda trial, count: finished.put((numbers[trial], count)))
