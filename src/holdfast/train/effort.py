"""What is done with a window: backward passes of the replicas, steps of the optimizers, and gradients that wait for one.

That a window was trained, and not only handed out, goes on record; and a state is saved only where no gradients wait for
their optimizer, since gradients are no part of it.
"""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.errors import BadInput
from holdfast.train.replicate import Replica
from holdfast.train.state.protected import Protected

LONGEST = 1000  # windows that gradients are waited for; a script that never steps is saved all the same


class Effort:
    """Counts what is done with each window."""

    def __init__(self, replicas: Iterable[Replica], protected: Protected) -> None:
        self._replicas, self._protected = list(replicas), protected
        self._stepped = 0
        self._before = (0, 0, 0)
        self._waited = 0  # windows since the last step of an optimizer
        self._known: set[int] = set()
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def taken(self) -> tuple[int, int, int]:
        """Since the last time: backward passes that were summed over the ranks, those held back, steps of optimizers."""
        reduced = held = 0
        for each in self._replicas:
            reduced, held = reduced + each.reduced, held + each.held
        before, self._before = self._before, (reduced, held, self._stepped)
        stepped = self._stepped - before[2]
        self._waited = 0 if stepped else self._waited + 1
        return reduced - before[0], held - before[1], stepped

    @property
    def is_idle(self) -> bool:
        """Whether nothing was done since the last time: no backward pass, no step, and no gradients are there."""
        passes = sum(each.reduced + each.held for each in self._replicas)
        return passes == sum(self._before[:2]) and self._stepped == self._before[2] and not self._has_gradients

    @property
    def is_pending(self) -> bool:
        """Whether gradients of earlier windows wait for their optimizer to step."""
        return 0 < self._waited <= LONGEST and self._has_gradients

    @property
    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None
            for optimizer in self._protected.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def close(self) -> None:
        """Count no more."""
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._known:
            self._protected.check_trainer(optimizer)
            self._known.add(id(optimizer))
        for each in self._replicas:
            if each.holds_back:
                _check_summed(optimizer, each)
        self._stepped += 1


def _check_summed(optimizer: Optimizer, replica: Replica) -> None:
    """Refuse a step by the gradients of one rank: from then on no two ranks would have the same weights."""
    held = {id(each) for each in replica.ddp.parameters()}
    if any(id(each) in held for group in optimizer.param_groups for each in group["params"]):
        raise BadInput(
            f"{type(optimizer).__name__} stepped before the gradients of all ranks were summed: with accumulate, step "
            "only where batch.last is true"
        )
