"""The end of a rendezvous round, as decided by the node that keeps the store: which nodes start, and in which term.

Each round gives the workers a new store, so that no message of a dead attempt can reach the next one.
"""

import json
import secrets
import time
from collections.abc import Sequence

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are public

from holdfast.checkpoint.terms import Term
from holdfast.errors import HoldfastError
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes import quorum
from holdfast.supervise.nodes.connection import Answer, Connection, Greeting, heartbeats, read_json
from holdfast.supervise.nodes.node import Node
from holdfast.supervise.nodes.quorum import Arrival, Heartbeats
from holdfast.supervise.nodes.rendezvous import Peers, listen


class RoundCloser:
    """Closes the rounds of the nodes that meet in our store, which is at `own`."""

    def __init__(self, node: Node, own: str, checkpoints: Checkpoints) -> None:
        self._node, self._own, self._checkpoints = node, own, checkpoints
        self.server: TCPStore | None = None  # of the workers that started last

    def close_when_due(self, number: int, connection: Connection, last: Peers, heard: Heartbeats) -> None:
        """Close round `number` if its nodes wait for no others; `last` are the nodes that started last."""
        nodes = self._starting(_greetings_and_heartbeats(number, connection, last, heard), last, heard)
        if not nodes:
            return
        answer: Answer = {"nodes": nodes, "host": self._node.rank, "refused": refusal(nodes, self._node.of)}
        if not answer["refused"]:
            try:
                term = self._take_term(nodes, last)
            except HoldfastError as error:
                if all(node["term"] for node in nodes):
                    return  # the checkpoint store is away for a while: try again with the next look
                answer["refused"] = f"node {self._node.rank} cannot use the checkpoints: {error}"
            else:
                if term is None:
                    return  # other nodes continued without us: look for them
                self.server = listen(self._node.address)
                answer |= {"term": term.to_json(), "round": secrets.token_hex(6)}
                answer |= {"address": self._node.address, "port": self.server.port}
        connection.ask(lambda store: _close(store, number, answer))

    def _starting(self, greetings: Sequence[Greeting], last: Peers, heard: Heartbeats) -> list[Greeting]:
        """Return the nodes that start now, by number; none if they are to wait for others."""
        arrivals = [Arrival(greeting["node"], greeting["who"], greeting["term"] > 0) for greeting in greetings]
        node = self._node
        limits = {"of": node.of, "least": node.least}
        start = quorum.starting(arrivals, last.members, heard, time.monotonic(), **limits, lost_after=node.lost_after)
        names = {arrival.who for arrival in start or ()}
        return sorted((node for node in greetings if node["who"] in names), key=lambda node: node["node"])

    def _take_term(self, nodes: Sequence[Greeting], last: Peers) -> Term | None:
        """Return the term in which `nodes` start: the last one if they are the same nodes, otherwise a new one.

        If all nodes are here, their term follows the newest there is. A part of the nodes must take the term after its
        own, which fails if another part has taken that and continued.
        """
        if last.term and {node["who"] for node in nodes} == set(last.members) and last.term.where == self._own:
            return last.term
        before = max(node["term"] for node in nodes)
        if len(nodes) == self._node.of:
            newest = self._checkpoints.term()
            before = max(before, newest.number if newest else 0)
        term = Term(before + 1, secrets.token_hex(6), self._own, tuple(node["node"] for node in nodes))
        return term if self._checkpoints.take(term) else None


def refusal(nodes: Sequence[Greeting], of: int) -> str | None:
    """Return why these `nodes` cannot start together, or None."""
    numbers = [node["node"] for node in nodes]
    if len(set(numbers)) < len(numbers) or any(node["of"] != of for node in nodes):
        names = ", ".join(map(str, numbers))
        return f"the nodes that met have the numbers {names}: give each a --node-rank of its own."
    for name in nodes[0]["command"]:
        if len({json.dumps(node["command"].get(name)) for node in nodes}) > 1:
            return f"the nodes that met differ in {name}: give the same command on each."
    wrong = next((node for node in nodes if node["wrong"]), None)
    return f"node {wrong['node']} cannot use the checkpoints: {wrong['wrong']}" if wrong else None


def read_greetings(store: Store, number: int) -> list[Greeting]:
    """Return the greetings of the nodes that have come for round `number`."""
    count = store.add(f"came/{number}", 0)
    greetings = (read_json(store, f"came/{number}/{i}") for i in range(1, count + 1))
    return [greeting for greeting in greetings if greeting]


def _greetings_and_heartbeats(number: int, connection: Connection, last: Peers, heard: Heartbeats) -> list[Greeting]:
    """Return the greetings of round `number`, and update `heard` with the heartbeats of all supervisors."""

    def look(store: Store) -> tuple[dict[str, Greeting], dict[str, int]]:
        came = {greeting["who"]: greeting for greeting in read_greetings(store, number)}
        return came, heartbeats(store, [*came, *last.members])

    came, counts = connection.ask(look)
    heard.update(counts, time.monotonic())
    return list(came.values())


def _close(store: Store, number: int, answer: Answer) -> None:
    store.set(f"round/{number}", json.dumps(answer))
    if "term" in answer:
        store.set(f"token/{answer['term'][1]}", "")
    store.add("closed", 1)
