"""Calls to actors of a run: every wait for them ends, and says who did not answer and why."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from holdfast.errors import HoldfastError
from holdfast.server.shard import BlocksMoved

Who = TypeVar("Who", bound=Hashable)
TICK = 0.05  # seconds between two looks at what else happens while we wait


class Member(NamedTuple):
    """A process of a run: a node, a worker or the controller, and which."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" if self.kind != "controller" else self.kind


class Answers(NamedTuple):
    """What came of some calls: results, and for whoever did not answer the reason."""

    results: dict[Any, Any]
    missing: dict[Any, str]


def call(actor: "ActorHandle[Any]", method: str, *arguments: object) -> "ObjectRef[Any]":
    """Begin a call."""
    return getattr(actor, method).remote(*arguments)  # type: ignore[no-any-return]


def gather(
    calls: Mapping[Who, "ObjectRef[Any]"],
    given_up: Callable[[], Mapping[Who, str]],
    patience: float,
    *,
    first: bool = False,
) -> Answers:
    """Wait for all of these calls, but no longer for whom `given_up` names, and for nobody beyond our patience.

    With `first` it is enough that something came of one of them.
    What an actor raised is raised here, but for `Moved`, which is an answer; that it is dead or out of reach is told.
    """
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
    return Answers(results, missing)


def _collect(ref: "ObjectRef[Any]", who: Who, results: dict[Any, Any], missing: dict[Any, str]) -> None:
    try:
        results[who] = ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, BlocksMoved):
            results[who] = cause
            return
        if isinstance(cause, HoldfastError):
            raise type(cause)(*cause.args) from None
        raise
    except RayError as error:  # its process or its machine
        missing[who] = reason(error)


def reason(error: RayError) -> str:
    """Why a call failed, in few words."""
    return {"ActorDiedError": "its process died", "ActorUnavailableError": "it is out of reach"}.get(
        type(error).__name__, f"Ray says {type(error).__name__}"
    )
