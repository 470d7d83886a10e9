"""News of the other nodes on which a supervisor has to act while its workers train."""

from dataclasses import dataclass
from typing import TypeAlias

from holdfast.supervise.nodes.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True)
class AllNodesFinished:
    """The workers of all nodes have exited normally."""


@dataclass(frozen=True, slots=True)
class StoppedElsewhere:
    """Another node has ended the run; `verdict` is JSON text."""

    verdict: str


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """The `nodes` wait for the next start of all workers."""

    nodes: list[int]


@dataclass(frozen=True, slots=True)
class NodesSilent:
    """The `nodes` were silent for too long."""

    nodes: list[int]


News: TypeAlias = AllNodesFinished | StoppedElsewhere | NodesWaiting | NodesSilent


def ask(nodes: Rendezvous, *, have_finished: bool, is_suspicious: bool) -> News | None:
    """Ask what the other nodes do; return None if there is nothing to act on.

    `have_finished` says that the workers of this node have exited normally. If `is_suspicious`, their connections broke,
    and a node whose supervisor has exited is lost at once. Raise Unreachable if the store in which the nodes met is gone."""
    if have_finished and nodes.peers.finish():
        return AllNodesFinished()
    if (verdict := nodes.stopped()) is not None:
        return StoppedElsewhere(verdict)
    if waiting := nodes.waiting_nodes():
        return NodesWaiting(waiting)
    lost = nodes.peers.lost(suspected=is_suspicious)
    return NodesSilent(lost) if lost else None
