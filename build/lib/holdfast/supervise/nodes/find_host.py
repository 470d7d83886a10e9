"""The search for the store in which the nodes of a run meet; it moves if the node that hosts it is lost.

At first the nodes meet at the endpoint (--rendezvous). Later they meet at the address in the newest term, the numbered
group of nodes in the checkpoint store, so that a lost node that comes back finds the others. If no node answers there,
a node tries the addresses of the nodes of the last start, in the order of their numbers.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes.connection import CONNECTS_WITHIN, Connection, Unreachable, is_listening, join_address
from holdfast.supervise.nodes.rendezvous import Node, Peers

_COMES_UP_WITHIN = 60.0  # seconds for the first node to start
_SOON = 5.0
_RESTS = 4  # looks in which a store that did not answer is left alone: each would take seconds, and delay the others


class HostFinder:
    """A search for the TCPStore in which all nodes meet; `own` is the address of this node's store."""

    def __init__(self, node: Node, who: str, own: str, checkpoints: Checkpoints) -> None:
        self._node, self._who, self._own, self._checkpoints = node, who, own, checkpoints
        self._seen: tuple[float, Term | None] = (0.0, None)  # time of the last look for terms, and its result
        self._failed: dict[str, float] = {}  # by address of a store: when it did not answer
        self.look_every = min(_SOON, node.lost_after / 2)  # seconds

    def find(self, last: Peers, meanwhile: Callable[[], None]) -> Connection:
        """Return a connection to the store in which the nodes meet; call `meanwhile` repeatedly while waiting for it.

        Raise BadInput if no store is found within a minute. `last` are the nodes of the previous start."""
        deadline = time.monotonic() + _COMES_UP_WITHIN
        while True:
            for where, token in self._places(last):
                if not self._failed_lately(where) and (connection := self._connect(where, token)):
                    return connection
            meanwhile()
            if time.monotonic() > deadline:
                raise BadInput(
                    f"no node listens at the rendezvous {self._node.endpoint}: start the node that has this address."
                )
            time.sleep(0.1)

    def elsewhere(self, here: str, last: Peers) -> Connection | None:
        """Return a connection to a store that `find` would try before the store at `here`; None if none answers."""
        for where, token in self._places(last):
            if where == here:
                return None
            if not self._failed_lately(where) and (connection := self._connect(where, token)):
                return connection
        return None

    def avoid(self, where: str) -> None:
        """Do not try the store at `where` for a while, because it did not answer."""
        self._failed[where] = time.monotonic()

    def _failed_lately(self, where: str) -> bool:
        return where in self._failed and time.monotonic() - self._failed[where] < _RESTS * self.look_every

    def _places(self, last: Peers) -> list[tuple[str, str | None]]:
        """Return addresses where the nodes may meet, best first, each with the token that its store must have, if any."""
        looked, term = self._seen
        if time.monotonic() - looked >= self.look_every:
            with suppress(HoldfastError):  # keep the last result
                term = self._checkpoints.term()
            self._seen = time.monotonic(), term
        places = []
        if term and (last.term is None or term.number > last.term.number):
            places.append((term.where, term.token))
        if last.term is None:
            return [*places, (join_address(*self._node.meets_at), None)]
        others = (last.where[node] for node in sorted(last.where))
        return [*places, *((where, None) for where in dict.fromkeys((last.term.where, *others)))]

    def _connect(self, where: str, token: str | None) -> Connection | None:
        if where != self._own and not is_listening(where):
            return None
        connection = Connection(where, self._who, self._node.lost_after)
        keys = ["rendezvous", *([f"token/{token}"] if token else ())]
        try:
            if connection.ask(lambda store: store.check(keys), 2 * CONNECTS_WITHIN):
                return connection
        except Unreachable:
            self.avoid(where)
        connection.end()
        return None
