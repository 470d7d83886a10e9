"""Call a function for many items in several processes; the function can report results before an item is done."""

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
"""Called by the work in a worker process; its arguments arrive at `on_report` in the process that started it."""


class ParallelMap(Protocol):
    """A parallel `map` that runs in this process, in several processes or on a cluster."""

    @property
    def jobs(self) -> int:
        """The number of items that are processed at once."""

    def __call__(
        self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], on_report: Report
    ) -> list[Outcome]:
        """Return the outcome of `work` for each of `items`, in order; `on_report` receives what `work` reports."""


def map_in_processes(
    work: Callable[[Item, Report], Outcome], items: Sequence[Item], *, jobs: int, on_report: Report
) -> list[Outcome]:
    """Return the outcome of `work` for each item, computed in up to `jobs` processes; `on_report` gets all reports."""
    if jobs == 1 or len(items) == 1:
        return [work(item, on_report) for item in items]
    exit_if_worker_process()
    context = get_context("spawn")  # a fork of a process with threads (progress bars, BLAS) can deadlock
    reports: SimpleQueue[tuple[Any, ...]] = context.SimpleQueue()
    others = set(active_children())
    with ProcessPoolExecutor(min(jobs, len(items)), context, initializer=_begin, initargs=(work, reports)) as pool:
        try:
            try:
                futures = [pool.submit(_do, item) for item in items]
            except (PicklingError, AttributeError, TypeError) as error:  # raised when a process is sent the work
                raise BadInput(
                    f"the workload cannot be sent to other processes ({error}): define its class at the top of a module, "
                    "or use one process (--jobs 1)."
                ) from error
            return _results(futures, reports, on_report)
        except BaseException:  # nothing reads the reports any more: workers would fill the pipe and wait forever
            for process in set(active_children()) - others:
                process.terminate()
            raise


def exit_if_worker_process() -> None:
    """Exit silently if this process is a worker that is about to start workers of its own.

    Every worker imports the script that started it. Without a main guard, this import would start the work again."""
    if getattr(current_process(), "_inheriting", False):  # the test that multiprocessing itself uses
        raise SystemExit(1)


def _results(
    futures: "Sequence[Future[Outcome]]", reports: "SimpleQueue[tuple[Any, ...]]", on_report: Report
) -> list[Outcome]:
    """Wait for all futures and return their results, in order; pass progress reports to `on_report` meanwhile."""
    pending, begun = set(futures), 0
    try:
        while pending:
            done, pending = wait(pending, timeout=0.2)
            while not reports.empty():
                report = reports.get()
                if report == BEGUN:
                    begun += 1
                else:
                    on_report(*report)
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise WorkerLost(KILLED if begun or not reports.empty() else NEVER_BEGUN) from error


BEGUN = ("holdfast: a process has begun",)
KILLED = "a process that ran trials was killed, perhaps for lack of memory: use fewer --jobs."
NEVER_BEGUN = (
    "no process could start to run trials. Each imports the script that started them, so the script must do that below "
    '`if __name__ == "__main__":`.'
)
_given: list[Any] = []  # in a worker process: the work, and the queue of its reports


def _begin(*given: Any) -> None:
    _given[:] = given
    given[1].put(BEGUN)


def _do(item: Any) -> Any:
    work, reports = _given
    return work(item, lambda *report: reports.put(report))
