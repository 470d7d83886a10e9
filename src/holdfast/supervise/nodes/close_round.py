"""How the node that keeps the store closes a round: it decides when those that have come start, and as which term.

It gives the workers of each round a store of their own, so that nothing that a dead attempt left behind can be read by
the next one.
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
from holdfast.supervise.nodes.connection import Answer, Connection, Greeting, beats, said
from holdfast.supervise.nodes.node import Node, listen
from holdfast.supervise.nodes.peers import Peers
from holdfast.supervise.nodes.quorum import Came, Heard


class Closing:
    """Closes the rounds of the nodes that meet in our store, which is at `own`."""

    def __init__(self, node: Node, own: str, checkpoints: Checkpoints) -> None:
        self._node, self._own, self._checkpoints = node, own, checkpoints
        self.server: TCPStore | None = None  # of the workers that started last

    def close_when_due(self, number: int, at: Connection, last: Peers, heard: Heard) -> None:
        """Start those that have come for this round, if they wait for nobody else; `last` are those that started last."""
        starting = self._due(_listened(number, at, last, heard), last, heard)
        if not starting:
            return
        answer: Answer = {"nodes": starting, "host": self._node.rank, "refused": refusal(starting, self._node.of)}
        if not answer["refused"]:
            try:
                term = self._taken(starting, last)
            except HoldfastError as error:
                if all(each["term"] for each in starting):
                    return  # a store that is away for a while: the next look tries again
                answer["refused"] = f"node {self._node.rank} cannot use the checkpoints: {error}"
            else:
                if term is None:
                    return  # others went on without us: they are to be looked for
                self.server = listen(self._node.address)
                answer |= {"term": term.to_json(), "round": secrets.token_hex(6)}
                answer |= {"address": self._node.address, "port": self.server.port}
        at.ask(lambda store: _close(store, number, answer))

    def _due(self, greetings: Sequence[Greeting], last: Peers, heard: Heard) -> list[Greeting]:
        """Those that start now, by their numbers; nobody if they are to wait for others."""
        came = [Came(each["node"], each["who"], each["term"] > 0) for each in greetings]
        node, now = self._node, time.monotonic()
        limits = {"of": node.of, "least": node.least}
        there = quorum.present(came, last.members, heard, now, **limits, lost_after=node.lost_after)
        names = {each.who for each in there or ()}
        return sorted((each for each in greetings if each["who"] in names), key=lambda each: each["node"])

    def _taken(self, starting: Sequence[Greeting], last: Peers) -> Term | None:
        """The term as which these start: that of the last time if they are the same, else one that we take.

        If all nodes are there, theirs follows whatever term there is. A part of them must take the one after the term
        that it was in: it fails if another part has taken that and gone on.
        """
        if last.term and {each["who"] for each in starting} == set(last.members) and last.term.where == self._own:
            return last.term
        before = max(each["term"] for each in starting)
        if len(starting) == self._node.of:
            newest = self._checkpoints.term()
            before = max(before, newest.number if newest else 0)
        term = Term(before + 1, secrets.token_hex(6), self._own, tuple(each["node"] for each in starting))
        return term if self._checkpoints.take(term) else None


def refusal(starting: Sequence[Greeting], of: int) -> str | None:
    """Why these nodes cannot start together."""
    numbers = [each["node"] for each in starting]
    if len(set(numbers)) < len(numbers) or any(each["of"] != of for each in starting):
        several = ", ".join(map(str, numbers))
        return f"the nodes that met call themselves {several}: give each a --node-rank of its own."
    for name in starting[0]["command"]:
        if len({json.dumps(each["command"].get(name)) for each in starting}) > 1:
            return f"the nodes that met differ in {name}: give the same command on each."
    wrong = next((each for each in starting if each["wrong"]), None)
    return f"node {wrong['node']} cannot use the checkpoints: {wrong['wrong']}" if wrong else None


def greetings(store: Store, number: int) -> list[Greeting]:
    """What those said that have come for this round."""
    said_by_each = (said(store, f"came/{number}/{i}") for i in range(1, store.add(f"came/{number}", 0) + 1))
    return [each for each in said_by_each if each]


def _listened(number: int, at: Connection, last: Peers, heard: Heard) -> list[Greeting]:
    """All that have come for this round; and note which supervisors are alive."""

    def look(store: Store) -> tuple[dict[str, Greeting], dict[str, int]]:
        came = {each["who"]: each for each in greetings(store, number)}
        return came, beats(store, [*came, *last.members])

    came, counts = at.ask(look)
    heard.note(counts, time.monotonic())
    return list(came.values())


def _close(store: Store, number: int, answer: Answer) -> None:
    store.set(f"round/{number}", json.dumps(answer))
    if "term" in answer:
        store.set(f"token/{answer['term'][1]}", "")
    store.add("closed", 1)
