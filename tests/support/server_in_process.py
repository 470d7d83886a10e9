"""A served run in one process, without Ray: calls are made at once, in order, and anybody can be killed at any of them.

What is put in Ray's place knows only what the server asks of it. So every moment of a run can be tried, and in no time.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from holdfast.errors import HoldfastError
from holdfast.server import members
from holdfast.server.controller import Controller
from holdfast.server.members import Member
from holdfast.server.server_node import ServerNode
from holdfast.server.settings import Settings
from holdfast.server.shard import BlocksMoved
from holdfast.server.status import ServerOutcome
from holdfast.server.worker import Worker
from holdfast.workloads.divided import DividedWorkload
from holdfast.workloads.registry import load_workload


class Killed(BaseException):
    """The controller's process ends here."""


class Ref:
    """A call that was made: what came of it."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error


class Actor:
    """A process of a run; its methods are called as those of Ray's actors."""

    def __init__(self, run: "InProcess", member: Member, target: Any) -> None:
        self.run, self.member, self.target, self.dead = run, member, target, False

    def __getattr__(self, method: str) -> Any:
        return _Method(self, method)


class _Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> Ref:
        actor = self.actor
        if self.name != "beat":
            actor.run.called(actor.member, self.name)
        if self.name == "die":
            actor.dead = True
        if actor.dead:
            return Ref(error=ActorDiedError())
        arguments = tuple(given.value if isinstance(given, Ref) else given for given in arguments)
        try:
            value = getattr(actor.target, self.name)(*arguments)
        except (HoldfastError, BlocksMoved) as error:
            return Ref(error=RayTaskError(self.name, "", error))
        # A process may die after it has done what it was asked for, and before it can say so.
        return Ref(error=ActorDiedError()) if actor.dead else Ref(value)


class InProcess:
    """Stands in the place of the module `ray`, and drives a run as `job` does."""

    def __init__(
        self,
        settings: Settings,
        kill: Callable[[int, Member, str], Member | None],
        arrive: Callable[[int], Member | None],
    ) -> None:
        self.settings, self.actors, self.count, self.lives = settings, dict[Member, Actor](), 0, 0
        self._kill, self._arrive = kill, arrive
        self._controller: Controller | None = None

    def called(self, member: Member, method: str) -> None:
        """A call is about to be made: now somebody may be killed."""
        self.count += 1
        if (comes := self._arrive(self.count)) and self._controller:
            self._controller.welcome(comes.kind, comes.number, self.start(comes))  # type: ignore[arg-type]
        victim = self._kill(self.count, member, method)
        if victim is not None and victim.kind == "controller":
            raise Killed
        if victim is not None and victim in self.actors:
            self.actors[victim].dead = True

    def start(self, member: Member) -> Actor:
        kind = ServerNode if member.kind == "node" else Worker
        self.actors[member] = Actor(self, member, kind(member.number, self.settings))
        return self.actors[member]

    def train(self) -> ServerOutcome:
        """Train to the end, with as many controllers as it takes."""
        for kind, count in (("node", self.settings.nodes), ("worker", self.settings.workers)):
            for number in range(count):
                self.start(Member(kind, number))
        try:
            return self._trained()
        finally:
            for actor in self.actors.values():
                actor.target.close()

    def _trained(self) -> ServerOutcome:
        while True:
            try:
                of = {
                    kind: {m.number: a for m, a in self.actors.items() if m.kind == kind} for kind in ("node", "worker")
                }
                life, self.lives = self.lives, self.lives + 1
                controller = self._controller = _Driven(self)
                return controller.train(of["node"], of["worker"], life)  # type: ignore[arg-type]
            except Killed:
                continue
            finally:
                controller.give_up()

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        return refs, []

    def get(self, ref: Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value

    def kill(self, actor: Actor) -> None:
        actor.dead = True


class _Driven(Controller):
    """A controller whose wishes for new members are met at once."""

    def __init__(self, run: InProcess) -> None:
        super().__init__(run.settings)
        self._run = run

    def give_up(self) -> None:
        self._coordinator.close()
        self._history.close()

    def _reinforce(self, kind: str, count: int, seconds: float) -> bool:
        first = 1 + max(member.number for member in self._run.actors if member.kind == kind)
        for number in range(first, first + count):
            self.welcome(kind, number, self._run.start(Member(kind, number)))  # type: ignore[arg-type]
        return super()._reinforce(kind, count, seconds)


def run_in_process(
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
    kill: Callable[[int, Member, str], Member | None] = lambda *_: None,
    arrive: Callable[[int], Member | None] = lambda _: None,
) -> tuple[ServerOutcome, InProcess]:
    """A run without Ray; `kill` is told the number of every call, whom it goes to and what it asks, and may name a victim.

    `arrive` is told the number too, and may name somebody who joins.
    """
    run = InProcess(settings, kill, arrive)
    monkeypatch.setattr(Settings, "load", lambda self: _loaded(self.workload))
    monkeypatch.setattr(members, "ray", run)
    return run.train(), run


@cache
def _loaded(name: str) -> DividedWorkload:
    """A workload never changes: all processes of all runs may have the same."""
    return load_workload(name)
