"""Where the loss of a member is noticed: around every backward of this process."""

import functools
from typing import Any, Protocol

import torch

from holdfast.distributed.gloo_link import Link
from holdfast.distributed.process_group import Crew


class Survivor(Protocol):
    """Who is asked before a backward, and told how it went."""

    link: Link
    crews: list[Crew]
    adds_up: bool
    """Whether gradients of earlier windows may be there, to which a backward would add."""

    def check_backward(self) -> None:
        """Refuse one that could not be mended."""

    def survives(self, crew: Crew) -> bool:
        """Whether an error in the backward of this model was the loss of a member, and is mended."""

    def passed(self, crew: Crew) -> None:
        """A backward of this model has all its sums."""


def guard_backward(live: Survivor) -> None:
    """Catch what backward raises where a member was lost; `Tensor.backward` looks it up at every call."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **options: Any) -> None:
        if live.adds_up:
            live.check_backward()
        try:
            plain(*args, **options)
        except RuntimeError:
            if not any(live.survives(crew) for crew in live.crews):
                raise
        else:
            for crew in live.crews:
                if not (live.link.is_broken and crew.has_failed() and live.survives(crew)):
                    live.passed(crew)

    torch.autograd.backward = backward
