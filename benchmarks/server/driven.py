"""The nodes and workers of a served run, driven round by round in place of the controller, without saving."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from holdfast.blocks.policy import Policy
from holdfast.server.members import Member, ServerMembers
from holdfast.server.recovery import first_map
from holdfast.server.selection import BINS, FEW, exchange
from holdfast.server.server_node import ServerNode
from holdfast.server.settings import Settings
from holdfast.server.worker import Worker, WorkerRound
from holdfast.workloads.divided import RoundId

WIDE = str(Path(__file__).with_name("wide.py").absolute())
OBJECTS = 3 << 30  # bytes of Ray's object store, for messages between actors
READY_WITHIN = 180.0  # seconds, long enough for a machine under other load


@contextmanager
def embedded() -> Iterator[None]:
    """Start Ray on this machine as `holdfast serve` does, with memory for large states."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        num_cpus=os.cpu_count(),
        object_store_memory=OBJECTS,
    )
    try:
        yield
    finally:
        ray.shutdown()


class Iteration(NamedTuple):
    """The seconds of an iteration: the total, and the slowest worker or node in each part."""

    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    measure: float


class Driven:
    """The actors of one setting, which stay alive so that different settings can take turns."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._workload = settings, settings.load()
        self._members = ServerMembers()
        kinds = {
            "node": (ServerNode, settings.nodes, {"health": 1, "disk": 1}),
            "worker": (Worker, settings.workers, {"health": 1}),
        }
        for kind, (made, count, groups) in kinds.items():
            actor: Any = ray.remote(num_cpus=0, concurrency_groups=groups)(made)
            for number in range(count):
                self._members.admit(Member(kind, number), actor.remote(number, settings))
        self._all(kind="node", method="ready")
        self._all(kind="worker", method="ready")
        self._map = first_map(len(self._workload.blocks), list(range(settings.nodes)), settings.seed)
        begun = {node: (self._map.held_by(node), 0) for node in self._members.nodes}
        self._asked("node", "begin", begun)
        routed = {worker: (self._map, dict(self._members.nodes)) for worker in self._members.workers}
        self._asked("worker", "route", routed)
        self._done, self._credit = 0, Fraction(0)

    def iteration(self) -> Iteration:
        """Do the next iteration, and return its times."""
        began, turns, apply = time.perf_counter(), [], 0.0
        workers = range(self._settings.workers)
        for round in range(self._workload.rounds):
            when = RoundId(self._done, round, self._settings.seed)
            turns.append(self._asked("worker", "compute", {worker: (when, (worker,)) for worker in workers}))
            committed = self._asked("node", "commit", dict.fromkeys(self._members.nodes, (0, when, tuple(workers))))
            apply += max(committed.values())
        measuring = time.perf_counter()
        self._asked("worker", "measure", {worker: ((worker,),) for worker in workers})
        self._done += 1
        now = time.perf_counter()
        return Iteration(
            now - began,
            sum(_slowest(turn, "pull") for turn in turns),
            sum(_slowest(turn, "compute") for turn in turns),
            sum(_slowest(turn, "push") for turn in turns),
            apply,
            now - measuring,
        )

    def checkpoint(self) -> dict[str, float]:
        """Let the nodes choose blocks and copy them, as the coordinator does; return the seconds of each part."""
        nodes, took = self._members.nodes, dict[str, float]()

        def asked(name: str, method: str, *arguments: Any) -> dict[int, Any]:
            began = time.perf_counter()
            answers = self._asked("node", method, dict.fromkeys(nodes, arguments))
            took[name] = took.get(name, 0.0) + time.perf_counter() - began
            return answers

        def ask(*question: Any) -> list[Any]:
            answers = asked(question[0], "answer", self._done, *question)
            return [answers[node] for node in sorted(answers)]

        asked("a message that asks nothing", "ready")
        ask("survey", -np.inf, FEW * BINS)
        took["survey, with distances"] = took.pop("survey")
        selection = exchange(self._settings.policy, self._credit, ask)
        self._credit = selection.credit
        asked("save", "save", self._done, selection.verdict, selection.credit)
        return took

    def message(self, count: int) -> float:
        """Return the seconds per call, for `count` calls to all nodes in flight at once.

        A call pulls one block, so that it carries the fixed part of every pull or push, and hardly more.
        """
        asked = [(actor, self._map.held_by(node)[:1]) for node, actor in self._members.nodes.items()]
        began = time.perf_counter()
        calls = [actor.pull.remote(0, ids) for actor, ids in islice(cycle(asked), count)]
        ray.get(calls, timeout=READY_WITHIN)
        return (time.perf_counter() - began) / count

    def end(self) -> None:
        """End the actors."""
        for member in self._members.all():
            self._members.expel(member)

    def _all(self, kind: str, method: str) -> None:
        there = self._members.nodes if kind == "node" else self._members.workers
        self._asked(kind, method, dict.fromkeys(there, ()))

    def _asked(self, kind: str, method: str, arguments: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        answers = self._members.ask(kind, method, arguments, READY_WITHIN)
        if answers.missing:
            raise SystemExit(f"{kind}s did not answer {method}: {answers.missing}")
        return answers.results


NOTHING = Policy(ranking="full", interval=1_000_000, fraction=Fraction(1))


def settings(
    folder: Path, workload: str, nodes: int, workers: int, data: Path | None = None, policy: Policy = NOTHING
) -> Settings:
    """Return the settings of a run that by default never saves."""
    out = folder / f"{Path(workload).stem}-{data.name if data else ''}-{nodes}-{workers}"
    return Settings(
        workload=workload, nodes=nodes, workers=workers, policy=policy, out=out, store=str(out / "store"), data=data
    )


def wide(folder: Path, megabytes: int, work: int = 0) -> Path:
    """Write a data folder for the model in wide.py."""
    data = folder / f"wide-{megabytes}-{work}"
    data.mkdir(exist_ok=True)
    (data / "wide.json").write_text(json.dumps({"megabytes": megabytes, "work": work}))
    return data


def _slowest(turns: dict[int, WorkerRound], part: str) -> float:
    return max(float(getattr(turn, part)) for turn in turns.values())
