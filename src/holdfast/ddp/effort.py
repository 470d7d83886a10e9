"""Whether a window was trained, and not only handed out: backward passes of the replicas, steps of the optimizers."""

from collections.abc import Iterable

import torch

from holdfast.ddp.replica import Replica


class Effort:
    """Counts what is done with each window."""

    def __init__(self, replicas: Iterable[Replica], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._replicas = list(replicas)
        self._stepped = 0
        self._before = (0, 0, 0)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._step)

    def begin(self) -> None:
        """A window is handed out."""
        self._before = self._counts()

    def taken(self) -> tuple[int, int, int]:
        """Since then: backward passes that were summed over the ranks, those held back, steps of optimizers."""
        now, before = self._counts(), self._before
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def _counts(self) -> tuple[int, int, int]:
        reduced = held = 0
        for each in self._replicas:
            reduced, held = reduced + each.reduced, held + each.held
        return reduced, held, self._stepped

    def _step(self, *_: object) -> None:
        self._stepped += 1
