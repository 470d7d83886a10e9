"""Runs of the parameter server as they could have happened: members are lost at every moment, and others join.

A run is played with a model of the truth: which node holds which block, what was pushed, applied, chosen and committed.
The lines are what controller, nodes and workers would write. Nothing here asks the audit, and no numbers are trained.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.blocks.partition_map import PartitionMap
from holdfast.blocks.policy import Policy
from holdfast.events import (
    Applied,
    Chosen,
    Commit,
    Done,
    Dropped,
    Event,
    Iterate,
    Joined,
    Lost,
    Moved,
    Open,
    Pushed,
    Restored,
    Serve,
    Struck,
    What,
)
from holdfast.sampler.digest import Samples

NOON = 1.7e9


@dataclass(slots=True)
class PlayedRun:
    """A simulated run: its plan, its history files, and the time of its newest event."""

    plan: Serve
    files: defaultdict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    now: float = NOON

    def write(self, who: str, what: What) -> None:
        self.now += 0.125
        self.files[who].append(Event(self.now, who, what))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a node has set aside to be saved as of an iteration."""

    node: int
    iteration: int
    ids: Ids


def play_run(rng: random.Random, failing: float = 0.05) -> PlayedRun:
    """Simulate a run that loses a process at every moment with the probability `failing`."""
    return _Play(rng, failing).play()


class _Play:
    """The run as it goes."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        self.rng, self.failing = rng, failing
        policy, fraction = rng.choice([("full", "1"), ("priority", "1/2"), ("round", "1/4"), ("threshold", "1/2")])
        self.plan = Serve(
            0,
            "played",
            blocks=rng.randint(8, 20),
            nodes=rng.randint(1, 4),
            workers=rng.randint(1, 3),
            rounds=rng.choice([1, 1, 2, 3]),
            policy=policy,
            fraction=fraction,
            interval=rng.choice([4, 8]),
            recovery=rng.choice(["partial", "partial", "full"]),
            seed=rng.randrange(1 << 40),
            staleness=0,
            criterion=0.1,
            iterations=rng.randint(3, 9),
        )
        self.run = PlayedRun(self.plan)
        self.policy = Policy(ranking=policy, fraction=Fraction(fraction), interval=self.plan.interval)
        self.nodes, self.workers = set(range(self.plan.nodes)), set(range(self.plan.workers))
        self.started = {"node": self.plan.nodes, "worker": self.plan.workers}
        self.dead: list[int] = []
        self.store = np.full(self.plan.blocks, -1)
        self.on_their_way: list[Choice] = []
        self.recorded: set[int] = set()
        self.life, self.iteration, self.round = 0, 0, 0
        self.chosen_for = 0
        self.losses = [0.0]
        count = self.plan.blocks
        self.pushes = {  # which blocks are pushed from a part of the input, in a round
            (part, round): np.array(
                sorted(rng.sample(range(count), rng.choice([count, count, rng.randint(0, count)]))), int
            )
            for part in range(self.plan.workers)
            for round in range(self.plan.rounds)
        }

    def play(self) -> PlayedRun:
        for kind, count in self.started.items():
            for number in range(count):
                self.run.write(f"{kind}-{number}", Open(2))
        self.tell(Open(2))
        self.tell(self.plan)
        self.begin()
        loss, crosses = 1.0, self.rng.randint(2, 12)
        while loss >= self.plan.criterion and self.iteration < self.plan.iterations:
            self.iterate()
            loss = 1.0 / self.iteration if self.iteration < crosses else 0.05
            self.tell(Iterate(self.iteration - 1, loss, 1.0, 0.25, 0.5, 0.125, 0.0625, 0.0625))
        self.commit()
        self.tell(Done(self.life, self.iteration))
        return self.run

    def tell(self, what: What) -> None:
        self.run.write("controller", what)

    def happens(self) -> bool:
        return self.rng.random() < self.failing

    @property
    def number(self) -> int:
        return self.iteration * self.plan.rounds + self.round

    def begin(self) -> None:
        if len(self.nodes) > 1 and self.happens():
            node = self.rng.choice(sorted(self.nodes))
            self.nodes.discard(node)
            self.dead.append(node)
            self.tell(Lost(0, 0, "node", node, "its process died"))
        self.map = PartitionMap.random(self.plan.blocks, sorted(self.nodes), np.random.default_rng((self.plan.seed, 0)))
        self.there = self.map.owners.astype(int)  # who really has each block
        self.store[:] = 0
        if self.happens():
            self.die()
        else:
            self.recorded.add(0)
            self.tell(Commit(self.life, 0, 64, 0.25, blocks=tuple(range(self.plan.blocks))))

    def iterate(self) -> None:
        self.round = 0
        if self.happens() and len(self.nodes) < self.plan.blocks:
            self.join()
        if self.happens():
            victims = self.rng.sample(sorted(self.nodes), self.rng.randint(1, len(self.nodes)))
            self.commit()
            self.tell(Struck(self.iteration, "node", victims))
            self.lose(victims, self.number)
        while self.round < self.plan.rounds:
            self.do_round()
            self.round += 1
        self.round -= 1
        if self.happens():  # while the loss is measured
            self.lose_some(self.number + 1)
        if self.policy.due(self.iteration + 1):
            self.checkpoint(self.iteration + 1)
        if self.happens():
            self.die()
        self.iteration += 1

    def do_round(self) -> None:
        todo = set(range(self.plan.workers))
        while todo:
            if self.happens():
                kind = self.rng.choice(["node", "worker", "controller"])
                if kind == "worker":
                    self.lose_worker()
                    continue
                if kind == "controller":
                    self.die()
                else:
                    self.lose_some(self.number)
                todo = set(range(self.plan.workers))
                continue
            part = min(todo)
            self.push(part)
            if self.happens():  # the worker's answer is lost, and another does the same again
                self.lose_worker()
            else:
                todo.discard(part)
        self.apply()

    def push(self, part: int) -> None:
        worker = part if part in self.workers else min(self.workers)
        ids = self.pushes[part, self.round]
        to = sorted(self.map.split(ids))
        self.run.write(
            f"worker-{worker}", Pushed(self.iteration, self.round, part, self.map.version, Samples.of(ids), to)
        )

    def apply(self) -> None:
        """Nodes apply the round; some may die before or after, and so may the controller."""
        silent: list[int] = []
        for node in sorted(self.nodes):
            if self.happens():
                silent.append(node)
                if self.rng.random() < 0.5:
                    continue  # it died before it applied the round
            if not silent and self.happens():
                self.die(opened=False)
            mine = set(self.map.held_by(node).tolist())
            parts = [p for p in range(self.plan.workers) if mine & set(self.pushes[p, self.round].tolist())]
            blocks = Samples.of(self.map.held_by(node))
            self.run.write(
                f"node-{node}",
                Applied(self.iteration, self.round, self.map.version, blocks, parts, self.rng.randint(0, 1)),
            )
        if silent:
            lost = np.concatenate([self.map.held_by(node) for node in silent])
            self.tell(Dropped(self.iteration, self.round, range(self.plan.workers), Samples.of(lost)))
            self.lose(silent, self.number + 1)

    def checkpoint(self, step: int) -> None:
        self.commit()
        lost: list[int] = []
        total = []
        told = True
        for node in sorted(self.nodes):
            if self.happens():
                lost.append(node)
                if self.rng.random() < 0.5:
                    continue  # it died before it chose
            held = self.map.held_by(node)
            ids = held if self.policy.ranking == "full" else held[[self.rng.random() < 0.5 for _ in held]]
            self.run.write(f"node-{node}", Chosen(step, Samples.of(ids), 8 * len(ids), 0.001))
            if node not in lost or self.rng.random() < 0.5:
                total.append(ids)
            self.on_their_way.append(Choice(node, step, ids))
        if not lost and self.happens():
            told = False
            self.die()
        if told:
            everything = np.concatenate([np.zeros(0, int), *total])
            self.tell(Chosen(step, Samples.of(everything), 8 * len(everything), 0.01))
        if lost:
            self.lose(lost, self.number + 1)
        if self.happens():
            self.commit()

    def commit(self, lost: tuple[int, ...] = ()) -> None:
        """What is on its way is committed; of lost nodes perhaps, and perhaps not."""
        parts = [each for each in self.on_their_way if each.node not in lost or self.rng.random() < 0.5]
        self.on_their_way = []
        ids = np.concatenate([np.zeros(0, int), *(each.ids for each in parts)])
        if len(ids):
            self.store[ids] = parts[0].iteration
            self.recorded.add(parts[0].iteration)
            self.tell(Commit(self.life, parts[0].iteration, 8 * len(ids), 0.25, blocks=ids.tolist()))

    def lose_some(self, version: int) -> None:
        self.lose(self.rng.sample(sorted(self.nodes), 1), version)

    def lose(self, victims: list[int], version: int) -> None:
        """Nodes are lost, and perhaps others while their blocks come back."""
        for node in victims:
            self.nodes.discard(node)
            self.dead.append(node)
            blocks = self.map.held_by(node).tolist()
            told = version if blocks else 0
            self.tell(Lost(self.iteration, self.round, "node", node, "its process died", blocks, told))
        self.commit(tuple(victims))
        if self.nodes:
            gone = [node for node in self.map.nodes if node not in self.nodes]
            self.map = self.map.without(gone, np.random.default_rng(self.rng.randrange(1 << 30)))
        else:
            for _ in range(self.plan.nodes):
                self.nodes.add(self.start("node", self.map.version + 1))
            drawn = PartitionMap.random(
                self.plan.blocks, sorted(self.nodes), np.random.default_rng(self.rng.randrange(99))
            )
            self.map = PartitionMap(self.map.version + 1, drawn.owners, drawn.nodes)
        self.hold(set(victims), version)

    def hold(self, victims: set[int], version: int) -> None:
        lacking = self.lacking()
        more: list[int] = []
        for node in sorted(self.nodes):
            held = self.map.held_by(node)
            ids = held if self.plan.recovery == "full" else held[np.isin(held, lacking)]
            if len(ids) and self.happens():
                more.append(node)
            elif len(ids):
                saved_at = self.store[ids].tolist()
                what = Restored(
                    self.iteration,
                    self.round,
                    node,
                    self.map.version,
                    ids.tolist(),
                    saved_at,
                    0.25,
                    self.rng.choice([None, 2.0]),
                )
                self.run.write(f"node-{node}", what._replace(size=None))
                self.tell(what)
                self.there[ids] = node
        if more:
            self.lose(more, version)

    def lacking(self) -> Ids:
        """Blocks that nobody has."""
        return np.flatnonzero(~np.isin(self.there, list(self.nodes)))

    def lose_worker(self) -> None:
        worker = self.rng.choice(sorted(self.workers))
        self.workers.discard(worker)
        self.tell(Lost(self.iteration, self.round, "worker", worker, "its process died"))
        if not self.workers:
            self.workers.add(self.start("worker", self.map.version + 1))

    def start(self, kind: str, version: int) -> int:
        number = self.started[kind]
        self.started[kind] += 1
        self.run.write(f"{kind}-{number}", Open(2))
        self.tell(Joined(self.iteration, kind, number, version))
        return number

    def join(self) -> None:
        """A node joins at the beginning of an iteration, and others give it blocks as they are."""
        self.commit()
        before = self.map
        self.map = before.with_node(self.started["node"], np.random.default_rng(self.rng.randrange(1 << 30)))
        node = self.start("node", self.map.version)
        self.nodes.add(node)
        for donor, ids in before.split(self.map.held_by(node)).items():
            self.tell(Moved(self.iteration, donor, node, self.map.version, ids.tolist()))
        self.there[:] = self.map.owners

    def die(self, opened: bool = True) -> None:
        """The controller is lost, and the next one finds out how things stand."""
        if self.on_their_way and self.rng.random() < 0.5:  # it was committed, and nobody told
            step = self.on_their_way[0].iteration
            for each in self.on_their_way:
                self.store[each.ids] = step
            self.on_their_way = []
        self.life += 1
        self.tell(Open(2))
        self.tell(self.plan._replace(attempt=self.life))
        newest = int(self.store.max())
        self.tell(Commit(self.life, newest, 0, found=True, blocks=np.flatnonzero(self.store == newest).tolist()))
        self.tell(Lost(self.iteration, self.round, "controller", 0, "its process died"))
        self.map = PartitionMap(self.map.version + 1, self.map.owners, self.map.nodes)
        self.commit()
        for node in self.dead:
            self.tell(Lost(self.iteration, self.round, "node", node, "its process died"))
