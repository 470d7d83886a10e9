"""What the checks of a served run read: what its controller, nodes and workers wrote, each in its own order."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import NamedTuple

from holdfast.events import (
    Applied,
    Chosen,
    Commit,
    Done,
    Dropped,
    Event,
    Iterate,
    Joined,
    Lost,
    Malformed,
    Moved,
    Open,
    Other,
    Pushed,
    Restored,
    Serve,
    Struck,
    What,
)
from holdfast.finding import CannotTell, where
from holdfast.history.log import Torn
from holdfast.server.audit.controller_replay import Replay, replay_controller

# What each kind of writer can know.
SAYS: Mapping[str, tuple[type, ...]] = {
    "controller": (Serve, Iterate, Chosen, Commit, Struck, Lost, Restored, Dropped, Joined, Moved, Done),
    "node": (Applied, Chosen, Restored),
    "worker": (Pushed,),
}
# No run has more, and a forged plan may say anything.
_BLOCKS = 1 << 27
_MEMBERS = 1 << 20
ANYBODY = (Open, Other, Malformed)
SERVED = (Serve, Iterate, Pushed, Applied, Chosen, Struck, Lost, Restored, Dropped, Joined, Moved)


class ServerWriter(NamedTuple):
    """Who writes a history of a served run: a controller, a node or a worker, and which."""

    kind: str
    number: int


@cache
def writer_of(who: str) -> ServerWriter | None:
    """The member of a served run that writes under this name."""
    if who == "controller":
        return ServerWriter("controller", 0)
    found = re.fullmatch(r"(node|worker)-(0|[1-9][0-9]{0,8})", who)
    return ServerWriter(found[1], int(found[2])) if found else None


class ServedLedger:
    """A served run as its writers tell it."""

    def __init__(self, torn: Sequence[Torn] = ()) -> None:
        self.torn = torn
        self.events = 0
        self.wrong: list[str] = []  # lines that cannot be right
        self.is_served = False
        self._told: defaultdict[ServerWriter, list[What]] = defaultdict(list)

    def take(self, event: Event, file: str | None = None) -> None:
        """Add an event, from the file of this name if it was read from one."""
        who, what = event.who, event.what
        self.events += 1
        if file not in (None, who):
            self.wrong.append(f"{file}.jsonl has a line of {who}")
        writer = writer_of(who)
        if isinstance(what, Malformed):
            self.wrong.append(f"{what.kind:.40} of {who}{where(what, file)}: {what.why}")
        elif writer is None or not isinstance(what, ANYBODY + SAYS[writer.kind]):
            self.wrong.append(f"{who} cannot know of this: {event.kind:.40}")
        if writer is not None:
            self._tell(writer, who, what)

    def _tell(self, writer: ServerWriter, who: str, what: What) -> None:
        told = self._told[writer]
        if not told and not isinstance(what, Open):
            self.wrong.append(f"{who} wrote before it had opened its history")
        told.append(what)
        self.is_served = self.is_served or isinstance(what, SERVED)

    @property
    def writers(self) -> Sequence[ServerWriter]:
        """Everybody of whom there is a history."""
        return sorted(self._told)

    def told(self, kind: str, number: int = 0) -> Sequence[What]:
        """What one of them wrote, in order."""
        return self._told.get(ServerWriter(kind, number), ())

    @cached_property
    def plans(self) -> Sequence[Serve]:
        """What every life of the controller set out to do."""
        return [what for what in self.told("controller") if isinstance(what, Serve)]

    @property
    def plan(self) -> Serve:
        """What is to be done, as the first controller says."""
        if not self.plans:
            raise CannotTell("there is no history of the controller, which says what was to be trained")
        plan = self.plans[0]
        if not (1 <= plan.nodes <= plan.blocks and plan.workers and plan.rounds):
            raise CannotTell("the plan of the controller says nothing that can be trained")
        if plan.blocks > _BLOCKS or max(plan.nodes, plan.workers) > _MEMBERS:
            sizes = f"{plan.blocks} blocks, {plan.nodes} nodes and {plan.workers} workers"
            raise CannotTell(f"the plan of the controller says {sizes}, which no run has")
        return plan

    @cached_property
    def applied(self) -> Mapping[int, Mapping[int, Sequence[Applied]]]:
        """By the number of a round and by node, what was applied."""
        found: defaultdict[int, defaultdict[int, list[Applied]]] = defaultdict(lambda: defaultdict(list))
        for writer in self.writers:
            for what in self._told[writer]:
                if isinstance(what, Applied) and writer.kind == "node":
                    found[self.number(what)][writer.number].append(what)
        return found

    @cached_property
    def pushed(self) -> Mapping[tuple[int, int], Sequence[tuple[int, Pushed]]]:
        """By the number of a round and by part of the input, what was pushed, and by which worker."""
        found: defaultdict[tuple[int, int], list[tuple[int, Pushed]]] = defaultdict(list)
        for writer in self.writers:
            for what in self._told[writer]:
                if isinstance(what, Pushed) and writer.kind == "worker":
                    found[self.number(what), what.part].append((writer.number, what))
        return found

    def require_nodes(self) -> None:
        """Refuse to judge what nodes did where the history of one that held blocks is not there: it is no lie."""
        held = {node for tenure in self.replay.tenures for node in tenure.held}
        if absent := held - {writer.number for writer in self.writers if writer.kind == "node"}:
            raise CannotTell(f"there is no history of node-{min(absent)}")

    def number(self, what: Applied | Pushed | Dropped) -> int:
        """The number of a round, counted from the start of the run."""
        return what.iteration * self.plan.rounds + what.round

    @cached_property
    def replay(self) -> Replay:
        """What the controller tells, followed from the start of the run to its end."""
        nodes = {writer.number: self._told[writer] for writer in self.writers if writer.kind == "node"}
        return replay_controller(self.plan, self.told("controller"), nodes)
