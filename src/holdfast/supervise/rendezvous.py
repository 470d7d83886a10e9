"""How the nodes of a run meet before each start: who takes part, and where the workers find their store.

One node alone needs nobody. Of several, each keeps a store, at the address at which the others reach it; they meet in
the one at the endpoint that was given. There each says that it has come, and the node that keeps the store closes the
round: it names those that start, the attempt, a name for this round that no other has, and a new store for its workers,
so that nothing that a dead attempt left in its store can be read by the next.

If the node that keeps the store is lost, the others meet at the lowest of them that answers. Those that are left start
without the lost ones only if they take the next term in the store of the checkpoints (`checkpoint/terms.py`): of two
parts of a run that do not reach each other one goes on, and the other waits. The record of a term says where its nodes
meet, so that a lost node that comes back finds them there and is let in.

Whoever reaches these stores, or may write to the store of the checkpoints, is trusted with the run. We listen on the
address that was given, or from which it is reached, and on no other; keep all machines but the nodes of the run away
from it, and from the ports of its workers.
"""

import fcntl
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from holdfast.checkpoint.terms import Term
from holdfast.ddp.membership import LIVE, Membership, publish
from holdfast.ddp.world import ours
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON
from holdfast.supervise import quorum
from holdfast.supervise.checkpoints import Checkpoints
from holdfast.supervise.connection import CONNECTS_WITHIN, Connection, Unreachable, beat, joined, listens, refuses
from holdfast.supervise.quorum import Came, Heard
from holdfast.supervise.reports import Report

LOOPBACK = "127.0.0.1"
LOST_AFTER = 15.0
_PATIENCE = timedelta(seconds=60)  # for the one that keeps the store to come up, and for a node to look for checkpoints
_JOINED_WITHIN = 600.0
_SOON = 5.0  # seconds after which those that wait look whether the others meet elsewhere
_LOOK = 0.02
_AGAIN = 0.2  # seconds after which a report is repeated though nothing has changed
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the machines of a run, by its number; several meet at an endpoint `host:port`.

    One that was not heard of for `lost_after` seconds is lost, and `least` of them may go on without the others.
    """

    rank: int = 0
    of: int = 1
    endpoint: str | None = None
    least: int = 1
    lost_after: float = LOST_AFTER

    def __post_init__(self) -> None:
        if self.of < 1 or not 0 <= self.rank < self.of:
            raise BadInput(f"there is no node {self.rank} of {self.of}: --node-rank counts from 0 to --nnodes less 1.")
        if self.of > 1 and self.endpoint is None:
            raise BadInput(f"{self.of} nodes have nowhere to meet: name one of them with --rendezvous host:port.")
        if self.endpoint is not None:
            _host_and_port(self.endpoint)
        if not 1 <= self.least <= self.of:
            raise BadInput(f"{self.least} of {self.of} nodes cannot go on: give --min-nodes 1 to {self.of}.")
        if not self.lost_after > 0:
            raise BadInput(f"no node is lost after {self.lost_after:g} s: give --lost-after more than 0 seconds.")

    @property
    def address(self) -> str:
        """Where other nodes reach this one: the address from which it would reach the endpoint."""
        if self.of == 1 or self.endpoint is None:
            return LOOPBACK
        family, kind, *_, target = _target(self.endpoint)
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket: this only looks up the route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(f"the rendezvous {self.endpoint} cannot be reached: {error.strerror or error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the nodes agreed on for one round: who takes part, with how many workers each, and our own address.

    `host` is the node that keeps the store in which they met.
    """

    attempt: int
    round: str
    address: str
    nodes: tuple[int, ...] = (0,)
    workers: tuple[int, ...] = ()
    host: int = 0
    term: int = 0
    node: int = 0  # which of them we are


class Rendezvous(RendezvousHandler):
    """What a supervisor asks of other nodes, and what is known of them if there are none."""

    def __init__(self) -> None:
        self._server: TCPStore | None = None
        self.meeting: Meeting | None = None
        self.next_attempt = 1
        self.workers = 1  # that we are to start
        self.waiting = False  # for other nodes: a signal may interrupt us then, and only then

    def next_rendezvous(self) -> RendezvousInfo:
        raise NotImplementedError

    @property
    def decides(self) -> bool:
        """Whether it is we who decide who of the workers goes on."""
        return True

    def report(self, report: Report, known: int) -> list[Membership]:
        """Tell whoever decides of our workers, and hear of the memberships after the one with this number."""
        return []

    def reports(self) -> dict[int, Report] | None:
        """What the other nodes report, if it is we who decide; nothing before all have done so."""
        return {}

    def is_ending(self) -> bool:
        """Whether the workers of other nodes have nothing left to train."""
        return False

    def tell_of_end(self) -> None:
        """Say that workers of some node have nothing left to train."""

    def is_left_behind(self) -> bool:
        """Whether the other nodes go on without this one."""
        return False

    def drop(self, nodes: list[int]) -> bool:
        """Go on without these nodes; not if others went on without us."""
        return False

    def publish(self, membership: Membership) -> None:
        """Tell the workers of this round who of them goes on."""
        if self._server is None:
            raise AssertionError("only the node that keeps the workers' store publishes")
        store = PrefixStore(f"holdfast/{self._met().round}/{LIVE}", self._server)
        publish(store, membership)

    def finish(self) -> bool:
        """Say that our workers have ended in order; whether those of every node have."""
        return True

    def compare(self, place: JSON) -> list[Any]:
        """Tell the other nodes how far our workers are, and hear it from them."""
        return []

    def lost(self, *, suspected: bool = False) -> list[int]:
        """The nodes that were not heard of for too long, if it is we who listen for them.

        If workers suspect that some are lost, also those that are gone.
        """
        return []

    def gone(self) -> list[int]:
        """The nodes whose supervisor is gone for certain."""
        return []

    def stop(self, verdict: str) -> None:
        """Tell the other nodes that the run is over, and how."""

    def stopped(self) -> str | None:
        """What another node said when it ended the run."""
        return None

    def leave(self, patience: float = 10.0) -> None:
        """Go; whoever keeps the store not before the others have heard from it how the run ended."""

    def _met(self) -> Meeting:
        if self.meeting is None:
            raise AssertionError("the nodes have not met")
        return self.meeting

    def _begin(self, meeting: Meeting, node: int, address: str, port: int) -> RendezvousInfo:
        self.meeting, self.next_attempt = meeting, meeting.attempt + 1
        seat = meeting.nodes.index(node)
        return RendezvousInfo(HashStore(), seat, len(meeting.nodes), RendezvousStoreInfo(address, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "holdfast"

    def get_backend(self) -> str:
        return "holdfast"

    @property
    def use_agent_store(self) -> bool:
        return True

    def shutdown(self) -> bool:
        return True


class Alone(Rendezvous):
    """The rendezvous of a node that is alone: it takes place at once."""

    def next_rendezvous(self) -> RendezvousInfo:
        self._server = listen(LOOPBACK)
        meeting = Meeting(
            attempt=self.next_attempt, round=secrets.token_hex(6), address=LOOPBACK, workers=(self.workers,)
        )
        return self._begin(meeting, 0, LOOPBACK, self._server.port)


class Nodes(Rendezvous):
    """A rendezvous that keeps the numbers the user gave the nodes, and whose every round has a store of its own."""

    def __init__(self, node: Node, identity: Mapping[str, Any], checkpoints: Checkpoints) -> None:
        super().__init__()
        self._node, self._identity, self._checkpoints = node, identity, checkpoints
        self._who = f"{node.rank}-{secrets.token_hex(6)}"
        self._kept, self._own = _store_of(node)
        self._at: Connection | None = None
        self._heard = Heard()
        self._members: dict[str, int] = {}  # who started last, and which node each is
        self._known: dict[int, str] = {}  # where each of them keeps a store
        self._term: Term | None = None  # that we are in
        self._awaited = self._round = 0  # the round we have come for; the one that was closed with us
        self._together = 0  # how many were in that
        self._dropped: list[int] = []  # nodes that were lost in it, and the others went on
        self._reported: tuple[float, Report | None] = (0.0, None)
        self._is_ending = False
        self._seen: tuple[float, Term | None] = (0.0, None)  # when we looked for terms last, and what there was

    @property
    def keeps_store(self) -> bool:
        """Whether it is in our store that the nodes meet."""
        return self._at is not None and self._at.where == self._own

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting = True
        try:
            record = self._meet(time.monotonic() + _JOINED_WITHIN)
        finally:
            self.waiting = False
        self._term = Term.from_json(record["term"])
        self._dropped, self._reported, self._is_ending = [], (0.0, None), False
        greetings = record["nodes"]
        self._members = {each["who"]: each["node"] for each in greetings}
        self._known = {each["node"]: each["where"] for each in greetings}
        meeting = Meeting(
            attempt=max(each["attempt"] for each in greetings),
            round=record["round"],
            address=self._node.address,
            nodes=tuple(each["node"] for each in greetings),
            workers=tuple(each["workers"] for each in greetings),
            host=record["host"],
            term=self._term.number,
            node=self._node.rank,
        )
        return self._begin(meeting, self._node.rank, record["address"], record["port"])

    def _meet(self, deadline: float) -> dict[str, Any]:
        """Come to where the others are, until a round is closed that we are in."""
        while time.monotonic() < deadline:
            try:
                if self._at is None:
                    self._come_to(self._found())
                if record := self._await(time.monotonic() + self._soon):
                    self._check(record)
                    return record
                self._look_elsewhere()
            except Unreachable:
                self.part()
        raise RendezvousTimeoutError

    @property
    def _soon(self) -> float:
        return min(_SOON, self._node.lost_after / 2)

    def part(self) -> None:
        """Leave the store in which we met: whoever keeps it is lost, or the others are elsewhere."""
        if self._at is not None:
            self._at.end()
        self._at = None

    def _come_to(self, at: Connection) -> None:
        self._at, self._awaited, self._heard = at, 0, Heard()

    def _found(self) -> Connection:
        """A connection to where the nodes meet; a node that has met nobody yet waits for the first to come up."""
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while True:
            for where, token in self._places():
                if found := self._reached(where, token):
                    return found
            if time.monotonic() > deadline:
                raise _nobody_listens(str(self._node.endpoint))
            time.sleep(0.1)

    def _look_elsewhere(self) -> None:
        """Go to where the others may meet by now, if that is elsewhere."""
        at = self._at
        for where, token in self._places():
            if at is not None and where == at.where:
                return
            if found := self._reached(where, token):
                self.part()
                self._come_to(found)
                return

    def _places(self) -> list[tuple[str, str | None]]:
        """Where the nodes may meet, the likeliest first, with the token that must be found there.

        That is where the nodes of the newest term met. If nobody answers there, each node comes to the lowest that does.
        """
        term, places = self._newest_term(), []
        if term and (self._term is None or term.number > self._term.number):
            places.append((term.where, term.token))
        if self._term is None:
            return [*places, (self._endpoint, None)]
        return [*places, *((where, None) for where in (self._term.where, *_values(self._known)))]

    @property
    def _endpoint(self) -> str:
        return joined(*_target(str(self._node.endpoint))[-1][:2])

    def _newest_term(self) -> Term | None:
        looked, term = self._seen
        if time.monotonic() - looked >= self._soon:
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

    def _await(self, until: float) -> dict[str, Any] | None:
        """Say that we have come, and wait for the round to be closed."""
        at = self._connection()
        while time.monotonic() < until:
            if record := at.ask(self._look):
                if any(each["who"] == self._who for each in record["nodes"]):
                    self._round, self._awaited, self._together = self._awaited, 0, len(record["nodes"])
                    return record
                self._awaited = 0  # it was closed before we came: the next one
            elif self.keeps_store:
                self._close_when_due()
            time.sleep(_LOOK)
        return None

    def _look(self, store: Store) -> dict[str, Any] | None:
        """The round that we have come for, once it is closed."""
        if store.check(["over"]):
            raise _Over
        if not self._awaited:
            self._awaited = store.add("closed", 0) + 1
            seat = store.add(f"came/{self._awaited}", 1)
            store.set(f"came/{self._awaited}/{seat}", json.dumps(self._greeting()))
        found: dict[str, Any] | None = _said(store, f"round/{self._awaited}")
        return found

    def _greeting(self) -> dict[str, Any]:
        return {
            "node": self._node.rank,
            "of": self._node.of,
            "who": self._who,
            "attempt": self.next_attempt,
            "workers": self.workers,
            "term": self._term.number if self._term else 0,
            "where": self._own,
            "wrong": self._checkpoints.wrong,
            **self._identity,
        }

    def _close_when_due(self) -> None:
        """As the one that keeps the store: start those that have come, once they are not to wait for others."""
        greetings = self._listened()
        came = [Came(each["node"], each["who"], each["term"] > 0) for each in greetings]
        node, now = self._node, time.monotonic()
        limits = {"of": node.of, "least": node.least}
        there = quorum.present(came, self._members, self._heard, now, **limits, lost_after=node.lost_after)
        if there is None:
            return
        starting = [each for each in greetings if each["who"] in {one.who for one in there}]
        starting.sort(key=lambda each: int(each["node"]))
        record: dict[str, Any] = {"nodes": starting, "host": node.rank, "refused": self._refusal(starting)}
        if not record["refused"]:
            try:
                term = self._taken(starting)
            except HoldfastError as error:
                if all(each["term"] for each in starting):
                    return  # a store that is away for a while: the next look tries again
                record["refused"] = f"node {node.rank} cannot use the checkpoints: {error}"
            else:
                if term is None:
                    return  # others went on without us: they are to be looked for
                self._server = listen(node.address)
                record |= {"term": term.to_json(), "round": secrets.token_hex(6)}
                record |= {"address": node.address, "port": self._server.port}
        self._connection().ask(lambda store: _close(store, self._awaited, record))

    def _listened(self) -> list[dict[str, Any]]:
        """All that have come for this round; and note who was heard of."""

        def listen_to(store: Store) -> list[dict[str, Any]]:
            seats = range(1, store.add(f"came/{self._awaited}", 0) + 1)
            came = [_said(store, f"came/{self._awaited}/{seat}") for seat in seats]
            found = {each["who"]: each for each in came if each}
            self._note_beats(store, [*found, *self._members])
            return list(found.values())

        return self._connection().ask(listen_to)

    def _note_beats(self, store: Store, several: list[str]) -> None:
        self._heard.note({who: store.add(beat(who), 0) for who in several}, time.monotonic())

    def _refusal(self, starting: list[dict[str, Any]]) -> str | None:
        """Why these cannot start together."""
        numbers = [each["node"] for each in starting]
        if len(set(numbers)) < len(numbers) or any(each["of"] != self._node.of for each in starting):
            several = ", ".join(map(str, numbers))
            return f"the nodes that met call themselves {several}: give each a --node-rank of its own."
        for name in self._identity:
            if len({json.dumps(each.get(name)) for each in starting}) > 1:
                return f"the nodes that met differ in {name}: give the same command on each."
        wrong = next((each for each in starting if each["wrong"]), None)
        return f"node {wrong['node']} cannot use the checkpoints: {wrong['wrong']}" if wrong else None

    def _taken(self, starting: list[dict[str, Any]]) -> Term | None:
        """The term as which these start: that of the last time if they are the same, else one that we take.

        All nodes together follow whatever there was. A part of them follows only the term that it was in.
        """
        if self._term and {each["who"] for each in starting} == set(self._members) and self._term.where == self._own:
            return self._term
        last = max(each["term"] for each in starting)
        if len(starting) == self._node.of:
            newest = self._checkpoints.term()
            last = max(last, newest.number if newest else 0)
        term = Term(last + 1, secrets.token_hex(6), self._own, tuple(each["node"] for each in starting))
        return term if self._checkpoints.take(term) else None

    def _check(self, record: dict[str, Any]) -> None:
        """Refuse what the nodes that met are refused for; and, all alike, unless all see what one of them saves."""
        if record["refused"]:
            raise BadInput(record["refused"])
        term, nodes = Term.from_json(record["term"]), [each["node"] for each in record["nodes"]]
        if all(each["term"] for each in record["nodes"]):
            return
        wrong = None
        if self._term is None and not self.keeps_store:
            try:
                self._checkpoints.find(term)
            except HoldfastError as error:
                wrong = str(error)
        for node, said in zip(nodes, self._exchanged("wrong", nodes, wrong), strict=True):
            if said is not None:
                if self.keeps_store:
                    with suppress(HoldfastError):
                        self._checkpoints.give_back(term)
                raise BadInput(f"node {node} cannot use the checkpoints: {said}")

    def _exchanged(self, topic: str, nodes: list[int], said: JSON) -> list[Any]:
        """Tell every node of this round, and hear from every one."""
        at, key = self._connection(), f"round/{self._round}/{topic}"
        at.ask(lambda store: store.set(f"{key}/{self._node.rank}", json.dumps(said)))
        keys = [f"{key}/{node}" for node in nodes]
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while not at.ask(lambda store: store.check(keys)):
            if time.monotonic() > deadline:
                raise Unreachable("a node that has come says nothing more")
            time.sleep(_LOOK)
        return at.ask(lambda store: [json.loads(store.get(key)) for key in keys])

    @property
    def decides(self) -> bool:
        return self.keeps_store

    def report(self, report: Report, known: int) -> list[Membership]:
        at, topic, now = self._connection(), f"round/{self._round}", time.monotonic()

        def told(store: Store) -> list[Membership]:
            if report != self._reported[1] or now - self._reported[0] > _AGAIN:
                self._reported = now, report
                store.set(f"{topic}/report/{self._node.rank}", json.dumps(report.to_json()))
            found: list[Membership] = []
            while said := _said(store, f"{topic}/membership/{known + len(found) + 1}"):
                found.append(Membership.from_json(said))
            self._is_ending = bool(store.check([f"{topic}/ending"]))
            self._hear_of_dropped(store)
            return found

        return at.ask(told)

    def reports(self) -> dict[int, Report] | None:
        if not self.decides:
            return {}
        others = [node for node in self._present if node != self._node.rank]
        topic = f"round/{self._round}/report"
        told = self._connection().ask(lambda store: [_said(store, f"{topic}/{node}") for node in others])
        if None in told:
            return None
        found = {node: Report.from_json(said) for node, said in zip(others, told, strict=True)}
        self._is_ending = any(each.ended for each in found.values())
        return found

    def is_ending(self) -> bool:
        return self._is_ending

    def tell_of_end(self) -> None:
        self._connection().ask(lambda store: store.set(f"round/{self._round}/ending", ""))

    def is_left_behind(self) -> bool:
        return self._node.rank in self._dropped

    def publish(self, membership: Membership) -> None:
        super().publish(membership)
        key, said = f"round/{self._round}/membership/{membership.number}", json.dumps(membership.to_json())
        self._connection().ask(lambda store: store.set(key, said))

    def drop(self, nodes: list[int]) -> bool:
        left = [node for node in self._present if node not in nodes]
        if len(left) < self._node.least or self._term is None or self._server is None:
            return False
        term = Term(self._term.number + 1, secrets.token_hex(6), self._own, tuple(left))
        server = self._server
        try:
            if not self._checkpoints.take(term):
                return False
        except HoldfastError:
            return False
        for node in left:  # so that their workers know it for theirs
            server.set(f"holdfast/{self._met().round}/{ours(term.token, node)}", "")
        self._term, self._together = term, len(left)
        self._dropped = sorted({*self._dropped, *nodes})
        self._members = {who: node for who, node in self._members.items() if node in left}

        def tell(store: Store) -> None:
            store.set(f"token/{term.token}", "")
            store.set(f"round/{self._round}/dropped", json.dumps([self._dropped, term.to_json()]))

        self._connection().ask(tell)
        return True

    def _hear_of_dropped(self, store: Store) -> None:
        if said := _said(store, f"round/{self._round}/dropped"):
            self._dropped, term = said
            if not self.is_left_behind():
                self._term = Term.from_json(term)

    @property
    def _present(self) -> list[int]:
        """The nodes of this round that were not lost since."""
        return [node for node in self._met().nodes if node not in self._dropped]

    def finish(self) -> bool:
        topic = f"round/{self._round}"

        def told(store: Store) -> bool:
            store.set(f"{topic}/finished/{self._node.rank}", "")
            self._hear_of_dropped(store)
            return bool(store.check([f"{topic}/finished/{each}" for each in self._present]))

        return self._connection().ask(told)

    def compare(self, place: JSON) -> list[Any]:
        topic = f"round/{self._round}/place"
        others = [node for node in self._present if node != self._node.rank]

        def compared(store: Store) -> list[Any]:
            store.set(f"{topic}/{self._node.rank}", json.dumps(place))
            told = (_said(store, f"{topic}/{node}") for node in others)
            return [each for each in told if each is not None]

        return self._connection().ask(compared)

    def lost(self, *, suspected: bool = False) -> list[int]:
        if not self.keeps_store:
            return []
        self._connection().ask(lambda store: self._note_beats(store, list(self._members)))
        silent = quorum.lost(self._members, self._heard, self._node.lost_after, time.monotonic())
        return sorted({*silent, *(self.gone() if suspected else ())})

    def gone(self) -> list[int]:
        return [node for node in self._members.values() if refuses(self._known[node])]

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
                self._at.ask(lambda store: store.set("over", ""))
        return True

    def leave(self, patience: float = 10.0) -> None:
        if self._at is None or not self._together:
            return
        deadline = time.monotonic() + patience
        with suppress(Unreachable):  # its keeper may be gone already
            left = self._at.ask(lambda store: store.add("left", 1))
            while self.keeps_store and left < self._together and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._at.ask(lambda store: store.add("left", 0))

    def num_nodes_waiting(self) -> int:
        return self._connection().ask(lambda store: int(store.add(f"came/{store.add('closed', 0) + 1}", 0)))

    def _connection(self) -> Connection:
        if self._at is None:
            raise Unreachable("the nodes have not met")
        return self._at


class _Over(RendezvousClosedError):
    """The run is over."""


def _close(store: Store, number: int, record: dict[str, Any]) -> None:
    store.set(f"round/{number}", json.dumps(record))
    if "term" in record:
        store.set(f"token/{record['term'][1]}", "")
    store.add("closed", 1)


def _said(store: Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _values(known: Mapping[int, str]) -> list[str]:
    return [known[node] for node in sorted(known)]


def listen(address: str, port: int = 0, patience: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A new store that listens on this address alone; torch by itself would listen on all."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as server:
        # A supervisor that starts again takes the port back from connections that the kernel still remembers.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
        port = server.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=server.detach(),
        )


def interface(address: str) -> str | None:
    """The network interface of this machine that has this address."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it may have none
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _store_of(node: Node) -> tuple[TCPStore, str]:
    """The store that we keep, and where: at the endpoint, if that is ours.

    Only the machine that has its address can listen on it; of several nodes there the first one does, and the others
    find the port taken.
    """
    address, port = _target(str(node.endpoint))[-1][:2]
    try:
        kept = listen(address, port, _PATIENCE)
    except OSError:
        address = node.address
        kept = listen(address, 0, _PATIENCE)
    kept.set("rendezvous", "")
    return kept, joined(address, kept.port)


def _nobody_listens(endpoint: str) -> BadInput:
    return BadInput(f"nobody listens at the rendezvous {endpoint}: start the node that has this address.")


def _target(endpoint: str) -> tuple[Any, ...]:
    host, port = _host_and_port(endpoint)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise BadInput(f"the rendezvous {endpoint} is unknown here: {error.strerror or error}.") from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BadInput(f"the rendezvous {endpoint!r} is not host:port, such as node0:29400.")
    return host.strip("[]"), int(port)
