"""The settings of a run: the workload, the numbers of nodes and workers, the save policy, and failures to inject."""

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from holdfast.blocks.policy import Policy
from holdfast.blocks.recoveries import RECOVERIES
from holdfast.checkpoint.place import store_at
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput
from holdfast.events import Serve
from holdfast.faults.schedule import Schedule
from holdfast.server.failure_detector import DEADLINE
from holdfast.workloads.divided import DividedWorkload
from holdfast.workloads.registry import load_workload

POINTS = ("boundary", "apply", "checkpoint", "recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run on the parameter server, the same for all of its processes."""

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
    lost_after: float = DEADLINE
    failures: Schedule = field(default=())

    def __post_init__(self) -> None:
        for name in ("nodes", "workers", "iterations"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name} must be at least 1 (got {getattr(self, name)}).")
        if self.staleness < 0:
            raise BadInput(f"--staleness must be at least 0 (got {self.staleness}).")
        if not 0 < self.lost_after < inf:
            raise BadInput(f"--lost-after must be a number of seconds above 0 (got {self.lost_after:g}).")
        if self.recovery not in RECOVERIES:
            raise BadInput(f"--restore must be one of {', '.join(RECOVERIES)} (got {self.recovery!r}).")
        members = {"node": self.nodes, "worker": self.workers, "controller": 1}
        for failure in self.failures:
            kind, point = failure.kind, failure.point
            if kind not in members or point not in POINTS:
                raise BadInput(
                    f"Cannot kill {kind!r} at {point!r}: choose a node, a worker or the controller, at the boundary, "
                    "apply, checkpoint or recovery, such as kill@7:checkpoint,node=1."
                )
            if wrong := [target for target in failure.targets if not 0 <= target < members[kind]]:
                there = f"there are {members[kind]} at the start, numbered from 0"
                raise BadInput(f"cannot kill {kind} {wrong[0]}: {there}.")

    def load(self) -> DividedWorkload:
        return load_workload(self.workload, self.data)

    def open(self) -> Store:
        return store_at(self.store)

    def announced(self, life: int, workload: DividedWorkload) -> Serve:
        """Return an event that records these settings; `life` is the number of controllers that were lost before."""
        return Serve(
            attempt=life,
            workload=workload.name,
            blocks=len(workload.blocks),
            nodes=self.nodes,
            workers=self.workers,
            rounds=workload.rounds,
            policy=self.policy.name,
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
        return self.out / "history"
