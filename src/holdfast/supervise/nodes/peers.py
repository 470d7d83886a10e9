"""Communication with the other nodes of a run while the workers train, through the store in which the nodes met.

Every node looks for news many times a second, so a look at which nothing is new is one short request: the number of
decisions that the deciding node has announced, or the number of reports that have changed. Whatever all nodes need to
know of each other, the deciding node collects and writes once.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # it is public

from holdfast.checkpoint.terms import Term
from holdfast.distributed.membership import Membership
from holdfast.distributed.ranks import node_key
from holdfast.events import JSON
from holdfast.supervise.nodes.close_round import Heartbeats, silent_nodes
from holdfast.supervise.nodes.connection import Connection, RoundResult, heartbeats, is_refused, read_json
from holdfast.supervise.nodes.rendezvous import MembersReport, Node, Peers


class OtherNodes(Peers):
    """The nodes that started together after rendezvous `number`, reached through `connection`."""

    def __init__(
        self,
        node: Node,
        number: int,
        answer: RoundResult,
        connection: Connection,
        heartbeats: Heartbeats,
        server: Store | None,
    ) -> None:
        super().__init__(answer["round"], server)
        self.term = Term.from_json(answer["term"])
        self.members = {greeting["who"]: greeting["node"] for greeting in answer["nodes"]}
        self.where = {greeting["node"]: greeting["where"] for greeting in answer["nodes"]}
        self._node, self._round = node, f"round/{number}"
        self._connection, self._heartbeats = connection, heartbeats
        self._dropped: list[int] = []  # nodes that were lost since
        self._reported: MembersReport | None = None
        self._known: dict[int, tuple[bytes, MembersReport]] = {}  # the last reports of the other nodes
        self._changes = self._announced = -1  # reports and decisions that were there at the last look
        self._is_ending = self._has_announced_end = False

    @property
    def present(self) -> list[int]:
        return [node for node in self.where if node not in self._dropped]

    @property
    def _others(self) -> list[int]:
        return [node for node in self.present if node != self._node.rank]

    def publish(self, membership: Membership) -> None:
        super().publish(membership)
        key, text = f"{self._round}/membership/{membership.number}", json.dumps(membership.to_json())
        self._announce(key, text)

    def _announce(self, key: str, text: str) -> None:
        """Write a decision for all nodes, and then count it, so that they look for it."""

        def write(store: Store) -> None:
            store.set(key, text)
            store.add(f"{self._round}/announced", 1)

        self._connection.ask(write)

    def report(self, report: MembersReport, known: int) -> list[Membership]:
        def exchange(store: Store) -> list[Membership]:
            if report != self._reported:
                self._reported = report
                store.set(f"{self._round}/report/{self._node.rank}", json.dumps(report))
                store.add(f"{self._round}/changes", 1)
            announced = store.add(f"{self._round}/announced", 0)
            if announced == self._announced:
                return []
            memberships: list[Membership] = []
            while data := read_json(store, f"{self._round}/membership/{known + len(memberships) + 1}"):
                memberships.append(Membership.from_json(data))
            self._is_ending = bool(store.check([f"{self._round}/ending"]))
            self._read_dropped(store)
            self._announced = announced
            return memberships

        return self._connection.ask(exchange)

    def reports(self) -> dict[int, MembersReport] | None:
        if not self.decides:
            return {}
        self._connection.ask(self._read_reports)
        if not all(node in self._known for node in self._others):
            return None
        reports = {node: self._known[node][1] for node in self._others}
        self._is_ending = any(report.ended for report in reports.values())
        return reports

    def _read_reports(self, store: Store) -> None:
        """Read the reports of the other nodes, if any has changed."""
        changes = store.add(f"{self._round}/changes", 0)
        if changes == self._changes:
            return
        there = {node: f"{self._round}/report/{node}" for node in self._others}
        there = {node: key for node, key in there.items() if node in self._known or store.check([key])}
        for node, text in zip(there, store.multi_get(list(there.values())) if there else [], strict=True):
            if node not in self._known or self._known[node][0] != text:
                self._known[node] = text, MembersReport.from_json(json.loads(text))
        self._changes = changes

    def announce_end(self) -> None:
        if not self._has_announced_end:
            self._announce(f"{self._round}/ending", "")
            self._has_announced_end = True

    def is_ending(self) -> bool:
        return self._is_ending

    def continue_without(self, nodes: list[int], term: Term) -> None:
        """Tell the remaining nodes and workers to continue as the group `term`, without the lost `nodes`."""
        assert self._server is not None, "only the node that keeps the workers' store drops others"
        self._dropped = sorted({*self._dropped, *nodes})
        for node in self.present:  # so that their workers accept the term as theirs, and save
            self._server.set(f"{self._workers}/{node_key(term.token, node)}", "")
        self.term = term
        self.members = {who: node for who, node in self.members.items() if node in self.present}

        self._connection.ask(lambda store: store.set(f"token/{term.token}", ""))
        self._announce(f"{self._round}/dropped", json.dumps([self._dropped, term.to_json()]))

    def _read_dropped(self, store: Store) -> None:
        if data := read_json(store, f"{self._round}/dropped"):
            self._dropped, term = data
            if not self.is_left_behind():
                self.term = Term.from_json(term)

    def is_left_behind(self) -> bool:
        return self._node.rank in self._dropped

    def finish(self) -> bool:
        def exchange(store: Store) -> bool:
            store.set(f"{self._round}/finished/{self._node.rank}", "")
            self._read_dropped(store)
            return bool(store.check([f"{self._round}/finished/{node}" for node in self.present]))

        return self._connection.ask(exchange)

    def exchange_progress(self, progress: JSON) -> list[Any]:
        def exchange(store: Store) -> list[Any]:
            store.set(f"{self._round}/place/{self._node.rank}", json.dumps(progress))
            if self.decides:
                others = {node: read_json(store, f"{self._round}/place/{node}") for node in self._others}
                store.set(f"{self._round}/places", json.dumps([[self._node.rank, progress], *others.items()]))
            places = read_json(store, f"{self._round}/places") or []
            return [place for node, place in places if place is not None and node in self._others]

        return self._connection.ask(exchange)

    def lost(self, *, suspected: bool = False) -> list[int]:
        if not self.decides:
            return []
        counts = self._connection.ask(lambda store: heartbeats(store, list(self.members)))
        self._heartbeats.update(counts, time.monotonic())
        silent = silent_nodes(self.members, self._heartbeats, self._node.lost_after, time.monotonic())
        return sorted({*silent, *(self.gone() if suspected else ())})

    def gone(self) -> list[int]:
        nodes = list(self.members.values())
        with ThreadPoolExecutor(len(nodes)) as pool:  # an unreachable machine takes a second to time out
            refused = pool.map(is_refused, (self.where[node] for node in nodes))
            return [node for node, is_gone in zip(nodes, refused, strict=True) if is_gone]
