"""The decision whether a failed run is tried again. Pure.

The limit is on restarts without progress: each newer snapshot starts the count again. An error may be transient (a GPU, a
network, a disk) or the script's own; to find out, the run is tried once more. An error that comes again from the same
line at the same step is the script's; for an undefined name the same line is enough.
"""

from holdfast.finding import counted
from holdfast.supervise.failure_cause import FirstFailure
from holdfast.supervise.verdict import Word


class RestartPolicy:
    """The restarts that are left, and the errors seen since the snapshots that might have left them behind."""

    def __init__(self, limit: int, newest: int | None) -> None:
        self.limit = limit
        self._used = 0
        self._best = newest or 0  # a snapshot of the first state, step 0, is not progress
        self._errors: set[tuple[str, str, int | None]] = set()
        self._mistakes: set[tuple[str, str, int | None]] = set()  # which no progress excuses

    def left(self, newest: int | None) -> int:
        """Return the number of restarts left, if `newest` is the step of the newest snapshot."""
        return self.limit - (0 if (newest or 0) > self._best else self._used)

    def after(self, failure: FirstFailure, newest: int | None) -> tuple[Word, str] | None:
        """Return the verdict if the run is not to be tried again; otherwise count a restart and return None."""
        if newest is not None and newest > self._best:
            passed = {error for error in self._errors - self._mistakes if error[2] is None or error[2] < newest}
            self._used, self._best, self._errors = 0, newest, self._errors - passed
        if failure.is_error and failure.origin == "refused":
            return "refused", failure.line
        if failure.is_error and failure.error in self._errors:
            where = "before the first step" if failure.step is None else f"at step {failure.step}"
            return "script-error", f"{failure.line}; it came again {where}, so another restart would not help"
        if failure.is_error:
            self._errors.add(failure.error)
        if failure.is_mistake:
            self._mistakes.add(failure.error)
        if self._used >= self.limit:
            limit = f"no more than {counted(self.limit, 'restart')} without progress (--max-restarts)"
            return "gave-up", f"{failure.line}; {limit}"
        self._used += 1
        return None
