"""The other nodes of a run while the workers train: what they tell each other, and which of them are lost.

The node that keeps the store in which they met decides for all who of the workers goes on. The others report to it how
their workers are, and follow. All of it goes through that store.
"""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # they are public

from holdfast.checkpoint.terms import Term
from holdfast.distributed.membership import LIVE, Membership, publish
from holdfast.distributed.ranks import ours
from holdfast.events import JSON
from holdfast.supervise.nodes import quorum
from holdfast.supervise.nodes.connection import Answer, Connection, beats, refuses, said
from holdfast.supervise.nodes.node import Node
from holdfast.supervise.nodes.quorum import Heard
from holdfast.supervise.workers.members import MembersReport

_AGAIN = 0.2  # seconds after which a report is repeated though nothing has changed


class Peers:
    """The peers of a node that has none: what is asked of them has an answer at once.

    `server` is the store of the workers of this round, if it is we who keep it.
    """

    term: Term | None = None  # that we are in
    members: Mapping[str, int] = {}  # the node of every supervisor that started with us, and of our own
    where: Mapping[int, str] = {}  # each of these nodes keeps a store there

    def __init__(self, round: str = "", server: Store | None = None) -> None:
        self._workers = f"holdfast/{round}"
        self._server = server

    @property
    def decides(self) -> bool:
        """Whether it is we who decide which workers go on."""
        return self._server is not None

    def publish(self, membership: Membership) -> None:
        """Tell the workers which of them go on."""
        assert self._server is not None, "only the node that keeps the workers' store publishes"
        publish(PrefixStore(f"{self._workers}/{LIVE}", self._server), membership)

    def report(self, report: MembersReport, known: int) -> list[Membership]:
        """Tell the node that decides how our workers are; what it has published since the membership `known`."""
        return []

    def reports(self) -> dict[int, MembersReport] | None:
        """What the other nodes report, for the one that decides; nothing before all have done so."""
        return {}

    def tell_of_end(self) -> None:
        """Tell the other nodes that workers of some node have nothing left to train."""

    def is_ending(self) -> bool:
        """Whether workers of other nodes have nothing left to train."""
        return False

    def is_left_behind(self) -> bool:
        """Whether the other nodes go on without this one."""
        return False

    def finish(self) -> bool:
        """Say that our workers have ended in order; whether those of every node have."""
        return True

    def compare(self, place: JSON) -> list[Any]:
        """Tell the other nodes how far our workers are; what they have told."""
        return []

    def lost(self, *, suspected: bool = False) -> list[int]:
        """The nodes that were not heard of for too long, if it is we who listen for them.

        If workers suspect that some are lost, also those whose supervisor is gone.
        """
        return []

    def gone(self) -> list[int]:
        """The nodes whose supervisor is gone for certain: their machine refuses to connect."""
        return []


class OtherNodes(Peers):
    """The nodes that started together in the round with this number, as they are found in the store `at`."""

    def __init__(
        self, node: Node, number: int, answer: Answer, at: Connection, heard: Heard, server: Store | None
    ) -> None:
        super().__init__(answer["round"], server)
        self.term = Term.from_json(answer["term"])
        self.members = {each["who"]: each["node"] for each in answer["nodes"]}
        self.where = {each["node"]: each["where"] for each in answer["nodes"]}
        self._node, self._round, self._at, self._heard = node, f"round/{number}", at, heard
        self._dropped: list[int] = []  # lost since
        self._reported: tuple[float, MembersReport | None] = (0.0, None)
        self._is_ending = False

    @property
    def present(self) -> list[int]:
        """The nodes that were not lost since; we are one of them."""
        return [node for node in self.where if node not in self._dropped]

    @property
    def _others(self) -> list[int]:
        return [node for node in self.present if node != self._node.rank]

    def publish(self, membership: Membership) -> None:
        super().publish(membership)
        key, text = f"{self._round}/membership/{membership.number}", json.dumps(membership.to_json())
        self._at.ask(lambda store: store.set(key, text))

    def report(self, report: MembersReport, known: int) -> list[Membership]:
        now = time.monotonic()

        def told(store: Store) -> list[Membership]:
            if report != self._reported[1] or now - self._reported[0] > _AGAIN:
                self._reported = now, report
                store.set(f"{self._round}/report/{self._node.rank}", json.dumps(report.to_json()))
            found: list[Membership] = []
            while text := said(store, f"{self._round}/membership/{known + len(found) + 1}"):
                found.append(Membership.from_json(text))
            self._is_ending = bool(store.check([f"{self._round}/ending"]))
            self._hear_of_dropped(store)
            return found

        return self._at.ask(told)

    def reports(self) -> dict[int, MembersReport] | None:
        if not self.decides:
            return {}
        others = self._others
        told = self._at.ask(lambda store: [said(store, f"{self._round}/report/{node}") for node in others])
        if None in told:
            return None
        found = {node: MembersReport.from_json(each) for node, each in zip(others, told, strict=True)}
        self._is_ending = any(each.ended for each in found.values())
        return found

    def tell_of_end(self) -> None:
        self._at.ask(lambda store: store.set(f"{self._round}/ending", ""))

    def is_ending(self) -> bool:
        return self._is_ending

    def go_on_without(self, nodes: list[int], term: Term) -> None:
        """Tell those that are left, and their workers, that they are in this term from now on."""
        assert self._server is not None, "only the node that keeps the workers' store drops others"
        self._dropped = sorted({*self._dropped, *nodes})
        for node in self.present:  # so that their workers know the term for theirs, and save
            self._server.set(f"{self._workers}/{ours(term.token, node)}", "")
        self.term = term
        self.members = {who: node for who, node in self.members.items() if node in self.present}

        def tell(store: Store) -> None:
            store.set(f"token/{term.token}", "")
            store.set(f"{self._round}/dropped", json.dumps([self._dropped, term.to_json()]))

        self._at.ask(tell)

    def _hear_of_dropped(self, store: Store) -> None:
        if told := said(store, f"{self._round}/dropped"):
            self._dropped, term = told
            if not self.is_left_behind():
                self.term = Term.from_json(term)

    def is_left_behind(self) -> bool:
        return self._node.rank in self._dropped

    def finish(self) -> bool:
        def told(store: Store) -> bool:
            store.set(f"{self._round}/finished/{self._node.rank}", "")
            self._hear_of_dropped(store)
            return bool(store.check([f"{self._round}/finished/{each}" for each in self.present]))

        return self._at.ask(told)

    def compare(self, place: JSON) -> list[Any]:
        def compared(store: Store) -> list[Any]:
            store.set(f"{self._round}/place/{self._node.rank}", json.dumps(place))
            told = (said(store, f"{self._round}/place/{node}") for node in self._others)
            return [each for each in told if each is not None]

        return self._at.ask(compared)

    def lost(self, *, suspected: bool = False) -> list[int]:
        if not self.decides:
            return []
        self._heard.note(self._at.ask(lambda store: beats(store, list(self.members))), time.monotonic())
        silent = quorum.lost(self.members, self._heard, self._node.lost_after, time.monotonic())
        return sorted({*silent, *(self.gone() if suspected else ())})

    def gone(self) -> list[int]:
        nodes = list(self.members.values())
        with ThreadPoolExecutor(len(nodes)) as pool:  # a machine that is cut off takes a second to say nothing
            refused = pool.map(refuses, (self.where[node] for node in nodes))
            return [node for node, is_gone in zip(nodes, refused, strict=True) if is_gone]
