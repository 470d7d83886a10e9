"""The rendezvous of several nodes before each start of the workers, also after nodes or their meeting place were lost.

Each node hosts a store at an address that the other nodes can reach. At first the nodes meet in the store at the given
endpoint. A node leaves a greeting there and waits until the node that hosts the store closes the round
(`close_round.py`). If that node is lost, the other nodes meet in another store (`find_host.py`), and start only if they
claim the next term in the checkpoint store (`checkpoint/terms.py`). Processes that reach these stores are trusted with
the run.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # they are public

from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import SUPERVISED_ONLY, Judged
from holdfast.history.log import recall
from holdfast.history.tail import Finish, finish
from holdfast.supervise.checkpoint_place import Checkpoints, PlaceContents
from holdfast.supervise.nodes.close_round import Heartbeats, RoundCloser, read_greetings
from holdfast.supervise.nodes.connection import (
    Connection,
    NodeRegistration,
    RoundResult,
    Unreachable,
    end_all,
    join_address,
    read_json,
)
from holdfast.supervise.nodes.find_host import HostFinder
from holdfast.supervise.nodes.peers import OtherNodes
from holdfast.supervise.nodes.rendezvous import Node, Rendezvous, RoundInfo, RunEnded, TooFewNodes, listen, node_names
from holdfast.supervise.stop_signals import stop_signals
from holdfast.supervise.verdict import RunVerdict, completion, done_before, done_elsewhere

_MEETS_WITHIN = 600.0
_SPEAKS_WITHIN = 60.0  # seconds for a node to look for the checkpoints, and report what it found
_SAYS_AFTER = 10.0
_LEAVES_WITHIN = 10.0
_ENDS_WITHIN = 1.0
_LOOK = 0.02


class RunEndWatch:
    """A watch that notices if other nodes complete the run while this node waits for them.

    It reads the histories in `out` and the histories beside the checkpoints. If the run is extended (`extends`), an end
    that was recorded before does not count."""

    def __init__(
        self,
        out: Path,
        checkpoints: Checkpoints,
        contents: PlaceContents,
        command: tuple[str, ...],
        *,
        extends: bool,
    ) -> None:
        self._history, self._checkpoints = out / "history", checkpoints
        self.verdict: RunVerdict | None = None  # the verdict of the other nodes, once `look` has found it
        before = _completion(self._history)
        self._known: set[Finish | Judged | None] = {None}
        if extends:
            self._known |= {finish(self._history), before, contents.completed}
        if contents.command != command and not _has_launched(self._history):
            self._known.add(contents.completed)
        self._known |= {end for end in (before, contents.completed) if end and SUPERVISED_ONLY in end.because}

    def look(self) -> RunVerdict | None:
        with suppress(HoldfastError, OSError):
            self.verdict = self._find()
        return self.verdict

    def _find(self) -> RunVerdict | None:
        if (end := finish(self._history)) and end not in self._known:
            return done_before(end, self._checkpoints.newest())
        for judged in (_completion(self._history), self._checkpoints.completed()):
            if judged and judged not in self._known:
                return done_elsewhere(judged.attempts, judged.because)
        return None


def _completion(history: Path) -> Judged | None:
    files = history.glob("supervisor-*.jsonl")
    with suppress(HoldfastError):  # the audit reports damage
        return completion(event.what for file in files for event in recall(file, "launch", "restart", "verdict"))
    return None


def _has_launched(history: Path) -> bool:
    with suppress(HoldfastError):
        return any(True for file in history.glob("supervisor-*.jsonl") for _ in recall(file, "launch"))
    return False


class MultiNodeRendezvous(Rendezvous):
    """The rendezvous of several nodes. `command` has the settings that must be the same on all nodes."""

    def __init__(
        self,
        node: Node,
        command: Mapping[str, Any],
        checkpoints: Checkpoints,
        *,
        attempt: int,
        say: Callable[[str], None],
        run_end: RunEndWatch,
    ) -> None:
        super().__init__(attempt)
        self._node, self._command, self._checkpoints = node, command, checkpoints
        self._say, self._run_end = say, run_end
        self._who = f"{node.rank}-{secrets.token_hex(6)}"
        self._kept, self._own = _open_store(node)  # our own store, in which the others may meet; and its address
        self._finder = HostFinder(node, self._who, self._own, checkpoints)
        self._closer = RoundCloser(node, self._own, checkpoints)
        self._at: Connection | None = None  # to the store in which we meet
        self._silent = ""  # the address of the store that we left because its host is silent
        self._heartbeats = Heartbeats()
        self._awaited = self._closed = 0  # number of the round that we wait for, and of the last one closed with us
        self._together: set[str] = set()  # the supervisors in that round
        self._waits_since = self._looked = 0.0  # when this wait began; when we last looked for the run's end
        self._has_said = False  # for which nodes we wait

    @property
    def _keeps_store(self) -> bool:
        return self._at is not None and self._at.where == self._own

    @property
    def _connection(self) -> Connection:
        if self._at is None:
            raise Unreachable("the nodes have not met")
        return self._at

    def _meet(self, workers: int) -> RoundInfo:
        self._has_said = False
        self._waits_since = self._looked = time.monotonic()
        if self._at is not None and self._at.is_silent:
            self._leave_store()
        with stop_signals.interrupting():
            answer = self._wait_for_answer(workers, time.monotonic() + _MEETS_WITHIN)
        server = self._closer.server if self._keeps_store else None
        self.peers = OtherNodes(self._node, self._closed, answer, self._connection, self._heartbeats, server)
        return RoundInfo(
            attempt=answer["attempt"],
            round=answer["round"],
            address=self._node.address,
            nodes=tuple(node["node"] for node in answer["nodes"]),
            workers=tuple(node["workers"] for node in answer["nodes"]),
            host=answer["host"],
            term=Term.from_json(answer["term"]).number,
            node=self._node.rank,
            store=(answer["address"], answer["port"]),
        )

    def _wait_for_answer(self, workers: int, deadline: float) -> RoundResult:
        while time.monotonic() < deadline:
            self._while_waiting()
            try:
                if self._at is None:
                    self._go_to(self._finder.find(self.peers, self._while_waiting))
                if answer := self._wait_here(workers, time.monotonic() + self._finder.look_every):
                    self._check(answer)
                    return answer
                if elsewhere := self._finder.elsewhere(self._connection.where, self.peers):
                    self._leave_store()
                    self._go_to(elsewhere)
            except Unreachable:
                self._leave_store()
        raise TooFewNodes

    def _while_waiting(self) -> None:
        now = time.monotonic()
        if now - self._looked >= self._finder.look_every:
            if verdict := self._run_end.look():
                raise RunEnded(verdict.to_text())
            self._looked = time.monotonic()
        if not self._has_said and now - self._waits_since >= _SAYS_AFTER:
            self._has_said = True
            came = {self._node.rank}
            if self._at is not None and self._awaited:
                with suppress(Unreachable):
                    greetings = self._at.ask(lambda store, number=self._awaited: read_greetings(store, number))  # type: ignore[misc]
                    came |= {greeting["node"] for greeting in greetings}
            others = [node for node in range(self._node.of) if node not in came]
            where = self._at.where if self._at else self._node.endpoint
            nodes = node_names(others) if others else "the other nodes"
            self._say(f"waiting for {nodes} at {where}, for {_MEETS_WITHIN / 60:g} minutes at most")

    def _go_to(self, connection: Connection) -> None:
        self._at, self._awaited, self._heartbeats, self._together = connection, 0, Heartbeats(), set()
        for who, node in self.peers.members.items():
            if self.peers.where[node] == self._silent:  # it was waited for in the store that it hosts
                self._heartbeats.expect_silence(who, time.monotonic() - self._node.lost_after)
        self._silent = ""

    def _leave_store(self) -> None:
        if self._at is not None:
            if self._at.is_silent:
                self._silent = self._at.where
                self._finder.avoid(self._silent)
            self._at.end()
        self._at = None

    def _wait_here(self, workers: int, until: float) -> RoundResult | None:
        connection = self._connection
        greeting: NodeRegistration = {
            "node": self._node.rank,
            "of": self._node.of,
            "who": self._who,
            "attempt": self.next_attempt,
            "workers": workers,
            "term": self.peers.term.number if self.peers.term else 0,
            "where": self._own,
            "wrong": self._checkpoints.wrong,
            "command": self._command,
        }
        while time.monotonic() < until:
            awaited = self._awaited
            self._awaited, answer = connection.ask(lambda store, n=awaited: _greet_and_look(store, n, greeting))  # type: ignore[misc]
            if answer:
                if any(node["who"] == self._who for node in answer["nodes"]):
                    self._closed, self._awaited = self._awaited, 0
                    self._together = {node["who"] for node in answer["nodes"]}
                    return answer
                self._awaited = 0  # it was closed before we came: wait for the next one
            elif self._keeps_store:
                self._closer.close_when_due(self._awaited, connection, self.peers, self._heartbeats)
            time.sleep(_LOOK)
        return None

    def _check(self, answer: RoundResult) -> None:
        """Raise BadInput if the nodes that met cannot start together, or do not use the same store for checkpoints."""
        if answer["refused"]:
            raise BadInput(answer["refused"])
        if all(node["term"] for node in answer["nodes"]):
            return
        term, wrong = Term.from_json(answer["term"]), None
        if self.peers.term is None and not self._keeps_store:
            try:
                self._checkpoints.require_term(term)
            except HoldfastError as error:
                wrong = str(error)
        nodes = [node["node"] for node in answer["nodes"]]
        for node, reason in zip(nodes, self._exchange_reasons(nodes, wrong), strict=True):
            if reason is not None:
                if self._keeps_store:
                    with suppress(HoldfastError):
                        self._checkpoints.give_back(term, answer["attempt"])
                raise BadInput(f"node {node} cannot use the checkpoints: {reason}")

    def _exchange_reasons(self, nodes: list[int], reason: str | None) -> list[Any]:
        connection, key = self._connection, f"round/{self._closed}/wrong"
        connection.ask(lambda store: store.set(f"{key}/{self._node.rank}", json.dumps(reason)))
        keys = [f"{key}/{node}" for node in nodes]
        deadline = time.monotonic() + _SPEAKS_WITHIN
        while not connection.ask(lambda store: store.check(keys)):
            if time.monotonic() > deadline:
                raise Unreachable("a node that came to the rendezvous is silent")
            time.sleep(_LOOK)
        return connection.ask(lambda store: [json.loads(store.get(key)) for key in keys])

    def drop(self, nodes: list[int]) -> bool:
        peers = self.peers
        if not (isinstance(peers, OtherNodes) and peers.term and peers.decides):
            return False
        left = tuple(node for node in peers.present if node not in nodes)
        if len(left) < self._node.least:
            return False
        with suppress(HoldfastError):
            if term := self._closer.claim(peers.term.number + 1, left):
                peers.continue_without(nodes, term)
                self._together = set(peers.members)
                return True
        return False

    def waiting_nodes(self) -> list[int]:
        greetings = self._connection.ask(lambda store: read_greetings(store, store.add("closed", 0) + 1))
        return [greeting["node"] for greeting in greetings]

    def stop(self, verdict: str) -> None:
        self._set("verdict", verdict)

    def stopped(self) -> str | None:
        if self._at is None or self.round is None:
            return None
        return self._at.ask(lambda store: store.get("verdict").decode() if store.check(["verdict"]) else None)

    def close(self, verdict: str) -> None:
        self._set("over", verdict)
        with suppress(Unreachable):
            if self._keeps_store:
                self._wait_until_left(self._connection, time.monotonic() + _LEAVES_WITHIN)
            else:
                self._connection.ask(lambda store: store.set(f"left/{self._who}", ""), _ENDS_WITHIN, last=True)
        end_all(self._who, _ENDS_WITHIN)

    def _set(self, key: str, value: str) -> None:
        if self._at and self.round:
            with suppress(Unreachable):  # the node that kept the store may be gone
                self._at.ask(lambda store: store.set(key, value))

    def _wait_until_left(self, connection: Connection, deadline: float) -> None:
        if not self._together:
            return
        came = connection.ask(lambda store: read_greetings(store, store.add("closed", 0) + 1))
        others = {*self._together, *(greeting["who"] for greeting in came)} - {self._who}
        keys = [f"left/{who}" for who in others]
        while not connection.ask(lambda store: store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_LOOK)


def _greet_and_look(store: Store, awaited: int, greeting: NodeRegistration) -> tuple[int, RoundResult | None]:
    """Register for the next rendezvous if `awaited` is 0; return the number of the awaited rendezvous and its result.

    The function must not change any object, because it may still run after the caller has timed out."""
    if store.check(["over"]):
        raise RunEnded(store.get("over").decode())
    if not awaited:
        awaited = store.add("closed", 0) + 1
        place = store.add(f"came/{awaited}", 1)
        store.set(f"came/{awaited}/{place}", json.dumps(greeting))
    return awaited, read_json(store, f"round/{awaited}")


def _open_store(node: Node) -> tuple[TCPStore, str]:
    """Open this node's TCPStore, at the rendezvous endpoint if possible, and return the store and its address."""
    address, port = node.meets_at
    try:
        kept = listen(address, port)
    except OSError:
        address = node.address
        kept = listen(address)
    kept.set("rendezvous", "")
    return kept, join_address(address, kept.port)
