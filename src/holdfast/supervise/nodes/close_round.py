"""The end of a rendezvous round: the node that hosts the store decides which nodes start, and in which term.

Nodes that have met before also start without nodes that were silent for so long that they count as lost. The remaining
nodes then need a new term: a number for a group of nodes that may write checkpoints. Of two groups that cannot reach
each other, only one can claim the next number. Each round gives the workers a new store, so that they cannot receive
messages of a dead attempt.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are public

from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.runs.arguments import changes
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes.connection import Connection, NodeRegistration, RoundResult, heartbeats, read_json
from holdfast.supervise.nodes.rendezvous import Node, Peers, allow_connections, listen

# Of two supervisors that claim the same node number, one may be the dead predecessor of the other, now silent.
ALIVE_WITHIN, SURELY = 1.5, 5  # seconds since the last heartbeat, and number of heartbeats
LISTENS = 2.0  # seconds between two updates; a longer gap is a pause of our own, in which we could not listen


class Arrival(NamedTuple):
    """A supervisor at the rendezvous: its node number, its unique name, and whether it has met other nodes before."""

    node: int
    who: str
    has_met: bool


@dataclass(slots=True)
class Heartbeats:
    """The times of the last heartbeats of the supervisors on all nodes, to find silent supervisors."""

    _counts: dict[str, int] = field(default_factory=dict)
    _times: dict[str, float] = field(default_factory=dict)
    _changes: dict[str, int] = field(default_factory=dict)
    _updated: float | None = None

    def update(self, counts: Mapping[str, int], now: float) -> None:
        """Record the heartbeat counter of each supervisor at time `now`.

        If this process itself was paused, the pause does not count as silence of the other supervisors."""
        gap, self._updated = now - (now if self._updated is None else self._updated), now
        if gap > LISTENS:
            self._times = {who: time + gap for who, time in self._times.items()}
        for who, count in counts.items():
            if self._counts.get(who) != count:
                self._counts[who], self._times[who] = count, now
                self._changes[who] = self._changes.get(who, 0) + 1

    def expect_silence(self, who: str, since: float) -> None:
        """Count the supervisor `who` as silent since the time `since`, until its first heartbeat."""
        self._counts[who], self._times[who] = 0, since

    def silence(self, who: str, now: float) -> float:
        """Return the seconds since the last heartbeat of the supervisor `who`; 0 if there was none."""
        return now - self._times.get(who, now)

    def is_surely_alive(self, who: str, now: float) -> bool:
        """Return True if the supervisor `who` has sent several heartbeats, and the last one recently."""
        return self._changes.get(who, 0) >= SURELY and self.silence(who, now) < ALIVE_WITHIN


def silent_nodes(members: Mapping[str, int], heartbeats: Heartbeats, lost_after: float, now: float) -> list[int]:
    """Return the nodes without a heartbeat for `lost_after` seconds; `members` maps supervisors to node numbers."""
    return sorted(node for who, node in members.items() if heartbeats.silence(who, now) >= lost_after)


def starting(
    arrivals: Sequence[Arrival],
    members: Mapping[str, int],
    heartbeats: Heartbeats,
    now: float,
    *,
    of: int,
    least: int,
    lost_after: float,
) -> Sequence[Arrival] | None:
    """Return the nodes that start now, or None to wait for more nodes.

    `members` are the supervisors of the last start, `of` is the number of all nodes, and `least` the fewest nodes that
    may start. Two arrivals with the same node number are both returned, for the caller to report."""
    alive = [arrival for arrival in arrivals if heartbeats.silence(arrival.who, now) < lost_after]
    nodes = {arrival.node for arrival in alive}
    if len(nodes) < len(alive):
        return alive if all(heartbeats.is_surely_alive(arrival.who, now) for arrival in alive) else None
    if len(alive) >= of:
        return alive
    if len(alive) < least or not any(arrival.has_met for arrival in alive):
        return None
    absent = set(range(of)) - nodes  # a node that is not in `members` was lost before
    may_come = (who for who, node in members.items() if node in absent)
    return alive if all(heartbeats.silence(who, now) >= lost_after for who in may_come) else None


class RoundCloser:
    """The decision of a rendezvous host: which nodes start together. `own` is the address of the host's store."""

    def __init__(self, node: Node, own: str, checkpoints: Checkpoints) -> None:
        self._node, self._own, self._checkpoints = node, own, checkpoints
        self.server: TCPStore | None = None  # of the workers that started last
        self._claims: set[Term] = set()  # its own; perhaps the nodes have never heard of the last ones

    def close_when_due(self, number: int, connection: Connection, last: Peers, heard: Heartbeats) -> None:
        """Announce which nodes start together in rendezvous `number`, once enough nodes have registered.

        `last` are the nodes of the previous start, and `heard` the times of heartbeats."""

        def look(store: Store) -> tuple[dict[str, NodeRegistration], dict[str, int]]:
            came = {greeting["who"]: greeting for greeting in read_greetings(store, number)}
            return came, heartbeats(store, [*came, *last.members])

        came, counts = connection.ask(look)
        heard.update(counts, time.monotonic())
        nodes = self._starting(list(came.values()), last, heard)
        if not nodes:
            return
        answer: RoundResult = {"nodes": nodes, "host": self._node.rank, "refused": refusal(nodes, self._node.of)}
        if not answer["refused"]:
            try:
                address = self._node.address
            except BadInput:
                return  # this machine has no network: a term that it claimed would keep the others from continuing
            try:
                term = self._take_term(nodes, last)
                attempt = self._checkpoints.take_attempt(max(node["attempt"] for node in nodes)) if term else 0
            except HoldfastError as error:
                if all(node["term"] for node in nodes):
                    return  # the checkpoint store is away for a while: try again with the next look
                answer["refused"] = f"node {self._node.rank} cannot use the checkpoints: {error}"
            else:
                if term is None:
                    return  # other nodes continued without us: look for them
                allow_connections(sum(node["workers"] for node in nodes))
                self.server = listen(address)
                answer |= {"term": term.to_json(), "attempt": attempt, "round": secrets.token_hex(6)}
                answer |= {"address": address, "port": self.server.port}
        connection.ask(lambda store: _close(store, number, answer))

    def _starting(
        self, greetings: Sequence[NodeRegistration], last: Peers, heard: Heartbeats
    ) -> list[NodeRegistration]:
        arrivals = [Arrival(greeting["node"], greeting["who"], greeting["term"] > 0) for greeting in greetings]
        node = self._node
        limits = {"of": node.of, "least": node.least}
        start = starting(arrivals, last.members, heard, time.monotonic(), **limits, lost_after=node.lost_after)
        names = {arrival.who for arrival in start or ()}
        return sorted((node for node in greetings if node["who"] in names), key=lambda node: node["node"])

    def _take_term(self, nodes: Sequence[NodeRegistration], last: Peers) -> Term | None:
        """Return the term (numbered group of nodes) of this start; None if other nodes have claimed its number already.

        If the nodes are the same as in the `last` start, they keep their term, unless a newer term was claimed. Otherwise
        claim the next number, also after a claim of this host that got no answer, because that claim may stand."""
        before = max(node["term"] for node in nodes)
        is_unheard = any(claim.number > before for claim in self._claims)
        is_same = {node["who"] for node in nodes} == set(last.members)
        if last.term and is_same and last.term.where == self._own and not is_unheard:
            return last.term if self._checkpoints.term() == last.term else None
        if len(nodes) == self._node.of or is_unheard:
            newest = self._checkpoints.term()
            if newest and (len(nodes) == self._node.of or newest in self._claims):
                before = max(before, newest.number)
        return self.claim(before + 1, tuple(node["node"] for node in nodes))

    def claim(self, number: int, nodes: tuple[int, ...]) -> Term | None:
        """Claim the term `number` for `nodes`, and return it; return None if other nodes have claimed it already.

        If this raises an error, the claim may stand nevertheless, and is followed by the next."""
        term = Term(number, secrets.token_hex(6), self._own, nodes)
        self._claims.add(term)
        return term if self._checkpoints.take(term) else None


def refusal(nodes: Sequence[NodeRegistration], of: int) -> str | None:
    """Return the reason why `nodes` cannot start together; None if they can. `of` is the number of all nodes."""
    numbers = [node["node"] for node in nodes]
    if len(set(numbers)) < len(numbers) or any(node["of"] != of for node in nodes):
        names = ", ".join(map(str, numbers))
        return f"the nodes that met have the numbers {names}: give each a --node-rank of its own."
    for name in nodes[0]["command"]:
        if len({json.dumps(node["command"].get(name)) for node in nodes}) > 1:
            return f"the nodes that met differ in {_difference(name, nodes)}: give the same command on each."
    wrong = next((node for node in nodes if node["wrong"]), None)
    return f"node {wrong['node']} cannot use the checkpoints: {wrong['wrong']}" if wrong else None


def _difference(name: str, nodes: Sequence[NodeRegistration]) -> str:
    """Return the name of a setting that differs between `nodes`; of the script's arguments, which one, and its values."""
    first = nodes[0]
    other = next(node for node in nodes if node["command"].get(name) != first["command"].get(name))
    differences = changes(first["command"][name], other["command"][name]) if name == "args" else []
    if not differences:
        return name
    change = differences[0]
    here, there = (value if value is not None else "nothing" for value in (change.was, change.now))
    argument = change.name.removeprefix("argument ")
    return f"the script's argument {argument} ({here} on node {first['node']}, {there} on node {other['node']})"


def read_greetings(store: Store, number: int) -> list[NodeRegistration]:
    keys = [f"came/{number}/{i}" for i in range(1, store.add(f"came/{number}", 0) + 1)]
    if keys and store.check(keys):
        return [json.loads(text) for text in store.multi_get(keys)]
    return [greeting for key in keys if (greeting := read_json(store, key))]  # one node has not written its own yet


def _close(store: Store, number: int, answer: RoundResult) -> None:
    """Announce the result of rendezvous `number`: last, so that a node that has it finds this rendezvous closed."""
    if "term" in answer:
        store.set(f"token/{answer['term'][1]}", "")
    store.add("closed", 1)
    store.set(f"round/{number}", json.dumps(answer))
