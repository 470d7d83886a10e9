"""Work shared out among processes: in go a function and the items to call it with, out comes what it gave for each.

While it works, the function can tell the caller of what it has found, before all of an item is done.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, current_process, get_context
from multiprocessing.queues import SimpleQueue
from pickle import PicklingError
from typing import Any, Protocol, TypeAlias, TypeVar

from holdfast.errors import BadInput, WorkerLost

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Report: TypeAlias = Callable[..., None]
"""Called by work, heard where the work was shared out."""


class ParallelMap(Protocol):
    """A way to call work with every item: in this process, in several, or on a cluster. All give the same outcomes."""

    @property
    def jobs(self) -> int:
        """How many items can be worked on at once."""

    def __call__(self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], hear: Report) -> list[Outcome]:
        """What work made of each item, in their order; `hear` is called with whatever work tells."""


def map_in_processes(
    work: Callable[[Item, Report], Outcome], items: Sequence[Item], *, jobs: int, hear: Report
) -> list[Outcome]:
    """What work made of each item. Every process is given the work once, and takes the next item when it is free."""
    if jobs == 1 or len(items) == 1:
        return [work(item, hear) for item in items]
    exit_if_worker_process()
    context = get_context("spawn")  # a fork of a process with threads (progress bars, BLAS) can deadlock
    told: SimpleQueue[tuple[Any, ...]] = context.SimpleQueue()
    others = set(active_children())
    with ProcessPoolExecutor(min(jobs, len(items)), context, initializer=_begin, initargs=(work, told)) as pool:
        try:
            return _results(_submitted(pool, items), told, hear)
        except BaseException:  # nobody hears what the rest would tell: it would fill the pipe and wait forever
            for process in set(active_children()) - others:
                process.terminate()
            raise


def exit_if_worker_process() -> None:
    """End this process in silence if it was started to run trials, and is about to start others instead.

    Every process imports the script that shared work out. A script that does so outside of a main guard would do it
    again there. The process that began it says what is wrong.
    """
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing itself finds out
        raise SystemExit(1)


def _submitted(pool: ProcessPoolExecutor, items: Sequence[Any]) -> "list[Future[Any]]":
    try:
        return [pool.submit(_do, item) for item in items]
    except (PicklingError, AttributeError, TypeError) as error:  # as processes are started, with the work
        raise BadInput(
            f"the workload cannot be sent to other processes ({error}): define its class at the top of a module, or use "
            "one process (--jobs 1)"
        ) from error


def _results(futures: "Sequence[Future[Outcome]]", told: "SimpleQueue[tuple[Any, ...]]", hear: Report) -> list[Outcome]:
    """What comes of every item, hearing meanwhile; the first that fails ends it all."""
    pending, begun = set(futures), 0
    try:
        while pending:
            done, pending = wait(pending, timeout=0.2)
            while not told.empty():
                what = told.get()
                if what == BEGUN:
                    begun += 1
                else:
                    hear(*what)
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise WorkerLost(KILLED if begun or not told.empty() else NEVER_BEGUN) from error


BEGUN = ("holdfast: a process has begun",)
KILLED = "a process that ran trials was killed, perhaps for want of memory: run fewer --jobs"
NEVER_BEGUN = (
    "no process could begin to run trials. Each imports the script that asked for them, so a script has to ask under "
    '`if __name__ == "__main__":`'
)
_given: list[Any] = []  # in a worker process: the work, and where it tells of it


def _begin(*what: Any) -> None:
    _given[:] = what
    what[1].put(BEGUN)


def _do(item: Any) -> Any:
    work, told = _given
    return work(item, lambda *what: told.put(what))
