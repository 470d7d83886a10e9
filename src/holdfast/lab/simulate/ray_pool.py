"""Run trials on a Ray cluster; each machine needs holdfast, and the user's model at the same path."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, HoldfastError, WorkerLost
from holdfast.lab.simulate.process_pool import Item, Outcome, ParallelMap, Report

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.queue import Queue

LOOK_EVERY = 0.2  # seconds


@contextmanager
def trial_cluster(on: str | None, address: str | None) -> Iterator[ParallelMap | None]:
    """Yield a parallel map on the Ray cluster at `address`, or on a new local cluster; yield None if `on` is None."""
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
        """The number of CPU cores of the cluster."""
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]

    def __call__(
        self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], on_report: Report
    ) -> list[Outcome]:
        """Run `work` on each item as a Ray task and return the outcomes; pass the tasks' reports to `on_report`."""
        import ray
        from ray.util.queue import Queue

        reports = Queue(actor_options={"num_cpus": 0})
        try:
            stored = ray.put(work)
            tasks = [ray.remote(_do).remote(stored, item, reports) for item in items]
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


def _do(work: Any, item: Any, reports: Any) -> Any:
    return work(item, lambda *report: reports.put(report))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
