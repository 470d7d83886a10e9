"""Work shared out among processes: in go a function and the items to call it with, out comes what it gave for each.

While it works, the function can tell the caller of what it has found, before all of an item is done.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from holdfast.errors import WorkerLost

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Tell: TypeAlias = Callable[..., None]
"""Called by work, heard where the work was shared out."""


def share_out(work: Callable[[Item, Tell], Outcome], items: Sequence[Item], *, jobs: int, hear: Tell) -> list[Outcome]:
    """What work made of each item. Every process is given the work once, and takes the next item when it is free."""
    if jobs == 1 or len(items) == 1:
        return [work(item, hear) for item in items]
    context = get_context("spawn")  # a fork of a process with threads (progress bars, BLAS) can deadlock
    told: SimpleQueue[tuple[Any, ...]] = context.SimpleQueue()
    others = set(active_children())
    with ProcessPoolExecutor(min(jobs, len(items)), context, initializer=_adopt, initargs=(work, told)) as pool:
        try:
            return _results([pool.submit(_do, item) for item in items], told, hear)
        except BaseException:  # nobody hears what the rest would tell: it would fill the pipe and wait forever
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _results(futures: "Sequence[Future[Outcome]]", told: "SimpleQueue[tuple[Any, ...]]", hear: Tell) -> list[Outcome]:
    """What comes of every item, hearing meanwhile; the first that fails ends it all."""
    pending = set(futures)
    try:
        while pending:
            done, pending = wait(pending, timeout=0.2)
            while not told.empty():
                hear(*told.get())
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        line = "a process that ran trials was killed, perhaps for want of memory: run fewer --jobs"
        raise WorkerLost(line) from error


_adopted: list[Any] = []  # in a worker process: what it was started for


def _adopt(*what: Any) -> None:
    _adopted[:] = what


def _do(item: Any) -> Any:
    work, told = _adopted
    return work(item, lambda *what: told.put(what))
