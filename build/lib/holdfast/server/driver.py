"""The driver of a run: it starts the actors, watches them, replaces lost ones, and stops all at the end."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.index import generations
from holdfast.checkpoint.place import store_for
from holdfast.errors import BadInput, CommitConflict, HoldfastError, WorkerLost
from holdfast.finding import counted
from holdfast.memory import require_room
from holdfast.server.cluster import LocalRay, cluster
from holdfast.server.settings import Settings
from holdfast.server.status import JoinRequest
from holdfast.workloads.registry import own_error
from holdfast.workloads.reinit import rule_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from holdfast.server.status import ServerOutcome, Status

ACTOR = 64 << 20  # bytes of memory that every actor needs
START_WITHIN = 120.0  # seconds for an actor to start and to load its data
LOOK_EVERY = 0.1
STARTS = 20  # restarts of all members together before training begins
SILENT_FOR = 30.0  # seconds without an answer of the controller, after which it is replaced
LIVES = 20  # controllers that a run may use up


def serve(
    settings: Settings, address: str | None = None, report: "Callable[[Status], None]" = lambda status: None
) -> "ServerOutcome":
    """Train a workload on a parameter server until it converges or reaches the maximum number of iterations.

    Ray is started on this machine, unless `address` names a cluster. `report` is called regularly with the progress.
    """
    _check(settings)
    if address is None:
        members, hint = settings.nodes + settings.workers, "use fewer, or a cluster (--address)"
        require_room(members, ACTOR, "nodes and workers", hint)
    with cluster(address) as local_ray:
        return _Driver(settings, report, local_ray).run()


def _check(settings: Settings) -> None:
    workload = settings.load()
    if settings.recovery == "fresh":
        rule_of(workload)
    blocks = len(workload.blocks)
    if settings.nodes > blocks:
        raise BadInput(f"{settings.nodes} nodes are more than the {blocks} blocks of {settings.workload}: use fewer.")
    store = store_for(settings.store)
    if generations(store) or settings.history.exists():
        raise CommitConflict(f"{settings.out} already holds a run: give each run its own folder and store.")


class _Driver:
    def __init__(self, settings: Settings, report: "Callable[[Status], None]", local_ray: LocalRay) -> None:
        self._settings, self._report = settings, report
        self._local_ray, self._ray = local_ray, local_ray.ray
        self._join_request = JoinRequest(settings.out)
        self._started = {"node": 0, "worker": 0}
        self._actors: dict[str, dict[int, ActorHandle[Any]]] = {"node": {}, "worker": {}}
        self._controllers: list[Any] = []  # the active controller, and a standby that takes over if it is lost
        self._request = self._iteration = 0

    def run(self) -> "ServerOutcome":
        try:
            self._start("node", self._settings.nodes)
            self._start("worker", self._settings.workers)
            self._controllers.append(self._new_controller())
            self._await_start()
            return self._watch()
        except self._ray.exceptions.RayError:
            self._require_ray()
            raise
        finally:
            self._end()

    def _watch(self) -> "ServerOutcome":
        for life in range(LIVES):
            self._request = 0  # every controller counts its requests from 0
            done: Any = self._controllers[0].train.remote(self._actors["node"], self._actors["worker"], life)
            if not life:
                self._controllers.append(self._new_controller())
            try:
                while not self._wait([done], LOOK_EVERY):
                    self._look()
                outcome: ServerOutcome = self._ray.get(done)
                return outcome
            except self._ray.exceptions.RayActorError:
                self._require_ray()
                # It may only be unreachable, and must not drive the run any more.
                self._ray.kill(self._controllers.pop(0))
                if not self._controllers:
                    self._controllers.append(self._new_controller())
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, HoldfastError):
                    raise type(error.cause)(*error.cause.args) from None
                if because := own_error(str(error), self._settings.workload):
                    raise BadInput(because) from error
                raise
        raise WorkerLost(f"the controller died {LIVES} times: see its logs in Ray's folder.")

    def _look(self) -> None:
        """Report the run's progress, and start nodes or workers that the controller or the user has requested."""
        asked: Any = self._controllers[0].status.remote()
        if not self._wait([asked], SILENT_FOR):
            self._ray.kill(self._controllers[0])
            return
        status: Status = self._ray.get(asked)
        self._report(status)
        # A lost controller is replaced once training continues; before, its successor would compete for the cores.
        if len(self._controllers) == 1 and status.iteration > self._iteration:
            self._controllers.append(self._new_controller())
        self._iteration = max(status.iteration, self._iteration)
        if status.wanted is not None and status.wanted[2] != self._request:
            kind, count, self._request = status.wanted
        else:
            kind, count = "node", self._join_request.take()
        for number in self._start(kind, count):
            self._controllers[0].welcome.remote(kind, number, self._actors[kind][number])

    def _start(self, kind: str, count: int) -> list[int]:
        numbers = list(range(self._started[kind], self._started[kind] + count))
        self._started[kind] += count
        for number in numbers:
            self._make(kind, number)
        return numbers

    def _make(self, kind: str, number: int) -> Any:
        from holdfast.server import server_node, worker

        made = self._remote(
            server_node.ServerNode if kind == "node" else worker.Worker,
            concurrency_groups=server_node.THREADS if kind == "node" else worker.THREADS,
            scheduling_strategy="SPREAD",
        )
        self._actors[kind][number] = made.remote(number, self._settings)
        return self._actors[kind][number].ready.remote()

    def _remote(self, kind: type[Any], **options: object) -> Any:
        return self._ray.remote(num_cpus=0, **options)(kind)

    def _new_controller(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from holdfast.server.controller import Controller

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=True)
        made = self._remote(Controller, concurrency_groups={"watch": 1}, scheduling_strategy=here)
        return made.remote(self._settings)

    def _await_start(self) -> None:
        waiting: dict[Any, tuple[str, int]] = {
            actor.ready.remote(): (kind, number)
            for kind, actors in self._actors.items()
            for number, actor in actors.items()
        }
        deadline, starts = time.monotonic() + START_WITHIN, STARTS
        while waiting:
            done = self._wait(list(waiting), deadline - time.monotonic())
            if not done:
                names = ", ".join(sorted(f"{kind} {number}" for kind, number in waiting.values()))
                raise WorkerLost(f"{names} did not start within {START_WITHIN:g} s: see the logs in Ray's folder.")
            member = waiting.pop(done[0])
            try:
                self._ray.get(done[0])
            except self._ray.exceptions.RayActorError:
                starts -= 1
                if not starts:
                    raise
                waiting[self._make(*member)] = member

    def _wait(self, calls: list[Any], seconds: float) -> list[Any]:
        """Wait up to `seconds` until one of the Ray `calls` ends; return the ended calls.

        Raise WorkerLost if Ray stops."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            done, _ = self._ray.wait(calls, timeout=min(LOOK_EVERY, left))
            self._require_ray()
            if done or left <= LOOK_EVERY:
                return list(done)

    def _require_ray(self) -> None:
        if (what := self._local_ray.ended()) is not None:
            settings = self._settings
            raise WorkerLost(
                f"{what} after {counted(self._iteration, 'iteration')}, and the run cannot continue without it. Its "
                f"history is kept in {settings.history}, and its checkpoints in {settings.store}. Ray's logs in "
                f"{self._local_ray.logs} may say why. Start the run again with another --out."
            )

    def _end(self) -> None:
        everybody = [actor for actors in self._actors.values() for actor in actors.values()] + self._controllers
        for actor in everybody:
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)
