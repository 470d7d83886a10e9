"""The worker's side of a rehearsal: the loop ends early, saves at given steps, and observes the script's state.

An environment variable turns this on. The script does not see that the loop ends early: the length of the loop, for
example, is still the length of the whole training.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.blocks.division import Ids
from holdfast.distributed.ranks import NEVER
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.observe import value_digests
from holdfast.train.observe.observations import Ending, Observed, UnprotectedValue, Window, length, line
from holdfast.train.observe.script_state import frames_of_script, held
from holdfast.train.state import rng
from holdfast.train.state.protected import Protected
from holdfast.train.state.save import CheckpointSaver

REHEARSAL = "HOLDFAST_REHEARSAL"
SEVERAL_RANKS = "several-ranks"  # a file in the folder of observations: the script is written for several ranks
LIVES = 1000  # memberships of one attempt, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Instructions to a worker of a rehearsal (test run): the number of `steps` to train, and the steps to save at."""

    folder: str  # for the observations
    steps: int | None = None
    saves: tuple[int, ...] = ()

    def note_several_ranks(self) -> None:
        """Record that the script replicates or shards a model, so that it can train with several ranks."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        (Path(self.folder) / SEVERAL_RANKS).touch()

    def to_text(self) -> str:
        return json.dumps({"folder": self.folder, "steps": self.steps, "saves": self.saves})

    def end(self, plan: RunPlan) -> int:
        """Return the number of steps that the rehearsal trains, given the plan of the whole run."""
        return length(self.steps, plan.steps, plan.phases[0].steps_per_epoch)


def instructions() -> Rehearsal:
    """Return the instructions in the environment variable REHEARSAL, which must be set."""
    data = json.loads(os.environ[REHEARSAL])
    return Rehearsal(folder=data["folder"], steps=data["steps"], saves=tuple(data["saves"]))


@dataclass(slots=True, kw_only=True, eq=False)
class SavingAt(CheckpointSaver):
    """A checkpoint saver that saves just before each of the steps `at` instead of at a regular interval."""

    at: tuple[int, ...]

    @property
    def next(self) -> int:
        saved = self.saved
        return 0 if saved is None else min((step for step in self.at if step > saved), default=NEVER)


class StepObserver:
    """An observer that writes digests of the state of one rank's script to a file, for every step.

    `rank` returns the current rank. `joined` returns 0 or, in a worker that replaces a lost worker, a number that is
    larger for later replacements. The replacement is recorded as a further attempt."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        protected: Protected,
        dataset: Any,
        rank: Callable[[], int],
        attempt: int,
        joined: Callable[[], int],
    ) -> None:
        self._protected, self._dataset, self._rank, self._attempt = protected, dataset, rank, attempt
        self._joined = joined
        self._life: int | None = None  # the attempt, or a later number for a replacement
        folder = Path(rehearsal.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{os.getpid()}.jsonl").open("a")
        self._observed: dict[str, Any] = {}
        self._backwards = self._stepped = 0
        self._midway: dict[str, str] | None = None
        self._first: int | None = None  # the parameter whose gradients are counted: one per backward
        for model in protected.models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._backward)
        register_optimizer_step_post_hook(self._step)
        atexit.register(self._leave)

    def begins(self, step: int, epoch: int, ids: Ids, parts: list[Any]) -> None:
        """Observe the state before `step`, which trains the samples `ids`; `parts` are its micro-batches."""
        if self._life is None:
            self._life = 1 + (self._attempt - 1) * LIVES + self._joined()
        self._observed = {
            "rank": self._rank(),
            "attempt": self._life,
            "step": step,
            "epoch": epoch,
            "ids": value_digests.mark(ids),
            "batch": value_digests.mark(value_digests.marks(parts)),
            "drawn": {name: value_digests.mark(state) for name, state in rng.capture().items()},
            "begun": self._state(),
            "held": self._held(),
        }
        self._backwards = self._stepped = 0
        self._midway = None

    def ends(self) -> None:
        """Observe the state after the step, and write it to the file together with the state before the step."""
        self._observed |= {"backwards": self._backwards, "stepped": self._stepped, "midway": self._midway}
        after = value_digests.marks(self._protected.capture())
        self._write(Window(**self._observed, after=after, kept=self._held()))
        self._backwards = self._stepped = 0

    def _state(self) -> dict[str, str]:
        return value_digests.marks(self._protected.capture(), cheap=True)

    def _held(self) -> Mapping[str, UnprotectedValue]:
        return held(frames_of_script(sys._getframe()), {"dataset": self._dataset}, self._protected.things)

    def _backward(self, parameter: Tensor) -> None:
        if self._first is None:
            self._first = id(parameter)
        if self._midway is None:
            self._midway = self._state()
        self._backwards += id(parameter) == self._first

    def _step(self, *_: Any) -> None:
        self._stepped += 1

    def _leave(self) -> None:
        self._write(
            Ending(
                rank=self._rank(), attempt=self._life or self._attempt, backwards=self._backwards, stepped=self._stepped
            )
        )

    def _write(self, observed: Observed) -> None:
        self._file.write(line(observed))
        self._file.flush()
