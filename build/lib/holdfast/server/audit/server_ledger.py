"""The events of a run, grouped by the process that wrote them, for the checks of the audit."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import NamedTuple, get_args

from holdfast import events
from holdfast.finding import CannotTell, where
from holdfast.history.log import TornLine
from holdfast.server.audit.controller_replay import Replay, replay_controller

# The events that each kind of process writes.
WRITES: Mapping[str, tuple[type, ...]] = {
    "controller": tuple({events.Commit, events.Done, *get_args(events.ServerEvent)} - {events.Applied, events.Pushed}),
    "node": (events.Applied, events.Chosen, events.Restored),
    "worker": (events.Pushed,),
}
_BLOCKS, _MEMBERS = 1 << 27, 1 << 20  # larger than any run; a forged plan may contain any number
ANYBODY = (events.Open, events.Other, events.Malformed)
SERVED = get_args(events.ServerEvent)


class ServerWriter(NamedTuple):
    kind: str
    number: int


@cache
def writer_of(who: str) -> ServerWriter | None:
    """Return the process named `who` in events, such as "node-3"; None if the name is invalid."""
    if who == "controller":
        return ServerWriter("controller", 0)
    match = re.fullmatch(r"(node|worker)-(0|[1-9][0-9]{0,8})", who)
    return ServerWriter(match[1], int(match[2])) if match else None


class ServedLedger:
    """All events of a run on the parameter server, grouped by the process that wrote them."""

    def __init__(self, torn: Sequence[TornLine] = ()) -> None:
        self.torn = torn
        self.events = 0
        self.wrong: list[str] = []  # lines that are wrong
        self.is_served = False
        self._events: defaultdict[ServerWriter, list[events.What]] = defaultdict(list)

    def take(self, event: events.Event, file: str | None = None) -> None:
        who, what = event.who, event.what
        self.events += 1
        if file not in (None, who):
            self.wrong.append(f"{file}.jsonl has a line by {who}")
        writer = writer_of(who)
        if isinstance(what, events.Malformed):
            self.wrong.append(f"{what.kind:.40} of {who}{where(what, file)}: {what.why}")
        elif writer is None or not isinstance(what, ANYBODY + WRITES[writer.kind]):
            self.wrong.append(f"{who} cannot have written {event.kind:.40}")
        if writer is not None:
            if not self._events[writer] and not isinstance(what, events.Open):
                self.wrong.append(f"{who} wrote before it opened its history")
            self._events[writer].append(what)
            self.is_served = self.is_served or isinstance(what, SERVED)

    @property
    def writers(self) -> Sequence[ServerWriter]:
        return sorted(self._events)

    def events_of(self, kind: str, number: int = 0) -> Sequence[events.What]:
        """Return, in order, all events that one process wrote, such as node 2 (`kind` "node" and `number` 2)."""
        return self._events.get(ServerWriter(kind, number), ())

    @cached_property
    def plans(self) -> Sequence[events.Serve]:
        return [what for what in self.events_of("controller") if isinstance(what, events.Serve)]

    @property
    def plan(self) -> events.Serve:
        if not self.plans:
            raise CannotTell("there is no history of the controller, which has the plan")
        plan = self.plans[0]
        if not (1 <= plan.nodes <= plan.blocks and plan.workers and plan.rounds):
            raise CannotTell("the plan of the controller cannot be trained")
        if plan.blocks > _BLOCKS or max(plan.nodes, plan.workers) > _MEMBERS:
            sizes = f"{plan.blocks} blocks, {plan.nodes} nodes and {plan.workers} workers"
            raise CannotTell(f"the plan of the controller has {sizes}, more than any run")
        return plan

    @cached_property
    def applied(self) -> Mapping[int, Mapping[int, Sequence[events.Applied]]]:
        """The events in which nodes recorded that they applied updates, by round number and node number."""
        applied: defaultdict[int, defaultdict[int, list[events.Applied]]] = defaultdict(lambda: defaultdict(list))
        for writer in self.writers:
            for what in self._events[writer]:
                if isinstance(what, events.Applied) and writer.kind == "node":
                    applied[self.number(what)][writer.number].append(what)
        return applied

    @cached_property
    def pushed(self) -> Mapping[tuple[int, int], Sequence[tuple[int, events.Pushed]]]:
        """The pushed updates, as pairs of worker number and event, by round number and part of the training data."""
        pushed: defaultdict[tuple[int, int], list[tuple[int, events.Pushed]]] = defaultdict(list)
        for writer in self.writers:
            for what in self._events[writer]:
                if isinstance(what, events.Pushed) and writer.kind == "worker":
                    pushed[self.number(what), what.part].append((writer.number, what))
        return pushed

    def require_nodes(self) -> None:
        held = {node for tenure in self.replay.tenures for node in tenure.held}
        if absent := held - {writer.number for writer in self.writers if writer.kind == "node"}:
            raise CannotTell(f"there is no history of node-{min(absent)}")

    def number(self, what: events.Applied | events.Pushed | events.Dropped) -> int:
        """Return the round (update of the model) of the event `what`, counted from the start of the run."""
        return what.iteration * self.plan.rounds + what.round

    @cached_property
    def replay(self) -> Replay:
        nodes = {writer.number: self._events[writer] for writer in self.writers if writer.kind == "node"}
        return replay_controller(self.plan, self.events_of("controller"), nodes)
