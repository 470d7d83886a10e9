"""Communication with the other nodes of a run while the workers train, through the store in which the nodes met."""

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

_AGAIN = 0.2  # seconds after which an unchanged report is repeated


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
        self._reported: tuple[float, MembersReport | None] = (0.0, None)
        self._is_ending = False

    @property
    def present(self) -> list[int]:
        """The numbers of the nodes that were not lost since the start, including this node."""
        return [node for node in self.where if node not in self._dropped]

    @property
    def _others(self) -> list[int]:
        return [node for node in self.present if node != self._node.rank]

    def publish(self, membership: Membership) -> None:
        super().publish(membership)
        key, text = f"{self._round}/membership/{membership.number}", json.dumps(membership.to_json())
        self._connection.ask(lambda store: store.set(key, text))

    def report(self, report: MembersReport, known: int) -> list[Membership]:
        now = time.monotonic()

        def exchange(store: Store) -> list[Membership]:
            if report != self._reported[1] or now - self._reported[0] > _AGAIN:
                self._reported = now, report
                store.set(f"{self._round}/report/{self._node.rank}", json.dumps(report))
            memberships: list[Membership] = []
            while data := read_json(store, f"{self._round}/membership/{known + len(memberships) + 1}"):
                memberships.append(Membership.from_json(data))
            self._is_ending = bool(store.check([f"{self._round}/ending"]))
            self._read_dropped(store)
            return memberships

        return self._connection.ask(exchange)

    def reports(self) -> dict[int, MembersReport] | None:
        if not self.decides:
            return {}
        others = self._others
        data = self._connection.ask(lambda store: [read_json(store, f"{self._round}/report/{node}") for node in others])
        if None in data:
            return None
        reports = {node: MembersReport.from_json(report) for node, report in zip(others, data, strict=True)}
        self._is_ending = any(report.ended for report in reports.values())
        return reports

    def announce_end(self) -> None:
        self._connection.ask(lambda store: store.set(f"{self._round}/ending", ""))

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

        def announce(store: Store) -> None:
            store.set(f"token/{term.token}", "")
            store.set(f"{self._round}/dropped", json.dumps([self._dropped, term.to_json()]))

        self._connection.ask(announce)

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
            others = (read_json(store, f"{self._round}/place/{node}") for node in self._others)
            return [data for data in others if data is not None]

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
