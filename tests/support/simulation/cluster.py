"""A simulated cluster that trains one run: nodes with workers, supervisors, and a network that may split.

Supervisors claim terms by the product's own code. A group of nodes that can reach each other has one supervisor, and if
the group is split, each part has one. A part that notices that it is a part kills its own workers, and only then starts
again: until then the workers of the other part train and save as before.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import terms
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.distributed.ranks import node_key
from holdfast.errors import HoldfastError, StorageFailed, WorkerLost
from holdfast.events import Detect, Judged, Launch, Restart
from holdfast.history.log import HistoryWriter
from holdfast.supervise.checkpoint_place import ANSWERS_WITHIN, Checkpoints
from holdfast.supervise.nodes.close_round import RoundCloser
from holdfast.supervise.nodes.rendezvous import Node, Peers
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import RestoredState
from simulation.faults import Faults
from simulation.messages import Messages, Prefixed, SimulatedRanks
from simulation.objects import Bucket, SimulatedStore
from simulation.product import NOON
from simulation.scheduler import Process, World
from simulation.truth import Truth, plain
from simulation.worker import Settings, Worker

NOTICES = (0.0, 1.0, 15.0)  # seconds until a supervisor notices that nodes are lost
LOOK = 0.2
ATTEMPTS = 500  # of a schedule; one that ends has far fewer


class SimulatedCheckpoints(Checkpoints):
    """The product's access of a supervisor to the checkpoints, in the supervisor's own task instead of a child."""

    __slots__ = ("_store", "_world", "claimed")

    def __init__(self, world: World, store: Store) -> None:
        super().__init__(Path("out"), "sim://run")
        self._world, self._store = world, store
        self.claimed: list[Term] = []

    def take(self, term: Term) -> bool:
        self.claimed.append(term)
        return super().take(term)

    def _ask(self, work: Callable[[Store], Any], opened: object = None) -> Any:
        began = self._world.now
        try:
            answer = json.loads(json.dumps(work(self._store)))
        except HoldfastError:
            raise
        except Exception as error:
            raise StorageFailed(str(error)) from error
        if self._world.now - began > ANSWERS_WITHIN:
            raise StorageFailed("it did not answer in time")
        return answer


@dataclass(slots=True, eq=False)
class Group:
    """Nodes that can reach each other, and their supervisor. `last` are the nodes of its last start."""

    nodes: list[int]
    supervisor: Process
    last: Peers
    acts_at: float | None = None  # when the supervisor notices a change of the nodes


@dataclass(slots=True, eq=False)
class Cluster:
    """The nodes of one schedule and their network; `folder` is for the histories."""

    world: World
    faults: Faults
    settings: Settings
    nodes: int
    workers: int  # of each node
    folder: Path
    bucket: Bucket = field(default_factory=Bucket)
    cuts: set[tuple[int, int]] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    groups: list[Group] = field(default_factory=list)
    running: dict[int, list[tuple[Process, Worker]]] = field(default_factory=dict)  # workers by node
    completed: bool = False
    refused: list[str] = field(default_factory=list)  # why groups of nodes have ended
    attempts: int = 0
    frozen: dict[int, float] = field(default_factory=dict)  # nodes, and until when all of their processes are paused
    journals: dict[int, HistoryWriter] = field(default_factory=dict)
    histories: list[HistoryWriter] = field(default_factory=list)
    truth: Truth = field(init=False)
    terms: dict[int, int] = field(init=False)  # in which each node was last
    who: dict[int, str] = field(init=False)  # the name of each node's supervisor

    def __post_init__(self) -> None:
        self.truth = Truth(self.world, self.bucket, self.settings.keep_last)
        self.terms = dict.fromkeys(range(self.nodes), 0)
        self.faults.freeze = self._freeze
        self.who = {node: f"{node}-{self.world.rng.randbytes(6).hex()}" for node in range(self.nodes)}

    def reaches(self, node: int, other: int) -> bool:
        return (node, other) not in self.cuts

    def store(self) -> Store:
        return SimulatedStore(self.world, self.faults, self.bucket)

    def _freeze(self, node: int, seconds: float) -> None:
        until = self.frozen[node] = self.world.now + seconds
        for process, _ in self.running.get(node, ()):
            process.paused_until = max(process.paused_until, until)
        for group in self.groups:
            if group.supervisor.node == node:  # it looks a moment later, and its workers act meanwhile
                group.supervisor.paused_until = max(group.supervisor.paused_until, until + self.world.rng.random())

    def _history(self, node: int, who: str) -> HistoryWriter:
        self.histories.append(HistoryWriter(self.folder / f"{node}", who, lambda: NOON + self.world.now))
        return self.histories[-1]

    def close(self) -> None:
        """Close the files of all processes as if they were killed, with what they have flushed."""
        for history in self.histories:
            history._file.close()

    # Supervisors

    def start_group(self, nodes: list[int], last: Peers, after: float) -> None:
        process = Process(f"supervisor-{nodes[0]}", nodes[0])
        group = Group(nodes, process, last)
        self.groups.append(group)
        self.world.spawn(process, lambda: self._supervise(group), after)

    def end_group(self, group: Group, why: str) -> None:
        self.refused.append(why)
        self.world.record(f"the nodes {group.nodes} end: {why}")
        self.groups.remove(group)

    def _supervise(self, group: Group) -> None:
        checkpoints = SimulatedCheckpoints(self.world, self.store())
        own = f"node{group.supervisor.node}:1"
        closer = RoundCloser(
            Node(rank=group.supervisor.node, of=self.nodes, endpoint="node0:1", least=1), own, checkpoints
        )
        failure: Detect | None = None
        while not self.completed:
            self._kill(group.nodes)
            group.acts_at = None
            try:
                term = closer._take_term([self._registration(node) for node in group.nodes], group.last)
            except HoldfastError:
                self.world.sleep(0.5)
                continue
            if group.acts_at is not None and self.world.now >= group.acts_at:
                continue
            if term is None:
                newest = terms.newest(plain(self.bucket))
                if newest in checkpoints.claimed:
                    self.truth.violated(f"nodes {group.nodes} end because of term {newest.number}, their own")
                self.end_group(group, "other nodes continued")
                return
            self.truth.take(term)
            self._remember(group, term)
            failure = self._attempt(group, term, failure)
            if failure is None:
                return
        self._kill(group.nodes)  # other nodes have completed the run

    def _registration(self, node: int) -> Any:
        return {"node": node, "who": self.who[node], "term": self.terms[node]}

    def _remember(self, group: Group, term: Term) -> None:
        group.last = Peers(term.token)
        group.last.term = term
        group.last.members = {self.who[node]: node for node in term.nodes}
        for node in term.nodes:
            self.terms[node] = term.number

    def _attempt(self, group: Group, term: Term, failure: Detect | None) -> Detect | None:
        """Run one attempt; return the failure that ended it, or None if the run is complete."""
        self.attempts += 1
        if self.attempts >= ATTEMPTS:
            self.truth.violated(f"the run does not end: it restarts again and again, and is at attempt {self.attempts}")
        number, world = self.attempts, self.workers * len(term.nodes)
        for node in term.nodes:
            self._journal(node, number, failure)
        messages = Messages(self.world, self.faults, group.supervisor.node, self.reaches)
        arrived: dict[int, int] = {}
        workers = [
            self._start_worker(term, number, rank, world, term.nodes[rank // self.workers], messages, arrived)
            for rank in range(world)
        ]
        while True:
            self.world.poll(LOOK)
            self.faults.point("watching")
            if group.acts_at is not None and self.world.now >= group.acts_at:
                return self._detect(group, number, -1, "nodes were lost or came")
            if all(worker.is_done for _, worker in workers):
                self._complete(group, number)
                return None
            for rank, (process, worker) in enumerate(workers):
                if process.is_dead and not worker.is_done:
                    return self._detect(group, number, rank, "it was killed")

    def _detect(self, group: Group, number: int, rank: int, why: str) -> Detect:
        self._kill(group.nodes)
        return Detect(number, rank, max(rank, 0) % self.workers, "signal" if rank >= 0 else "peer", why)

    def _kill(self, nodes: list[int]) -> None:
        for node in nodes:
            for process, _ in self.running.pop(node, ()):
                process.is_dead = True

    def _complete(self, group: Group, number: int) -> None:
        self.completed = True
        for node in group.nodes:
            self._write(node, Judged("completed", number, "all workers have ended"))
        self.world.record("completed")

    def _journal(self, node: int, number: int, failure: Detect | None) -> None:
        if node not in self.journals:
            self._write(node, Launch(number, self.workers, argv=("train.py",), nodes=self.nodes))
            return
        if failure:
            self._write(node, failure)
        self._write(node, Restart(number, self.workers))

    def _write(self, node: int, what: Any) -> None:
        if node not in self.journals:
            name = f"supervisor-{node}" if self.nodes > 1 else "supervisor"
            self.journals[node] = self._history(node, name)
        self.journals[node].append(what)
        self.journals[node].flush()

    # Workers

    def _start_worker(
        self, term: Term, number: int, rank: int, world: int, node: int, messages: Messages, arrived: dict[int, int]
    ) -> tuple[Process, Worker]:
        process = Process(f"rank-{rank}@{node}#{number}", node)
        self.truth.terms[process.name] = term.number
        store: Store = self.store()
        if self.nodes > 1:
            store = Fenced(store, term.number, lambda newer: messages.check([node_key(newer.token, node)]))
        worker = Worker(
            world=self.world,
            settings=self.settings,
            number=number,
            ranks=SimulatedRanks(
                rank=rank,
                size=world,
                store=Prefixed("run", messages),
                grouped=True,
                device=torch.device("cpu"),  # type: ignore[arg-type]
            ),
            store=store,
            folder=self.folder / f"{node}",
            history=lambda who: self._history(node, who),
            meet=lambda step: self._meet(arrived, rank, world, step, term),
            restored=self._restored,
        )

        def run() -> None:
            try:
                worker.run()
            except (HoldfastError, RuntimeError) as error:
                self.world.record(f"failed: {type(error).__name__}: {error}")
                if not isinstance(error, (HoldfastError,)) and "no answer" not in str(error):
                    raise
                process.is_dead = True

        self.running.setdefault(node, []).append((process, worker))
        self.world.spawn(process, run, self.world.rng.random())
        return process, worker

    def _meet(self, arrived: dict[int, int], rank: int, world: int, step: int, term: Term) -> None:
        """Wait until all ranks have come to `step` and can reach each other: no gradient is summed without them."""
        arrived[rank] = step
        self.world.changes += 1
        deadline = self.world.now + 600
        while len(arrived) < world or min(arrived.values()) < step or self._is_split(term.nodes):
            self.world.poll(0.005)
            if self.world.now > deadline:
                raise WorkerLost("a peer does not come")

    def _is_split(self, nodes: tuple[int, ...]) -> bool:
        return any({one, other} <= {*nodes} for one, other in self.cuts)

    def _restored(self, rank: int, found: RestoredState, protected: Protected) -> None:
        self.world.record(f"restored {found.step}")
        self.truth.restored(found.step)
