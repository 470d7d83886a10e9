"""What a script goes through in its loop: the batches of a run one after the other, or epoch by epoch.

Both ask one generator, the loop of the run. An epoch ends without asking it for more: what the script does after the
batches of an epoch comes before the boundary, and is saved with the epoch. The boundary is where the next epoch is asked
for. To leave a loop is to let go of the generator, so nobody keeps it but whoever iterates.
"""

import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from holdfast.errors import BadInput, WorkerLost
from holdfast.progress import restart_needed
from holdfast.sampler.plan import SamplePlan
from holdfast.train import loop_checks
from holdfast.train.data.loader import MapDataset
from holdfast.train.loop import Batch, Opening
from holdfast.train.loop_checks import WAY, check_holder

Turns = Generator[Batch | Opening]


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """What is gone through: the dataset, by which plan, a share in so many batches, from which step on."""

    dataset: MapDataset
    geometry: SamplePlan
    parts: int
    start: int
    in_a_loop: bool  # of the script, which makes a run in every turn


class Batches:
    """The batches of a run that are still to be trained: an iterator, for one loop.

    Its length is that of the whole run, also where earlier attempts have trained a part of it: `tqdm(batches,
    initial=batches.initial)` goes on where the run is.
    """

    def __init__(self, course: Course, turns: Turns) -> None:
        self.dataset = course.dataset
        self._course = course
        self._turns: Turns | None = turns
        self._alive = weakref.ref(turns)
        self._begun = False

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return self._course.geometry.steps_per_epoch

    @property
    def initial(self) -> int:
        """How many of its batches earlier attempts have trained."""
        return self._course.start * self._course.parts

    def __len__(self) -> int:
        return self._course.geometry.steps * self._course.parts

    def __iter__(self) -> Iterator[Batch]:
        turns, self._turns = self._turns, None
        if turns is None:
            raise BadInput(f"the batches of a run come once: a run has one loop, over all its epochs. Write {WAY}")
        if not (self._begun or self._course.in_a_loop) and loop_checks.in_a_loop():
            raise within_a_loop("the loop over the batches of a run")
        return _handed_out(turns, self)

    def __next__(self) -> Batch:
        if self._turns is None:
            raise BadInput("these batches are iterated over already: ask that iterator for the next one")
        if not self._begun:
            self._begun = True
            check_holder(self, self._turns)
        return _batch(next(self._turns))

    def close(self) -> None:
        """Leave the loop."""
        if turns := self._alive():
            turns.close()


class Epochs:
    """The epochs of a run that are still to be trained: an iterable, for one loop."""

    def __init__(self, course: Course, turns: Turns) -> None:
        self.dataset = course.dataset
        self._course = course
        self._turns: Turns | None = turns

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return self._course.geometry.steps_per_epoch

    @property
    def initial(self) -> int:
        """How many of its epochs earlier attempts have trained to their end."""
        return self._course.start // self.steps_per_epoch

    def __len__(self) -> int:
        return self._course.geometry.epochs

    def __iter__(self) -> Iterator["Epoch"]:
        turns, self._turns = self._turns, None
        if turns is None:
            raise BadInput("the epochs of a run come once: a run has one loop over them")
        return self._epochs(turns)

    def _epochs(self, turns: Turns) -> Iterator["Epoch"]:
        first = True
        while (opening := next(turns, None)) is not None:
            assert isinstance(opening, Opening)
            epoch = Epoch(self._course, opening, turns, first)
            yield epoch
            first = False
            epoch.check_trained()


class Epoch:
    """One epoch of a run; iterating over it hands out the batches of it that are still to be trained.

    Its length is that of the whole epoch, also where a part of it was trained before a restart: `tqdm(epoch,
    initial=epoch.initial)` goes on where the run is.
    """

    def __init__(self, course: Course, opening: Opening, turns: Turns, first: bool) -> None:
        self.dataset = course.dataset
        self.number = opening.epoch
        self._course, self._first = course, first
        self._start, self._end = opening.step, course.geometry.end_of(opening.epoch)
        self._turns = weakref.ref(turns)
        self._next = opening.step  # the step whose batches come next
        self._begun = self._is_over = False

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return self._course.geometry.steps_per_epoch

    @property
    def initial(self) -> int:
        """How many of its batches were trained before it was handed out."""
        return (self._start - self.number * self.steps_per_epoch) * self._course.parts

    def __len__(self) -> int:
        return (self._end - self.number * self.steps_per_epoch) * self._course.parts

    def __iter__(self) -> Iterator[Batch]:
        turns = self._turns()
        if turns is None:
            raise BadInput(f"the loop over the epochs was left: epoch {self.number} has no more batches")
        if self._begun:
            raise BadInput(f"the batches of epoch {self.number} come once: a second loop over them would train nothing")
        self._begun = True
        return self._batches(turns)

    def _batches(self, turns: Turns) -> Iterator[Batch]:
        if self._first:
            check_holder(self)
        for batch in turns:
            if isinstance(batch, Opening) or batch.epoch != self.number:
                raise _woken(self.number)
            self._next = batch.step + batch.is_last
            self._is_over = self._next == self._end
            yield batch
            if self._is_over:
                return
        self._is_over = True  # the run was stopped

    def check_trained(self) -> None:
        """Refuse to go on to the next epoch as long as batches of this one are left."""
        if not self._is_over:
            left = self._end - self._next
            raise BadInput(
                f"the next epoch was asked for, and epoch {self.number} has {left} step{'s' * (left != 1)} to train: go "
                "through all its batches. To end the run early call run.stop()"
            )


def within_a_loop(what: str) -> BadInput:
    """What is said of a loop that is made anew in every turn of another one."""
    return BadInput(f"{what} is within another loop, and a run has one, over all its epochs: write {WAY}")


def _handed_out(turns: Turns, batches: Batches) -> Iterator[Batch]:
    if not batches._begun:
        check_holder(batches, turns)
    for batch in turns:
        yield _batch(batch)


def _batch(turn: Batch | Opening) -> Batch:
    assert isinstance(turn, Batch)
    return turn


def _woken(epoch: int) -> WorkerLost:
    """Whoever slept through the end of an epoch has not done what the script does there."""
    return restart_needed(
        f"this worker slept in epoch {epoch} and was woken in another, whose beginning it has not seen"
    )
