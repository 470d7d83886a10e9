"""Detection of changes to protected state within a step, which would make a repetition of the step inexact.

Under `replay`, a replacement repeats the interrupted step with the state of a survivor, which is in the middle of that
step. Parameters and optimizers have not changed since the step began, because gradients change them only later. Other
state may have changed: a meter that is updated before backward, a scheduler that steps first, or buffers that are not
copied from rank 0. Tensors are compared by torch's version counters, which every change in place increases.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.train.state.plain_values import PlainState
from holdfast.train.state.protected import Protected

_KEPT_ELSEWHERE = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, PlainState)


class BoundaryMarks:
    """A detector of changes during a step to protected state that is not trained by an optimizer.

    Every method takes `copied`: the `id()` of each buffer that forward passes copy from rank 0. Such buffers are ignored."""

    def __init__(self, protected: Protected) -> None:
        trained = {
            id(value) for thing in protected.optimizers for group in thing.param_groups for value in group["params"]
        }
        self._averages = [
            value for model in protected.models for value in model.parameters() if id(value) not in trained
        ]
        self._buffers = [buffer for model in protected.models for buffer in model.buffers()]
        self._objects = [thing for thing in protected.things.values() if not isinstance(thing, _KEPT_ELSEWHERE)]
        numbers = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._at_start = [(buffer, _first_values(buffer)) for buffer in numbers]
        self.take(())

    def take(self, copied: Collection[int]) -> None:
        """Remember the state between two steps, for a later `have_changed`. Ignore buffers with an `id()` in `copied`."""
        self._at_boundary = [(buffer, buffer._version) for buffer in self._buffers if id(buffer) not in copied]
        self._others_at_boundary = self._mark_others()

    def have_changed(self, copied: Collection[int]) -> bool:
        """Return True if state has changed since the last call of `take`. Ignore buffers with an `id()` in `copied`."""
        changed = (id(buffer) for buffer, before in self._at_boundary if buffer._version != before)
        return any(buffer not in copied for buffer in changed) or self._mark_others() != self._others_at_boundary

    def has_own_buffers(self, copied: Collection[int]) -> bool:
        """Return True if training has changed a floating-point buffer since its start, apart from those in `copied`."""
        own = ((buffer, before) for buffer, before in self._at_start if id(buffer) not in copied)
        # By value: the kernels of batch-norm do not count as changes in place.
        return any(not torch.equal(_first_values(buffer), before) for buffer, before in own)

    def _mark_others(self) -> list[Any]:
        return [*(value._version for value in self._averages), *map(_mark_object, self._objects)]


def _first_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten()[:8].clone()


def _mark_object(thing: Any) -> Any:
    # A scheduler counts its steps, and its other state follows from the count.
    return thing.last_epoch if isinstance(thing, LRScheduler) else _mark(thing.state_dict())


def _mark(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.data_ptr(), state._version
    if isinstance(state, Mapping):
        return [(key, _mark(value)) for key, value in state.items()]
    if isinstance(state, list | tuple):
        return [_mark(value) for value in state]
    return state.tobytes() if isinstance(state, np.ndarray) else state
