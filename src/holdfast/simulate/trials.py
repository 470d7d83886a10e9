"""How many iterations trials need from a given state to the criterion: many trials advance together.

A stack has a fixed number of lanes. A trial that reaches the criterion leaves its lane to the next one, and lanes
without a trial are padded, so every matrix product has the same shape and a trial's result depends neither on its
company nor on the number of processes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks import Floats, Ids
from holdfast.errors import WorkerLost
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, stacked

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where a trial begins: a state, the iteration that is next, and the stream of random numbers that it follows."""

    state: Arrays
    iteration: int
    stream: int = 0


def iterations(
    workload: Workload,
    starts: Sequence[Start],
    *,
    limit: int,
    jobs: int = 1,
    progress: Progress = lambda done: None,
) -> Floats:
    """Iterations from each start to the criterion; infinite for a trial that is not there within the limit."""
    if jobs == 1 or len(starts) <= workload.lanes:
        return _run(workload, starts, limit, progress)
    return _shared_out(workload, starts, limit, jobs, progress)


def _shared_out(workload: Workload, starts: Sequence[Start], limit: int, jobs: int, progress: Progress) -> Floats:
    """Trials divided evenly over processes, each of which takes the workload once and tells when a trial is done."""
    share = -(-len(starts) // jobs)
    parts = [starts[first : first + share] for first in range(0, len(starts), share)]
    context = get_context("spawn")  # a fork of a process with threads (progress bars, BLAS) can deadlock
    finished: SimpleQueue[int] = context.SimpleQueue()
    with ProcessPoolExecutor(len(parts), context, initializer=_adopt, initargs=(workload, finished)) as pool:
        futures = [pool.submit(_run_adopted, part, limit) for part in parts]
        pending = set(futures)
        while pending:
            pending = wait(pending, timeout=0.2).not_done
            while not finished.empty():
                progress(finished.get())
        return np.concatenate([_result(future) for future in futures])


def _result(future: "Future[Floats]") -> Floats:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise WorkerLost(
            "a process that ran trials was killed, perhaps for want of memory: run fewer --jobs"
        ) from error


def _run(workload: Workload, starts: Sequence[Start], limit: int, progress: Progress) -> Floats:
    """All trials in this process, lane by lane."""
    result = np.full(len(starts), np.inf)
    with threadpool_limits(1):  # the number of threads would show in the last bits
        initial = np.concatenate([_losses(workload, part) for part in _batches(starts, workload.lanes)])
        done = initial < workload.criterion
        result[done] = 0
        progress(int(done.sum()))
        _advance_all(workload, starts, deque(np.flatnonzero(~done).tolist()), limit, result, progress)
    return result


def _advance_all(
    workload: Workload, starts: Sequence[Start], waiting: deque[int], limit: int, result: Floats, progress: Progress
) -> None:
    """Advance waiting trials until each is under the criterion or at the limit, and note when."""
    if not waiting or limit < 1:
        return
    padding = starts[waiting[0]]
    trials = [waiting.popleft() if waiting else None for _ in range(workload.lanes)]
    begun = [padding if trial is None else starts[trial] for trial in trials]
    stack = stacked([start.state for start in begun])
    age = np.zeros(workload.lanes, dtype=np.int64)
    while any(trial is not None for trial in trials):
        stack = workload.advance(stack, _clock(begun, age))
        age += 1
        under = workload.loss(stack) < workload.criterion
        for lane, trial in enumerate(trials):
            if trial is None or not (under[lane] or age[lane] >= limit):
                continue
            if under[lane]:
                result[trial] = age[lane]
            progress(1)
            trials[lane] = following = waiting.popleft() if waiting else None
            begun[lane] = padding if following is None else starts[following]
            age[lane] = 0
            _set_lane(stack, lane, begun[lane].state)


def _clock(begun: Sequence[Start], age: Ids) -> Clock:
    return Clock(np.array([start.iteration for start in begun]) + age, np.array([start.stream for start in begun]))


def _set_lane(stack: Stack, lane: int, state: Arrays) -> None:
    for name, value in state.items():
        stack[name][..., lane] = value


def _batches(starts: Sequence[Start], lanes: int) -> list[Sequence[Start]]:
    return [starts[first : first + lanes] for first in range(0, len(starts), lanes)]


def _losses(workload: Workload, starts: Sequence[Start]) -> Floats:
    """Losses of at most one stack of states, padded to its full width."""
    padded = [*starts, *[starts[0]] * (workload.lanes - len(starts))]
    return workload.loss(stacked([start.state for start in padded]))[: len(starts)]


_adopted: list[tuple[Workload, Progress]] = []  # in a worker process: what it was started for


def _adopt(workload: Workload, finished: "SimpleQueue[int]") -> None:
    _adopted[:] = [(workload, finished.put)]


def _run_adopted(starts: Sequence[Start], limit: int) -> Floats:
    workload, progress = _adopted[0]
    return _run(workload, starts, limit, progress)
