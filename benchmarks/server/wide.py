"""A model that only moves numbers, to measure the server and not the model: a file for `holdfast serve`.

`--data` names a folder with a file wide.json: {"megabytes": 16, "work": 0}. Workers pull everything, multiply matrices
`work` times, and push as many bytes as they pulled.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.workloads.divided import Push, When
from holdfast.workloads.model import Model

WIDTH = 4096  # numbers of 4 bytes in a block
SIDE = 512  # of the matrices


class Wide(Model):
    """Blocks of 16 kB, which nodes replace by what is pushed."""

    criterion = 0.0

    def __init__(self, megabytes: int, work: int) -> None:
        self._rows, self._work = megabytes * 1_000_000 // (4 * WIDTH), work

    def start(self, stream: int = 0) -> dict[str, Any]:
        """Zeros."""
        return {"values": np.zeros((self._rows, WIDTH), np.float32)}

    def part(self, worker: int, workers: int) -> NDArray[np.float32]:
        """A matrix."""
        return np.full((SIDE, SIDE), 0.5, np.float32)

    def pulls(self, part: Any, round: int) -> NDArray[np.int64]:
        """Everything, but nothing to measure the loss."""
        return np.arange(self._rows if round < self.rounds else 0)

    def compute(self, part: Any, when: When, pulled: dict[str, Any], summed: dict[str, Any]) -> Push:
        """What was pulled."""
        for _ in range(self._work):
            part @ part
        return Push(np.arange(self._rows), {"values": pulled["values"]})

    def apply(self, when: When, ids: NDArray[np.int64], held: dict[str, Any], pushed: dict[str, Any]) -> None:
        """Take it."""
        held["values"][...] = pushed["values"]

    def measure(self, part: Any, pulled: dict[str, Any], summed: dict[str, Any]) -> float:
        """It never converges."""
        return 1.0


def workload(data: Path | None) -> Wide:
    """The model of the size that the folder tells."""
    assert data is not None
    return Wide(**json.loads((data / "wide.json").read_text()))
