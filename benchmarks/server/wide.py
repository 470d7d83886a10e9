"""A workload for `holdfast serve` that only moves numbers, to measure the server and not a model.

`--data` names a folder with a file wide.json: {"megabytes": 16, "work": 0}. Workers pull everything, multiply matrices
`work` times, and push as many bytes as they pulled.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.workloads.divided import Push, RoundId
from holdfast.workloads.model import Model

WIDTH = 4096  # float32 numbers in a block
SIDE = 512  # rows and columns of the matrices


class Wide(Model):
    """Blocks of 16 kB, which every push replaces."""

    criterion = 0.0

    def __init__(self, megabytes: int, work: int) -> None:
        self._rows, self._work = megabytes * 1_000_000 // (4 * WIDTH), work

    def start(self, stream: int = 0) -> dict[str, Any]:
        """Return zeros."""
        return {"values": np.zeros((self._rows, WIDTH), np.float32)}

    def part(self, worker: int, workers: int) -> NDArray[np.float32]:
        """Return the matrix that workers multiply."""
        return np.full((SIDE, SIDE), 0.5, np.float32)

    def pulls(self, part: Any, round: int) -> NDArray[np.int64]:
        """Return all blocks, but none to measure the loss."""
        return np.arange(self._rows if round < self.rounds else 0)

    def compute(self, part: Any, when: RoundId, pulled: dict[str, Any], summed: dict[str, Any]) -> Push:
        """Multiply matrices, and push the pulled values."""
        for _ in range(self._work):
            part @ part
        return Push(np.arange(self._rows), {"values": pulled["values"]})

    def apply(self, when: RoundId, ids: NDArray[np.int64], held: dict[str, Any], pushed: dict[str, Any]) -> None:
        """Replace the values by the pushed ones."""
        held["values"][...] = pushed["values"]

    def measure(self, part: Any, pulled: dict[str, Any], summed: dict[str, Any]) -> float:
        """Return 1, which never reaches the criterion."""
        return 1.0


def workload(data: Path | None) -> Wide:
    """Return the model whose size is in `data`/wide.json."""
    assert data is not None
    return Wide(**json.loads((data / "wide.json").read_text()))
