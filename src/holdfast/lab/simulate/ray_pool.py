"""Trials shared out over a Ray cluster: the same work and the same items as in processes of one machine, and the same rows.

Every machine of the cluster needs holdfast, and a model of one's own at the same path.
"""

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
    """Where trials are run: None is this machine, `ray` a cluster, by default one that is started here."""
    if on is None and address is not None:
        raise BadInput(f"an address ({address}) is that of a Ray cluster: say --on ray too")
    if on is None:
        yield None
        return
    if on != "ray":
        raise BadInput(f"trials cannot be run on {on!r}: leave it out, or choose ray")
    if find_spec("ray") is None:
        raise BadInput("--on ray needs Ray, which is not installed: pip install 'holdfast[ray]'")
    from holdfast.server.cluster import cluster

    with cluster(address):
        yield RayPool()


class RayPool:
    """Work on the cluster that this process is connected to; each item is a task, and takes one core."""

    @property
    def jobs(self) -> int:
        """The cores of the cluster."""
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], hear: Report) -> list[Outcome]:
        """What work made of each item; what it tells comes through a queue while it works."""
        import ray
        from ray.util.queue import Queue

        told = Queue(actor_options={"num_cpus": 0})
        try:
            given = ray.put(work)
            tasks = [ray.remote(_do).remote(given, item, told) for item in items]
            return self._results(tasks, told, hear)
        finally:
            told.shutdown(force=True)

    def _results(self, tasks: "list[ObjectRef[Any]]", told: "Queue", hear: Report) -> list[Any]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        pending = list(tasks)
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=LOOK_EVERY)
                for what in told.get_nowait_batch(told.qsize()):
                    hear(*what)
                ray.get(done)
            return list(ray.get(tasks))
        except RayTaskError as error:
            raise _cause(error) from error
        except RayError as error:
            raise WorkerLost(f"a process of the Ray cluster that ran trials was lost: {_first_line(error)}") from error
        finally:
            for task in pending:
                ray.cancel(task, force=True)


def _do(work: Any, item: Any, told: Any) -> Any:
    """In a process of the cluster."""
    return work(item, lambda *what: told.put(what))


def _cause(error: Any) -> Exception:
    """What the work itself raised."""
    if isinstance(error.cause, HoldfastError):
        return error.cause
    return WorkerLost(f"trials on the Ray cluster failed: {_first_line(error.cause)}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
