"""State and callbacks that live recovery gets from the training loop, such as the recorder of the rank's events."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.live.settlement import LossEffects
from holdfast.train.state.attempt import MemberRecorder
from holdfast.train.state.protected import Protected


class WorkInStep(Protocol):
    """A view of the script's work in the current step: optimizer steps, and gradients that no optimizer has used."""

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer has stepped in the current step."""

    @property
    def is_pending(self) -> bool:
        """True if gradients of earlier steps have accumulated, and no optimizer step has used them yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingHooks:
    """State and callbacks that the training loop gives to the recovery from lost workers."""

    losses: LossEffects
    protected: Protected
    record: MemberRecorder
    attempt: int
    record_steps: Callable[[], None]  # writes every step that was trained so far to the history
    inject: Callable[[int], None]  # injects failures: called with the step once the survivors have a plan
    work: WorkInStep
    restore_shard: Callable[[int, int], int | None]
    """Loads the part of a rank (its number) of the newest good snapshot of a step or earlier; returns its step."""
