"""How a run is to be served: what is trained, by how many, saved how, and what is to fail on purpose."""

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.blocks.policy import Policy
from holdfast.blocks.recoveries import RECOVERIES
from holdfast.checkpoint.place import store_at
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput
from holdfast.events import Serve
from holdfast.faults.schedule import Schedule
from holdfast.workloads.divided import Divided
from holdfast.workloads.registry import load_workload

KINDS = ("node", "worker", "controller")
POINTS = ("boundary", "apply", "checkpoint", "recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A served run as plain values, the same for every process of it."""

    workload: str
    nodes: int
    workers: int
    policy: Policy
    out: Path
    store: str
    data: Path | None = None
    recovery: str = "partial"
    seed: int = 0
    staleness: int = 0
    iterations: int = 1000
    failures: Schedule = field(default=())

    def __post_init__(self) -> None:
        for name in ("nodes", "workers", "iterations"):
            if getattr(self, name) < 1:
                raise BadInput(f"a server with {getattr(self, name)} {name} can train nothing: give 1 or more")
        if self.staleness < 0:
            raise BadInput(f"a staleness of {self.staleness} iterations is below zero: give 0 or more")
        if self.recovery not in RECOVERIES:
            raise BadInput(f"--restore must be one of {', '.join(RECOVERIES)} (got {self.recovery!r}).")
        for failure in self.failures:
            self._check(failure.kind, failure.targets, failure.point)

    def load(self) -> Divided:
        """The workload, with its data."""
        return load_workload(self.workload, self.data)

    def open(self) -> Store:
        """Where checkpoints are."""
        return store_at(self.store)

    def announced(self, life: int, workload: Divided) -> Serve:
        """What a controller says when it begins, the first or a later one."""
        return Serve(
            attempt=life,
            workload=workload.name,
            blocks=len(workload.blocks),
            nodes=self.nodes,
            workers=self.workers,
            rounds=workload.rounds,
            policy=self.policy.ranking,
            fraction=str(self.policy.fraction),
            interval=self.policy.interval,
            recovery=self.recovery,
            seed=self.seed,
            staleness=self.staleness,
            criterion=workload.criterion,
            iterations=self.iterations,
            saves=self.policy.saves,
        )

    @property
    def history(self) -> Path:
        """The folder of the histories."""
        return self.out / "history"

    def _check(self, kind: str, targets: tuple[int, ...], point: str) -> None:
        if kind not in KINDS or point not in POINTS:
            raise BadInput(
                f"Cannot kill {kind!r} at {point!r}: choose a node, a worker or the controller, at the boundary, apply, "
                "checkpoint or recovery, such as kill@7:checkpoint,node=1."
            )
        there = {"node": self.nodes, "worker": self.workers, "controller": 1}[kind]
        for target in targets:
            if not 0 <= target < there:
                raise BadInput(f"cannot kill {kind} {target}: there are {there} at the start, numbered from 0")
