"""Buffers such as batch normalization's, which every forward takes over from rank 0, where a run recovers live.

A window's first forward changes them, so they are kept as they came: a member that is lost in the middle of a step may
be replaced by one that computes the same forward with the same buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TIMES = 9  # that buffers are asked for: so many losses in one forward


@dataclass(slots=True, eq=False)
class Buffers:
    """The buffers that came from rank 0 in this window, and how often they came."""

    synced: int = 0
    _values: list[torch.Tensor] = field(default_factory=list)
    _given: bool = False  # they came from another, and the next forward uses them

    @property
    def are_there(self) -> bool:
        """Whether the models have any."""
        return bool(self._values)

    def sync(self, broadcast: Callable[[], None], buffers: list[torch.Tensor], recover: Callable[[], None]) -> None:
        """Take over rank 0's buffers before a forward; if members are lost meanwhile, those of the new rank 0."""
        for again in range(TIMES):
            if self._given:
                break
            try:
                broadcast()
                break
            except RuntimeError:  # gloo has no type for a peer that is gone
                if again == TIMES - 1:
                    raise
                recover()
        if self._given:
            torch._foreach_copy_(buffers, self._values)
            self._given = False
        elif len(self._values) == len(buffers):
            torch._foreach_copy_(self._values, buffers)
        else:
            self._values = [each.clone() for each in buffers]
        self.synced += 1

    def values(self) -> list[torch.Tensor]:
        """As they came from rank 0."""
        return self._values

    def use(self, values: list[torch.Tensor]) -> None:
        """Have the next forward use these, which another got from rank 0."""
        self._values, self._given = values, True
