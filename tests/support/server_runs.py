"""What tests of served runs share: a short run, the simulator's of the same length, and what the history says."""

from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from holdfast.blocks.policy import Policy
from holdfast.checkpoint.running import RunningCheckpoint
from holdfast.checkpoint.store import DirectoryStore
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from holdfast.server.driver import serve
from holdfast.server.settings import Settings
from holdfast.server.status import ServerOutcome
from holdfast.workloads.workload import Arrays, Clock, Workload, stacked, unstacked

Kind = TypeVar("Kind")
QUARTERS = Policy(ranking="priority", interval=4, fraction=Fraction(1, 4))


def settings(out: Path, *failures: Failure, **changed: Any) -> Settings:
    """A short run on the embedded digits that saves a quarter after every iteration."""
    told = {"workload": "mlr-digits", "nodes": 3, "workers": 2, "policy": QUARTERS, "iterations": 4} | changed
    return Settings(out=out, store=str(out / "checkpoints"), failures=failures, **told)


def served(out: Path, *failures: Failure, **changed: Any) -> ServerOutcome:
    """How such a run ends."""
    return serve(settings(out, *failures, **changed))


def simulated(workload: Workload, iterations: int) -> list[Arrays]:
    """The states of a run without failure, of stream 0."""
    states = [workload.start()]
    for iteration in range(iterations):
        clock = Clock(np.array([iteration]), np.zeros(1, np.int64))
        states.append(unstacked(workload.advance(stacked([states[-1]]), clock), 0))
    return states


def advanced(workload: Workload, state: Arrays, iteration: int) -> Arrays:
    """A state after one more iteration."""
    clock = Clock(np.array([iteration]), np.zeros(1, np.int64))
    return unstacked(workload.advance(stacked([state]), clock), 0)


def loss_of(workload: Workload, state: Arrays) -> float:
    """The loss of a state, as the simulator measures it."""
    return float(workload.loss(stacked([state]))[0])


def told(out: Path, kind: type[Kind], who: str = "controller") -> list[Kind]:
    """The events of a kind in one file of the history."""
    return [
        event.what for event in read_history(out / "history" / f"{who}.jsonl").events if isinstance(event.what, kind)
    ]


def checkpoint(out: Path, workload: Workload) -> RunningCheckpoint:
    """The running checkpoint that a run left."""
    return RunningCheckpoint.open(DirectoryStore(out / "checkpoints"), workload.blocks)
