"""Where the nodes of a run meet: at the endpoint at first, and elsewhere once the node that kept that store was lost.

A term in the store of the checkpoints says where its nodes meet, so that a node that was lost and comes back finds
them. If nobody answers there, every node tries the others of the last start, the lowest number first, and those that
are left come together at the lowest that answers.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes.connection import CONNECTS_WITHIN, Connection, Unreachable, joined, listens
from holdfast.supervise.nodes.node import Node
from holdfast.supervise.nodes.peers import Peers

_COMES_UP_WITHIN = 60.0  # seconds for the first node to start
_SOON = 5.0


class Whereabouts:
    """Finds the others, for the supervisor `who`, which itself keeps a store at `own`."""

    def __init__(self, node: Node, who: str, own: str, checkpoints: Checkpoints) -> None:
        self._node, self._who, self._own, self._checkpoints = node, who, own, checkpoints
        self._seen: tuple[float, Term | None] = (0.0, None)  # when we looked for terms last, and what there was
        self.look_every = min(_SOON, node.lost_after / 2)  # seconds

    def find(self, last: Peers, meanwhile: Callable[[], None]) -> Connection:
        """A connection to where the nodes meet; `last` are those that we started with last."""
        deadline = time.monotonic() + _COMES_UP_WITHIN
        while True:
            for where, token in self._places(last):
                if found := self._reached(where, token):
                    return found
            meanwhile()
            if time.monotonic() > deadline:
                raise BadInput(
                    f"nobody listens at the rendezvous {self._node.endpoint}: start the node that has this address."
                )
            time.sleep(0.1)

    def elsewhere(self, here: str, last: Peers) -> Connection | None:
        """A connection to where the others may meet by now, if that is likelier than here."""
        for where, token in self._places(last):
            if where == here:
                return None
            if found := self._reached(where, token):
                return found
        return None

    def _places(self, last: Peers) -> list[tuple[str, str | None]]:
        """Where the nodes may meet, the likeliest first; and the token of a term, if it must be found there."""
        term, places = self._newest_term(), []
        if term and (last.term is None or term.number > last.term.number):
            places.append((term.where, term.token))
        if last.term is None:
            return [*places, (joined(*self._node.meets_at), None)]
        others = (last.where[node] for node in sorted(last.where))
        return [*places, *((where, None) for where in (last.term.where, *others))]

    def _newest_term(self) -> Term | None:
        looked, term = self._seen
        if time.monotonic() - looked >= self.look_every:
            with suppress(HoldfastError):  # what was seen last, then
                term = self._checkpoints.term()
            self._seen = time.monotonic(), term
        return term

    def _reached(self, where: str, token: str | None) -> Connection | None:
        """A connection to the store there, if somebody keeps one; and if it is the one that is meant."""
        if where != self._own and not listens(where):
            return None
        found = Connection(where, self._who, self._node.lost_after)
        keys = ["rendezvous", *([f"token/{token}"] if token else ())]
        with suppress(Unreachable):
            if found.ask(lambda store: store.check(keys), 2 * CONNECTS_WITHIN):
                return found
        found.end()
        return None
