"""Call a function for many items, in several processes or on a Ray cluster, and pass on its reports before it returns."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import active_children, current_process, get_context
from multiprocessing.queues import SimpleQueue
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from holdfast.errors import BadInput, HoldfastError, WorkerLost

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.queue import Queue

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
LOOK_EVERY = 0.2  # seconds
Report: TypeAlias = Callable[..., None]
"""Called by the work in a worker process; its arguments arrive at `on_report` in the process that started it."""


def map_in_processes(
    work: Callable[[Item, Report], Outcome], items: Sequence[Item], *, jobs: int, on_report: Report
) -> list[Outcome]:
    """Call `work(item, report)` for each item in up to `jobs` processes; return the outcomes in the order of the items.

    When `work` calls `report`, `on_report` is called in this process with the same arguments."""
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
    """Exit silently if a worker process reaches this call while it imports the script that started it.

    This happens in scripts without a main guard, whose import would start the work again."""
    if getattr(current_process(), "_inheriting", False):  # the test that multiprocessing itself uses
        raise SystemExit(1)


def _results(
    futures: "Sequence[Future[Outcome]]", reports: "SimpleQueue[tuple[Any, ...]]", on_report: Report
) -> list[Outcome]:
    pending, begun = set(futures), 0
    try:
        while pending:
            done, pending = wait(pending, timeout=LOOK_EVERY)
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


@contextmanager
def trial_cluster(on: str | None, address: str | None) -> "Iterator[RayPool | None]":
    """Yield a pool of Ray tasks if `on` is "ray", and None if `on` is None.

    The tasks run on the Ray cluster at `address`, or on a new local cluster if `address` is None."""
    if on is None and address is not None:
        raise BadInput(f"--address {address} names a Ray cluster: add --on ray.")
    if on is None:
        yield None
        return
    if on != "ray":
        raise BadInput(f"trials cannot run on {on!r}: choose --on ray, or leave it out.")
    if find_spec("ray") is None:
        raise BadInput("--on ray needs Ray, which is not installed: pip install 'holdfast[ray]'.")
    from holdfast.server.cluster import cluster

    with cluster(address):
        yield RayPool()


class RayPool:
    """A parallel map on the connected Ray cluster: every item becomes a task that uses one core."""

    @property
    def jobs(self) -> int:
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]

    def __call__(
        self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], on_report: Report
    ) -> list[Outcome]:
        """Run `work(item, report)` as a Ray task for each item, and return the outcomes in the order of the items.

        When `work` calls `report`, `on_report` is called in this process with the same arguments."""
        import ray
        from ray.util.queue import Queue

        reports = Queue(actor_options={"num_cpus": 0})
        try:
            stored = ray.put(work)
            tasks = [ray.remote(_do_on_ray).remote(stored, item, reports) for item in items]
            return self._results(tasks, reports, on_report)
        finally:
            reports.shutdown(force=True)

    def _results(self, tasks: "list[ObjectRef[Any]]", reports: "Queue", on_report: Report) -> list[Any]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        pending = list(tasks)
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=LOOK_EVERY)
                for report in reports.get_nowait_batch(reports.qsize()):
                    on_report(*report)
                ray.get(done)
            return list(ray.get(tasks))
        except RayTaskError as error:
            if isinstance(error.cause, HoldfastError):
                raise error.cause from error
            raise WorkerLost(f"trials on the Ray cluster failed: {_first_line(error.cause)}") from error
        except RayError as error:
            raise WorkerLost(f"a process of the Ray cluster that ran trials was lost: {_first_line(error)}") from error
        finally:
            for task in pending:
                ray.cancel(task, force=True)


def _do_on_ray(work: Any, item: Any, reports: Any) -> Any:
    return work(item, lambda *report: reports.put(report))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
