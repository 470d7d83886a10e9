"""A simulated cluster that trains one run: nodes with a supervisor and workers each, and a network that may split.

The supervisors meet, find lost nodes and claim terms by the product's own code: `MultiNodeRendezvous` and the news of
the other nodes. A supervisor that has to restart kills the workers of its node, and only then meets the others again:
until then the workers of other nodes train and save as before.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.distributed.ranks import node_key
from holdfast.errors import HoldfastError, StorageFailed, WorkerLost
from holdfast.events import Detect, Judged, Launch, Restart
from holdfast.history.log import HistoryWriter
from holdfast.supervise.checkpoint_place import ANSWERS_WITHIN, Checkpoints
from holdfast.supervise.nodes import news
from holdfast.supervise.nodes.connection import Unreachable
from holdfast.supervise.nodes.multi_node import MultiNodeRendezvous
from holdfast.supervise.nodes.rendezvous import Rendezvous, RoundInfo, RunEnded, TooFewNodes
from holdfast.supervise.verdict import RunVerdict, done_elsewhere
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import RestoredState
from simulation.faults import Faults
from simulation.messages import Prefixed, SimulatedRanks
from simulation.network import PORT, Network, SimulatedNode, address_of
from simulation.objects import Bucket, SimulatedStore
from simulation.product import NOON
from simulation.scheduler import Process, World
from simulation.truth import Truth
from simulation.worker import Settings, Worker

LOST_AFTER = 5.0  # seconds without a heartbeat
LOOK = 1.0
ATTEMPTS = 500  # of a schedule; one that ends has far fewer
_LOST = ("no answer", "connection re")  # the errors of a store that cannot be reached


class SimulatedCheckpoints(Checkpoints):
    """The product's access of a supervisor to the checkpoints, in the supervisor's own task instead of a child."""

    __slots__ = ("_store", "_truth", "_world")

    def __init__(self, world: World, store: Store, truth: Truth) -> None:
        super().__init__(Path("out"), "sim://run")
        self._world, self._store, self._truth = world, store, truth

    def take(self, term: Term) -> bool:
        is_taken = super().take(term)
        if is_taken:
            self._truth.take(term)
        return is_taken

    def give_back(self, term: Term, attempt: int) -> None:
        try:
            super().give_back(term, attempt)
        finally:  # perhaps it has an effect without an answer
            self._truth.owners.pop(term.number)

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


class SimulatedEnd:
    """What a supervisor that waits for others reads at the place of the checkpoints: that the run is complete."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def look(self) -> RunVerdict | None:
        return done_elsewhere(self._cluster.attempts, "all workers have finished") if self._cluster.completed else None


@dataclass(slots=True, eq=False)
class Training:
    """The workers of one start, on all nodes; `arrived` has the last step that each rank has come to."""

    nodes: tuple[int, ...]
    arrived: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Cluster:
    """The nodes of one schedule and their network; `folder` is for the histories."""

    world: World
    faults: Faults
    settings: Settings
    nodes: int
    workers: int  # of each node
    folder: Path
    least: int = 1  # nodes with which the run continues
    bucket: Bucket = field(default_factory=Bucket)
    cuts: set[tuple[int, int]] = field(default_factory=set)
    supervisors: dict[int, Process] = field(default_factory=dict)  # those that run, by node
    running: dict[int, list[tuple[Process, Worker]]] = field(default_factory=dict)  # workers by node
    completed: bool = False
    refused: list[str] = field(default_factory=list)  # why supervisors have ended
    attempts: int = 0  # of all nodes
    journals: dict[int, HistoryWriter] = field(default_factory=dict)
    histories: list[HistoryWriter] = field(default_factory=list)
    truth: Truth = field(init=False)
    network: Network = field(init=False)
    _trainings: dict[str, Training] = field(default_factory=dict)  # by round
    _last: dict[int, int] = field(default_factory=dict)  # the last attempt of each node

    def __post_init__(self) -> None:
        self.truth = Truth(self.world, self.bucket, self.settings.keep_last)
        self.faults.freeze = self._freeze
        self.network = Network(self.world, self.faults, self.reaches)

    def reaches(self, node: int, other: int) -> bool:
        return (node, other) not in self.cuts

    def store(self) -> Store:
        return SimulatedStore(self.world, self.faults, self.bucket)

    def _freeze(self, node: int, seconds: float) -> None:
        until = self.world.now + seconds
        for process, _ in self.running.get(node, ()):
            process.paused_until = max(process.paused_until, until)
        if node in self.supervisors:  # it looks a moment later, and its workers act meanwhile
            supervisor = self.supervisors[node]
            supervisor.paused_until = max(supervisor.paused_until, until + self.world.rng.random())

    def _history(self, node: int, who: str) -> HistoryWriter:
        self.histories.append(HistoryWriter(self.folder / f"{node}", who, lambda: NOON + self.world.now))
        return self.histories[-1]

    def close(self) -> None:
        """Close the files of all processes as if they were killed, with what they have flushed."""
        for history in self.histories:
            history._file.close()

    # Supervisors

    def start(self, node: int, after: float = 0.0) -> None:
        """Start a supervisor on `node`, which has none."""
        process = self.supervisors[node] = Process(f"supervisor-{node}", node)
        self.world.spawn(process, lambda: self._supervise(process), after)

    def lose(self, node: int) -> None:
        """Let the processes of `node` die."""
        self.supervisors.pop(node).is_dead = True
        self._kill(node)

    def _supervise(self, process: Process) -> None:
        node = process.node
        verdict = ""
        rendezvous = self._rendezvous(node)
        try:
            verdict = self._train(node, rendezvous)
        except (RunEnded, TooFewNodes, HoldfastError) as error:
            self.refused.append(f"{type(error).__name__}: {error}")
            self.world.record(f"ends: {self.refused[-1]}")
        self._kill(node)
        rendezvous.close(verdict)
        process.is_dead = True
        self.supervisors.pop(node)

    def _rendezvous(self, node: int) -> Rendezvous:
        attempt = self._last.get(node, 0) + 1
        if self.nodes == 1:
            return Rendezvous(attempt)
        return MultiNodeRendezvous(
            SimulatedNode(
                rank=node,
                of=self.nodes,
                endpoint=f"{address_of(0)}:{PORT}",
                least=self.least,
                lost_after=LOST_AFTER,
            ),
            {},
            SimulatedCheckpoints(self.world, self.store(), self.truth),
            attempt=attempt,
            say=self.world.record,
            run_end=SimulatedEnd(self),  # type: ignore[arg-type]
        )

    def _train(self, node: int, rendezvous: Rendezvous) -> str:
        """Start the workers of `node`, again after each failure, until the run is complete; return the verdict."""
        failure: Detect | None = None
        while True:
            round = rendezvous.meet(self.workers)
            self._last[node] = round.attempt
            self._journal(node, round.attempt, failure)
            self._start_workers(node, round, rendezvous.peers.term)
            failure = self._watch(node, round, rendezvous)
            if failure is None:
                return RunVerdict(
                    verdict="completed", attempts=round.attempt, because="all workers have finished"
                ).to_text()
            self._kill(node)

    def _watch(self, node: int, round: RoundInfo, rendezvous: Rendezvous) -> Detect | None:
        """Watch the workers of `node`, and the other nodes; return why all workers restart, or None if all have ended."""
        number = round.attempt
        workers = self.running[node]
        while True:
            self.world.sleep(LOOK * self.world.rng.random())
            self.faults.point("watching")
            for rank, (process, worker) in zip(round.ranks, workers, strict=True):
                if process.is_dead and not worker.is_done:
                    return Detect(number, rank, rank % self.workers, "signal", "it was killed")
            have_finished = all(worker.is_done for _, worker in workers)
            try:
                found = news.ask(rendezvous, have_finished=have_finished, is_suspicious=False)
            except Unreachable as error:
                return Detect(number, -1, 0, "peer", str(error))
            if isinstance(found, news.AllNodesFinished):
                self._complete(node, number)
                return None
            if found is not None:
                return Detect(number, -1, 0, "peer", str(found))

    def _kill(self, node: int) -> None:
        for process, _ in self.running.pop(node, ()):
            process.is_dead = True

    def _complete(self, node: int, number: int) -> None:
        self.completed = True
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

    def _start_workers(self, node: int, round: RoundInfo, term: Term | None) -> None:
        training = self._trainings.setdefault(round.round, Training(round.nodes))
        self.attempts += 1
        if self.attempts >= ATTEMPTS * self.nodes:
            self.truth.violated(f"the run does not end: it restarts again and again, and is at attempt {round.attempt}")
        self.running[node] = []
        for rank in round.ranks:
            self._start_worker(node, round, term, rank, training)

    def _start_worker(self, node: int, round: RoundInfo, term: Term | None, rank: int, training: Training) -> None:
        process = Process(f"rank-{rank}@{node}#{round.attempt}.{self.attempts}", node)
        self.truth.terms[process.name] = round.term
        messages = self.network.store(*round.store)
        store: Store = self.store()
        if term:
            store = Fenced(store, term.number, lambda newer: messages.check([node_key(newer.token, node)]))
        worker = Worker(
            world=self.world,
            settings=self.settings,
            number=round.attempt,
            ranks=SimulatedRanks(
                rank=rank,
                size=round.world_size,
                store=Prefixed("run", messages),
                grouped=True,
                device=torch.device("cpu"),  # type: ignore[arg-type]
            ),
            store=store,
            folder=self.folder / f"{node}",
            history=lambda who: self._history(node, who),
            meet=lambda step: self._meet(training, rank, round.world_size, step),
            restored=self._restored,
        )

        def run() -> None:
            try:
                worker.run()
            except (HoldfastError, RuntimeError) as error:
                self.world.record(f"failed: {type(error).__name__}: {error}")
                if not isinstance(error, HoldfastError) and not str(error).startswith(_LOST):
                    raise
                process.is_dead = True

        self.running[node].append((process, worker))
        self.world.spawn(process, run, self.world.rng.random())

    def _meet(self, training: Training, rank: int, world: int, step: int) -> None:
        """Wait until all ranks have come to `step` and can reach each other: no gradient is summed without them."""
        arrived = training.arrived
        arrived[rank] = step
        self.world.changes += 1
        deadline = self.world.now + 600
        while len(arrived) < world or min(arrived.values()) < step or self._is_split(training.nodes):
            self.world.poll(0.005)
            if self.world.now > deadline:
                raise WorkerLost("a peer does not come")

    def _is_split(self, nodes: tuple[int, ...]) -> bool:
        return any({one, other} <= {*nodes} for one, other in self.cuts)

    def _restored(self, rank: int, found: RestoredState, protected: Protected) -> None:
        self.world.record(f"restored {found.step}")
        self.truth.restored(found.step)
