"""Detection of state that a script trains but does not protect, so that a restart would lose it without a word.

The check looks at the script's variables in the first steps, and at doubling intervals after that. It reports objects
that change from one look to the next: modules, gradient scalers, schedulers, optimizers, and averages of a protected
model in a class or dict of the script. It does not report objects that do not change, such as a frozen teacher, nor
copies of a protected model that the script refreshes, nor metrics. In the first steps, it also warns about random
generators of the script.
"""

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from holdfast.errors import BadInput
from holdfast.train.observe.generators import GeneratorCheck
from holdfast.train.observe.script_state import Place, starts
from holdfast.train.observe.unprotected_objects import ProtectedValues, UnprotectedObject, unprotected_objects
from holdfast.train.state.protected import Protected

FIRST_STEPS = 100  # in which a run is refused; later it has too much to lose, and the user is only warned
AFTER_RESUMING = 64  # optimizer steps
CONSECUTIVE = 2  # looks after the first, each after one more step in which an optimizer stepped
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class UnprotectedStateCheck:
    """A check, at intervals, of the script's variables for state that changes in training and is not protected.

    `next` is the number of optimizer steps after which the next check is due. `generators` checks the script's random
    generators in the first steps."""

    protected: Protected
    next: int = 1  # the number of optimizer steps after which to look again
    generators: GeneratorCheck | None = None
    _looks: int = 0
    _seen: dict[int, "_Seen"] = field(default_factory=dict)
    _before: ProtectedValues | None = None
    _warned: set[str] = field(default_factory=set)

    def look(self, frames: Iterable[FrameType], stepped: int, steps: int) -> None:
        """Raise BadInput if unprotected variables of `frames` have changed since the last call.

        After FIRST_STEPS training steps only warn. `stepped` counts the optimizer steps and `steps` the training steps
        of this attempt."""
        self.next = stepped + 1 if self._looks < CONSECUTIVE else 2 * stepped
        self._warn_of_generators(frames := list(frames))
        now = ProtectedValues(self.protected)
        objects = unprotected_objects(starts(frames, {}), now, self._before, averages=self._looks <= CONSECUTIVE)
        lost = [found for found in objects if self._looks and (found.is_averaged_model or self._has_changed(found))]
        self._seen = {id(found.kept): _Seen(_reference(found.kept), found.values) for found in objects}
        self._before, self._looks = now, self._looks + 1
        if lost and steps <= FIRST_STEPS:
            raise BadInput(f"{_line(lost)} Then name another --out, or remove this run with `holdfast runs rm`.")
        for found in lost:
            if found.place.name not in self._warned:
                self._warned.add(found.place.name)
                logger.warning("holdfast: %s", _line([found]))

    def _warn_of_generators(self, frames: Sequence[FrameType]) -> None:
        if self.generators and self._looks <= CONSECUTIVE:
            lines = self.generators.look(starts(frames, {}))
            for line in (line for line in lines if line not in self._warned):
                self._warned.add(line)
                logger.warning("%s", line)
        else:
            self.generators = None

    def _has_changed(self, now: UnprotectedObject) -> bool:
        before = self._seen.get(id(now.kept))
        is_same = before is not None and before.reference() is now.kept
        return before is not None and is_same and before.values != now.values and not now.is_copy


@dataclass(frozen=True, slots=True)
class _Seen:
    """A weak reference to an unprotected object, and a few values of the object when it was last checked."""

    reference: Callable[[], object]
    values: bytes


def _reference(value: object) -> Callable[[], object]:
    """Return a weak reference to `value`. If `value` does not support that, return a function that returns None."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def _line(lost: Sequence[UnprotectedObject]) -> str:
    is_one = len(lost) == 1
    named = ", ".join(f"{found.place.name} ({type(found.place.value).__name__})" for found in lost)
    without = sorted({type(found.place.value).__name__ for found in lost if not found.can_be_protected})
    first = f"give {' and '.join(without)} the methods state_dict and load_state_dict, and " if without else ""
    changes, it = ("changes in training and is", "it") if is_one else ("change in training and are", "they")
    return (
        f"{named} {changes} not protected: {first}name {'it' if is_one else 'them'} in protect(), as in "
        f"protect(..., {', '.join(_argument(found.place) for found in lost)}), or {it} would start again from the initial "
        "state after a failure."
    )


def _argument(place: Place) -> str:
    """Return the argument of `run.protect` that would protect the object at `place`, such as `ema=self.ema`."""
    names = re.findall(r"[A-Za-z_]\w*", place.path)
    return f"{names[-1] if names else 'state'}={place.path}"
