"""The nodes and workers of a run: calls to their actors, and detection of lost members."""

import os
import signal
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from holdfast.errors import HoldfastError
from holdfast.server.failure_detector import AT_FIRST, DEADLINE, FailureDetector, raylet_lives
from holdfast.server.shard import BlocksMoved

Who = TypeVar("Who", bound=Hashable)
TICK = 0.05  # seconds between two checks for lost members during a wait


class Member(NamedTuple):
    """A process of a run: its kind ("node", "worker" or "controller") and its number."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" if self.kind != "controller" else self.kind


class RemoteResults(NamedTuple):
    """The results of remote calls, and the reason for each call that has no result."""

    results: dict[Any, Any]
    missing: dict[Any, str]


def call(actor: "ActorHandle[Any]", method: str, *arguments: object) -> "ObjectRef[Any]":
    return getattr(actor, method).remote(*arguments)  # type: ignore[no-any-return]


def gather(
    calls: Mapping[Who, "ObjectRef[Any]"],
    given_up: Callable[[], Mapping[Who, str]],
    patience: float,
    *,
    first: bool = False,
) -> RemoteResults:
    """Wait up to `patience` seconds for the results of the Ray calls `calls`, or for the first result if `first`.

    Actors that `given_up()` reports as lost, or that Ray cannot reach, are listed as missing. An exception of an actor
    is raised here, except `BlocksMoved`, which counts as a result."""
    results: dict[Any, Any] = {}
    missing: dict[Any, str] = {}
    waiting = {ref: who for who, ref in calls.items()}
    deadline = time.monotonic() + patience
    while waiting and not (first and (results or missing)):
        ready, _ = ray.wait(list(waiting), num_returns=1 if first else len(waiting), timeout=TICK)
        for ref in ready:
            _collect(ref, waiting.pop(ref), results, missing)
        if not waiting:
            break
        gone = dict(given_up())
        if time.monotonic() > deadline:
            gone = dict.fromkeys(waiting.values(), f"it did not finish within {patience:g} s") | gone
        for ref, who in list(waiting.items()):
            if who in gone:
                missing[who] = gone[who]
                del waiting[ref]
    return RemoteResults(results, missing)


def _collect(ref: "ObjectRef[Any]", who: Who, results: dict[Any, Any], missing: dict[Any, str]) -> None:
    try:
        results[who] = ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HoldfastError):
            raise type(cause)(*cause.args) from None
        if not isinstance(cause, BlocksMoved):
            raise
        results[who] = cause
    except RayError as error:  # the process or the machine is lost
        missing[who] = reason(error)


def reason(error: RayError) -> str:
    name = type(error).__name__
    known = {"ActorDiedError": "its process died", "ActorUnavailableError": "it is out of reach"}
    return known.get(name, f"Ray reports {name}")


PATIENCE = 60.0  # seconds for a task on a slow machine; living members answer heartbeats meanwhile


class ServerMembers:
    """The nodes and workers that take part in a run, by number, with heartbeats to detect lost nodes and workers.

    A node or worker counts as lost if it does not answer a heartbeat within `lost_after` seconds."""

    def __init__(self, lost_after: float = DEADLINE) -> None:
        self.nodes: dict[int, ActorHandle[Any]] = {}
        self.workers: dict[int, ActorHandle[Any]] = {}
        self.newest = 0  # the version of the newest map, which every heartbeat carries
        self._detector: FailureDetector[Member] = FailureDetector(
            deadline=lost_after, at_first=max(lost_after, AT_FIRST)
        )
        self._beats: dict[ObjectRef[Any], Member] = {}
        self._suspects: dict[Member, str] = {}

    def admit(self, member: Member, actor: "ActorHandle[Any]") -> None:
        self._of(member.kind)[member.number] = actor
        self._detector.watch(member, time.monotonic())

    def expel(self, member: Member) -> None:
        """Remove a node or worker from the run, and kill its process if it still runs."""
        if (actor := self.dismiss(member)) is not None:
            with suppress(RayError, ValueError):
                ray.kill(actor)

    def dismiss(self, member: Member) -> "ActorHandle[Any] | None":
        """Remove a node or worker without killing its process, so that it can be added again; return its actor."""
        self._detector.forget(member)
        self._suspects.pop(member, None)
        self._beats = {ref: who for ref, who in self._beats.items() if who != member}
        return self._of(member.kind).pop(member.number, None)

    def settle(self) -> None:
        for member in self.all():
            self._detector.settle(member)

    def all(self) -> list[Member]:
        return [Member("node", n) for n in self.nodes] + [Member("worker", n) for n in self.workers]

    def ask(
        self, kind: str, method: str, arguments: Mapping[int, tuple[Any, ...]], patience: float = PATIENCE
    ) -> RemoteResults:
        """Call `method` of several nodes or workers, and wait up to `patience` seconds for their results.

        `kind` is "node" or "worker", and `arguments` has the arguments of each call by the number of the actor."""
        return self.answers(kind, self.call(kind, method, arguments), patience)

    def call(self, kind: str, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> "Mapping[int, ObjectRef[Any]]":
        actors = self._of(kind)
        return {number: call(actors[number], method, *given) for number, given in arguments.items()}

    def answers(self, kind: str, calls: "Mapping[int, ObjectRef[Any]]", patience: float = PATIENCE) -> RemoteResults:
        """Wait up to `patience` seconds for the results of `calls`, which are keyed by the number of the called actor.

        `kind` is "node" or "worker". An actor that is lost or too slow is listed as missing in the result."""

        def given_up() -> dict[int, str]:
            return {who.number: why for who, why in self.look().items() if who.kind == kind}

        return gather(calls, given_up, patience)

    def look(self) -> dict[Member, str]:
        """Receive and send heartbeats; return the nodes and workers that seem to be lost, with the reasons.

        Workers are told about lost nodes, so that they stop waiting for them. If Ray's daemon on this machine was
        stopped, this controller kills its own process, and another controller takes over."""
        if not raylet_lives():
            os.kill(os.getpid(), signal.SIGKILL)
        if self._beats:
            ready, _ = ray.wait(list(self._beats), num_returns=len(self._beats), timeout=0)
            for ref in ready:
                self._hear(ref, self._beats.pop(ref))
        now = time.monotonic()
        for member, why in self._detector.silent(now).items():
            self._suspect(member, why)
        for member in self._detector.due(now):
            self._beats[call(self._of(member.kind)[member.number], "beat", self.newest)] = member
            self._detector.asked(member, now)
        return dict(self._suspects)

    def announce(self, version: int) -> None:
        """Tell workers that version `version` of the block assignment exists, so that they abandon older requests."""
        self.newest = version
        for worker in self.workers.values():
            call(worker, "beat", version)

    def lost(self, kind: str, missing: Mapping[int, str]) -> dict[Member, str]:
        """Return all lost nodes and workers, with the reasons.

        They are the actors of `kind` ("node" or "worker") in `missing`, and all actors that do not answer
        heartbeats."""
        return {Member(kind, number): why for number, why in missing.items()} | self.look()

    def kill(self, kind: str, numbers: Iterable[int], seconds: float = 10.0) -> None:
        """Kill the processes of nodes or workers to inject a failure; wait up to `seconds` for them to exit."""
        actors = self._of(kind)
        calls = {number: call(actors[number], "die") for number in numbers if number in actors}
        gather(calls, dict, seconds)

    def _hear(self, ref: "ObjectRef[Any]", member: Member) -> None:
        try:
            lives = ray.get(ref)
        except RayError as error:
            self._suspect(member, reason(error))
            return
        self._detector.heard(member, time.monotonic())
        if not lives:
            self._suspect(member, "Ray on its machine was stopped or killed")

    def _suspect(self, member: Member, why: str) -> None:
        if member in self._suspects:
            return
        self._suspects[member] = why
        if member.kind == "node":
            for worker in self.workers.values():
                call(worker, "give_up", member.number, why)

    def _of(self, kind: str) -> "dict[int, ActorHandle[Any]]":
        return self.nodes if kind == "node" else self.workers
