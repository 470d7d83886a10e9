"""Whether a run that failed is tried again. Pure.

Restarts are a rate: so many of them without progress, and a newer snapshot fills them up again. An error may be passing
(a GPU, a network, a disk) or the script's own, and the only way to know is to try once more: what comes again from the
same line at the same step is the script's; of a name that does not exist, the same line is enough.
"""

from holdfast.supervise.failure_cause import Casualty
from holdfast.supervise.verdict import Word, count


class RestartPolicy:
    """How many restarts are left, and which errors have come that no snapshot has left behind."""

    def __init__(self, limit: int, newest: int | None) -> None:
        self.limit = limit
        self._used = 0
        self._best = newest or 0  # the snapshot of a first state, step 0, is no progress
        self._errors: set[tuple[str, str, int | None]] = set()
        self._mistakes: set[tuple[str, str, int | None]] = set()  # which no progress excuses

    def left(self, newest: int | None) -> int:
        """How many restarts there are, if the newest snapshot is this one."""
        return self.limit - (0 if self._is_further(newest) else self._used)

    def after(self, lost: Casualty, newest: int | None) -> tuple[Word, str] | None:
        """Why not to try again after this failure; or nothing, and then it counts as a restart."""
        if newest is not None and self._is_further(newest):
            passed = {each for each in self._errors - self._mistakes if each[2] is None or each[2] < newest}
            self._used, self._best, self._errors = 0, newest, self._errors - passed
        if lost.is_an_error and lost.origin == "refused":
            return "refused", lost.line
        if why := self._of_the_script(lost):
            return "script-error", why
        if self._used >= self.limit:
            limit = f"no more than {count(self.limit, 'restart')} without progress (--max-restarts)"
            return "gave-up", f"{lost.line}; {limit}"
        self._used += 1
        return None

    def _is_further(self, newest: int | None) -> bool:
        return (newest or 0) > self._best

    def _of_the_script(self, lost: Casualty) -> str | None:
        """Why doing the same again would end the same, if it would."""
        if not lost.is_an_error:
            return None
        if lost.error in self._errors:
            where = "before the first step" if lost.step is None else f"at step {lost.step}"
            return f"{lost.line}; it came again {where}, so it would do the same again"
        self._errors.add(lost.error)
        if lost.is_a_mistake:
            self._mistakes.add(lost.error)
        return None
