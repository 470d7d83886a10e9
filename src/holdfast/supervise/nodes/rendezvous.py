"""What happens before each start of the workers: the nodes of a run meet. A node that is alone meets nobody.

Torch's elastic agent asks for a rendezvous, and starts workers with what comes out of it. The one of several nodes is
in `nodes.py`; what a node hears of the others while its workers train is in `peers.py`.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from holdfast.supervise.nodes.node import LOOPBACK, listen, several
from holdfast.supervise.nodes.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInfo:
    """What the nodes agreed on for one start of their workers."""

    attempt: int
    round: str  # a name that no other meeting has
    address: str  # of this node
    nodes: tuple[int, ...] = (0,)  # that take part
    workers: tuple[int, ...] = ()  # how many each of them starts
    host: int = 0  # the node that keeps the store in which they met
    term: int = 0  # see checkpoint/terms.py; 0 for a node that is alone
    node: int = 0  # which of them we are

    def news(self, before: "RoundInfo | None", of: int) -> list[str]:
        """What there is to say of it: which of so many nodes go on, if not all; where they meet, if that has changed."""
        lines = []
        if lost := sorted(set(range(of)) - set(self.nodes)):
            lines.append(f"{several(self.nodes)} of {of} go on without {several(lost)}")
        if before is not None and before.host != self.host:
            lines.append(f"the nodes now meet at node {self.host}")
        return lines


class RunEnded(RendezvousClosedError):
    """The run is over; the verdict on it, as text, if whoever ended it has said so."""


class Rendezvous(RendezvousHandler):
    """How a supervisor meets the other nodes, and how it ends the run with them; by itself, for one that has none."""

    def __init__(self) -> None:
        self.meeting: RoundInfo | None = None
        self.peers = Peers()
        self.next_attempt = 1
        self.workers = 1  # that we are to start
        self.waiting = False  # for other nodes: a signal may interrupt us then, and only then
        self.say: Callable[[str], None] = lambda _: None  # to whoever watches
        self.ended: Callable[[], str | None] = lambda: None  # the verdict on a run that has ended without us
        self.verdict = ""  # our own, for nodes that come to what is over

    def drop(self, nodes: list[int]) -> bool:
        """Let the workers that are left go on without these lost nodes; whether we may."""
        return False

    def stop(self, verdict: str) -> None:
        """Tell the other nodes that the run is over, and how."""

    def stopped(self) -> str | None:
        """The verdict of another node that has ended the run."""
        return None

    def leave(self) -> None:
        """Go, the node that keeps the store after the others: they have read there how the run ended."""

    def _begin(self, meeting: RoundInfo, address: str, port: int) -> RendezvousInfo:
        """Start from this meeting, with the workers' store at this address."""
        self.meeting, self.next_attempt = meeting, meeting.attempt + 1
        place = meeting.nodes.index(meeting.node)
        return RendezvousInfo(HashStore(), place, len(meeting.nodes), RendezvousStoreInfo(address, port))

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


class SingleNodeRendezvous(Rendezvous):
    """The rendezvous of a node that is alone: it takes place at once."""

    def next_rendezvous(self) -> RendezvousInfo:
        server, name = listen(LOOPBACK), secrets.token_hex(6)
        self.peers = Peers(name, server)
        meeting = RoundInfo(attempt=self.next_attempt, round=name, address=LOOPBACK, workers=(self.workers,))
        return self._begin(meeting, LOOPBACK, server.port)
