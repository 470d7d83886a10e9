"""How several nodes meet before each start, and meet again when some of them, or the place where they met, are lost.

Each keeps a store, at the address at which the others reach it; they meet in the one at the endpoint that was given.
There each says that it has come. The node that keeps this store closes the round (`closing.py`): it names those that
start, the attempt, a name for this round that no other has, and a new store for the workers.

If the node that keeps the store is lost, the others find each other at another (`whereabouts.py`). Those that are left
start without the lost ones only if they take the next term in the store of the checkpoints (`checkpoint/terms.py`): of
two parts of a run that do not reach each other one goes on, and the other waits.

Whoever reaches these stores, or may write to the store of the checkpoints, is trusted with the run. We listen on the
address that was given, or from which it is reached, and on no other; keep all machines but the nodes of the run away
from it, and from the ports of its workers.
"""

import functools
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousTimeoutError

from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.nodes.close_round import Closing, greetings
from holdfast.supervise.nodes.connection import Answer, Connection, Greeting, Unreachable, end_all, joined, said
from holdfast.supervise.nodes.find_host import Whereabouts
from holdfast.supervise.nodes.node import Node, listen, several
from holdfast.supervise.nodes.peers import OtherNodes
from holdfast.supervise.nodes.quorum import Heard
from holdfast.supervise.nodes.rendezvous import Rendezvous, RoundInfo, RunEnded

_MEETS_WITHIN = 600.0
_SPEAKS_WITHIN = 60.0  # seconds for a node to look for the checkpoints, and say what it found
_SAYS_AFTER = 10.0
_LEAVES_WITHIN = 10.0
_ENDS_WITHIN = 1.0
_LOOK = 0.02


class Nodes(Rendezvous):
    """The rendezvous of several nodes, which keep the numbers that the user gave them.

    `command` is what must be the same on all of them.
    """

    def __init__(self, node: Node, command: Mapping[str, Any], checkpoints: Checkpoints) -> None:
        super().__init__()
        self._node, self._command, self._checkpoints = node, command, checkpoints
        self._who = f"{node.rank}-{secrets.token_hex(6)}"
        self._kept, self._own = _kept_by(node)  # our own store, in which the others may meet; and where it is
        self._whereabouts = Whereabouts(node, self._who, self._own, checkpoints)
        self._closing = Closing(node, self._own, checkpoints)
        self._at: Connection | None = None  # to the store in which we meet
        self._heard = Heard()
        self._awaited = self._round = 0  # the round we have come for; the one that was closed with us
        self._together: set[str] = set()  # the supervisors that are in that, by their names
        self._since = self._looked = 0.0  # when we began to wait for others; when we last looked for the run's end
        self._has_said = False  # for whom we wait

    @property
    def _keeps_store(self) -> bool:
        """Whether it is in our store that the nodes meet."""
        return self._at is not None and self._at.where == self._own

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting, self._has_said = True, False
        self._since = self._looked = time.monotonic()
        try:
            answer = self._meet(time.monotonic() + _MEETS_WITHIN)
        finally:
            self.waiting = False
        server = self._closing.server if self._keeps_store else None
        self.peers = OtherNodes(self._node, self._round, answer, self._connection(), self._heard, server)
        return self._begin(self._agreed(answer), answer["address"], answer["port"])

    def _agreed(self, answer: Answer) -> RoundInfo:
        return RoundInfo(
            attempt=max(each["attempt"] for each in answer["nodes"]),
            round=answer["round"],
            address=self._node.address,
            nodes=tuple(each["node"] for each in answer["nodes"]),
            workers=tuple(each["workers"] for each in answer["nodes"]),
            host=answer["host"],
            term=Term.from_json(answer["term"]).number,
            node=self._node.rank,
        )

    def _meet(self, deadline: float) -> Answer:
        """Come to where the others are, until a round is closed that we are in."""
        while time.monotonic() < deadline:
            self._meanwhile()
            try:
                if self._at is None:
                    self._come_to(self._whereabouts.find(self.peers, self._meanwhile))
                if answer := self._await(time.monotonic() + self._whereabouts.look_every):
                    self._check(answer)
                    return answer
                if found := self._whereabouts.elsewhere(self._connection().where, self.peers):
                    self._part()
                    self._come_to(found)
            except Unreachable:
                self._part()
        raise RendezvousTimeoutError

    def _meanwhile(self) -> None:
        """What is done while we wait: see whether the run has ended without us, and say once for whom we wait."""
        now = time.monotonic()
        if now - self._looked >= self._whereabouts.look_every:
            if (verdict := self.ended()) is not None:
                raise RunEnded(verdict)
            self._looked = time.monotonic()
        if not self._has_said and now - self._since >= _SAYS_AFTER:
            self._has_said = True
            self.say(self._awaits())

    def _awaits(self) -> str:
        came = {self._node.rank}
        if self._at is not None and self._awaited:
            awaited = self._awaited
            with suppress(Unreachable):
                came |= {each["node"] for each in self._at.ask(lambda store: greetings(store, awaited))}
        others = [node for node in range(self._node.of) if node not in came]
        where = self._at.where if self._at else self._node.endpoint
        whom = several(others) if others else "the other nodes"
        return f"waiting for {whom} at {where}, for {_MEETS_WITHIN / 60:g} minutes at most"

    def _come_to(self, at: Connection) -> None:
        self._at, self._awaited, self._heard, self._together = at, 0, Heard(), set()

    def _part(self) -> None:
        """Leave the store in which we met: the node that keeps it is lost, or the others are elsewhere."""
        if self._at is not None:
            self._at.end()
        self._at = None

    def _await(self, until: float) -> Answer | None:
        """Say that we have come, and wait for the round to be closed; if it is ours to close, close it."""
        at = self._connection()
        while time.monotonic() < until:
            self._awaited, answer = at.ask(functools.partial(self._look, awaited=self._awaited))
            if answer:
                if any(each["who"] == self._who for each in answer["nodes"]):
                    self._round, self._awaited = self._awaited, 0
                    self._together = {each["who"] for each in answer["nodes"]}
                    return answer
                self._awaited = 0  # it was closed before we came: the next one
            elif self._keeps_store:
                self._closing.close_when_due(self._awaited, at, self.peers, self._heard)
            time.sleep(_LOOK)
        return None

    def _look(self, store: Store, awaited: int) -> tuple[int, Answer | None]:
        """The round we have come for, now if not before; and the answer to those that have, once it is closed.

        It changes nothing here: it may end in its thread long after we gave it up, and have come elsewhere.
        """
        if store.check(["over"]):
            raise RunEnded(store.get("over").decode())
        if not awaited:
            awaited = store.add("closed", 0) + 1
            place = store.add(f"came/{awaited}", 1)
            store.set(f"came/{awaited}/{place}", json.dumps(self._greeting()))
        return awaited, said(store, f"round/{awaited}")

    def _greeting(self) -> Greeting:
        return {
            "node": self._node.rank,
            "of": self._node.of,
            "who": self._who,
            "attempt": self.next_attempt,
            "workers": self.workers,
            "term": self.peers.term.number if self.peers.term else 0,
            "where": self._own,
            "wrong": self._checkpoints.wrong,
            "command": self._command,
        }

    def _check(self, answer: Answer) -> None:
        """Raise what the nodes that met are refused for.

        Nodes that meet for the first time are refused, all of them, unless each finds in the store of the checkpoints
        the term that one of them has written there: else they would not save to one place.
        """
        if answer["refused"]:
            raise BadInput(answer["refused"])
        if all(each["term"] for each in answer["nodes"]):
            return
        term, wrong = Term.from_json(answer["term"]), None
        if self.peers.term is None and not self._keeps_store:
            try:
                self._checkpoints.find(term)
            except HoldfastError as error:
                wrong = str(error)
        nodes = [each["node"] for each in answer["nodes"]]
        for node, found in zip(nodes, self._exchanged("wrong", nodes, wrong), strict=True):
            if found is not None:
                if self._keeps_store:
                    with suppress(HoldfastError):
                        self._checkpoints.give_back(term)
                raise BadInput(f"node {node} cannot use the checkpoints: {found}")

    def _exchanged(self, topic: str, nodes: list[int], value: JSON) -> list[Any]:
        """Tell every node of this round, and hear from every one."""
        at, key = self._connection(), f"round/{self._round}/{topic}"
        at.ask(lambda store: store.set(f"{key}/{self._node.rank}", json.dumps(value)))
        keys = [f"{key}/{node}" for node in nodes]
        deadline = time.monotonic() + _SPEAKS_WITHIN
        while not at.ask(lambda store: store.check(keys)):
            if time.monotonic() > deadline:
                raise Unreachable("a node that has come says nothing more")
            time.sleep(_LOOK)
        return at.ask(lambda store: [json.loads(store.get(key)) for key in keys])

    def drop(self, nodes: list[int]) -> bool:
        """Take the next term without these lost nodes; not if others took it, or if too few are left."""
        peers = self.peers
        if not (isinstance(peers, OtherNodes) and peers.term and peers.decides):
            return False
        left = tuple(node for node in peers.present if node not in nodes)
        if len(left) < self._node.least:
            return False
        term = Term(peers.term.number + 1, secrets.token_hex(6), self._own, left)
        try:
            if not self._checkpoints.take(term):
                return False
        except HoldfastError:
            return False
        peers.go_on_without(nodes, term)
        self._together = set(peers.members)
        return True

    def num_nodes_waiting(self) -> int:
        return self._connection().ask(lambda store: int(store.add(f"came/{store.add('closed', 0) + 1}", 0)))

    def stop(self, verdict: str) -> None:
        if self.meeting and self._at:
            with suppress(Unreachable):  # whoever kept the store is gone
                self._at.ask(lambda store: store.set("verdict", verdict))

    def stopped(self) -> str | None:
        if self._at is None or self.meeting is None:
            return None
        return self._at.ask(lambda store: store.get("verdict").decode() if store.check(["verdict"]) else None)

    def shutdown(self) -> bool:
        if self._at and self.meeting:
            with suppress(Unreachable):
                self._at.ask(lambda store: store.set("over", self.verdict))
        return True

    def leave(self) -> None:
        with suppress(Unreachable):  # its keeper may be gone already
            if self._keeps_store:
                self._see_others_off(self._connection(), time.monotonic() + _LEAVES_WITHIN)
            else:
                self._connection().ask(lambda store: store.set(f"left/{self._who}", ""), _ENDS_WITHIN, last=True)
        end_all(self._who, _ENDS_WITHIN)

    def _see_others_off(self, at: Connection, deadline: float) -> None:
        """Keep our store until those that started with us, and those that have come since, have left it."""
        if not self._together:
            return
        came = at.ask(lambda store: greetings(store, store.add("closed", 0) + 1))
        others = {*self._together, *(each["who"] for each in came)} - {self._who}
        keys = [f"left/{who}" for who in others]
        while not at.ask(lambda store: store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def _connection(self) -> Connection:
        if self._at is None:
            raise Unreachable("the nodes have not met")
        return self._at


def _kept_by(node: Node) -> tuple[TCPStore, str]:
    """The store that this node keeps, and where: at the endpoint, if that is ours.

    Only the machine that has its address can listen on it; of several nodes there the first one does, and the others
    find the port taken.
    """
    address, port = node.meets_at
    try:
        kept = listen(address, port)
    except OSError:
        address = node.address
        kept = listen(address)
    kept.set("rendezvous", "")
    return kept, joined(address, kept.port)
