"""How a served run stands, what its iterations took, and how it ended."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.server.worker import WorkerRound


class Status(NamedTuple):
    """How a run stands, for whoever watches it."""

    iteration: int = 0
    loss: float | None = None
    seconds: float = 0.0
    saves: int = 0
    failures: int = 0
    wanted: tuple[str, int, int] | None = None  # of which kind, how many new members, and the number of the request


class ServerOutcome(NamedTuple):
    """How a run ended."""

    converged: bool
    iterations: int
    loss: float


class Times:
    """Seconds of an iteration, of the slowest worker or node in every round."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.pull = self.compute = self.push = self.apply = 0.0

    def add(self, turns: Iterable[WorkerRound]) -> None:
        """A round was computed."""
        turns = list(turns)
        self.pull += max(turn.pull for turn in turns)
        self.compute += max(turn.compute for turn in turns)
        self.push += max(turn.push for turn in turns)
