"""Recovery within a backward pass: `torch.autograd.backward` recovers if a lost worker makes it fail.

DDP sums gradients during backward, so most losses show there: backward raises an error, or a sum has failed without one.
The guard then lets the recovery complete the sums of the interrupted model, and backward returns as if nothing was lost.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from holdfast.distributed.gloo_link import Link
from holdfast.distributed.membership import Coordination
from holdfast.distributed.process_group import RecoverableGroup
from holdfast.errors import BadInput
from holdfast.live.training_hooks import WorkInStep
from holdfast.progress import restart_needed

logger = logging.getLogger(__name__)


class BackwardRecovery(Protocol):
    """The part of a recovery that a `BackwardGuard` calls."""

    def begin_backward(self) -> None:
        """Prepare for a backward pass. The guard calls this before every pass."""

    def recover(self, group: RecoverableGroup | None) -> None:
        """Recover together with the remaining workers, and complete the gradient sums of `group`."""

    def end_backward(self, group: RecoverableGroup) -> None:
        """End a backward pass of `group`, whose gradient sums are complete."""


@dataclass(slots=True, eq=False)
class BackwardGuard:
    """A guard of this process's backward passes: a pass that a lost worker interrupts is completed by `recovery`.

    `groups` has the process group of each replicated model, and grows as the script replicates more models."""

    coordination: Coordination
    link: Link
    groups: Sequence[RecoverableGroup]
    recovery: BackwardRecovery
    _has_warned: bool = field(default=False, init=False)  # of a backward through several models

    def install(self) -> None:
        """Wrap `torch.autograd.backward` so that it recovers if it fails because of a lost worker."""
        plain = torch.autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **options: Any) -> None:
            self.recovery.begin_backward()
            try:
                plain(*args, **options)
            except RuntimeError:
                if not any(self.recover(group) for group in self.groups):
                    raise
            else:
                self._check_one_model()
                for group in self.groups:
                    if not (self.link.is_broken and group.has_failed() and self.recover(group)):
                        self.complete(group)

        torch.autograd.backward = backward

    def recover(self, group: RecoverableGroup) -> bool:
        """Recover the backward pass of `group` if a lost worker made it fail; return False for any other error."""
        if not group.sums or not (self.link.is_broken or self.coordination.is_outdated or group.has_failed()):
            return False
        self._check_one_model(has_failed=True)
        self.recovery.recover(group)
        self.complete(group)
        return True

    def complete(self, group: RecoverableGroup) -> None:
        """End the backward pass of `group`, if the pass went through the group's model."""
        if group.sums:
            group.end()
            self.recovery.end_backward(group)

    def _check_one_model(self, *, has_failed: bool = False) -> None:
        """Warn once if a backward pass goes through several replicated models; if the pass has failed, restart the run.

        The gradients of one model can be completed after a loss, but not those of several models at once."""
        summed = [group for group in self.groups if group.sums]
        if len(summed) < 2:
            return
        if has_failed or self.link.is_broken or any(group.has_failed() for group in summed):
            raise restart_needed(f"a worker was lost in a backward pass through {len(summed)} replicated models")
        if not self._has_warned and self.coordination.rank == 0:
            logger.warning(
                "holdfast: a backward pass goes through %d replicated models: if a worker is lost in it, the run restarts "
                "from its newest snapshot. To recover live, make them parts of one nn.Module and replicate that; for a model that "
                "does not step then, such as a GAN's discriminator, call run.unwrap(model).",
                len(summed),
            )
        self._has_warned = True


def check_accumulation(work: WorkInStep) -> None:
    """Raise BadInput if a backward pass adds its gradients to those of an earlier step."""
    if work.is_pending:
        raise BadInput(
            "Gradients are added to those of an earlier step, and a lost worker's part of those cannot be recovered. "
            "With live recovery, step the optimizer in every step; accumulate with run.batches(..., micro_batches=N)."
        )
