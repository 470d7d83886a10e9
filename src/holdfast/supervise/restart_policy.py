"""The decision whether a run starts again after a failure."""

from holdfast.finding import counted
from holdfast.supervise.failure_cause import FirstFailure
from holdfast.supervise.verdict import Word


class RestartPolicy:
    """A policy that decides whether a run is restarted: at most `limit` times until there is a newer snapshot.

    An error that comes again at the same step is a bug, and ends the run. The restart after damaged snapshots have
    overwritten the initial weights of a sharded model is not counted, unless the one before was such a restart, too."""

    def __init__(self, limit: int, newest: int | None) -> None:
        self.limit = limit
        self._used = 0
        self._was_overwritten = False  # True if the last failure was that of damaged snapshots
        self._best = newest or 0  # a snapshot of the first state, step 0, is not progress
        self._errors: set[tuple[str, str, int | None]] = set()
        self._mistakes: set[tuple[str, str, int | None]] = set()  # which no progress excuses

    def left(self, newest: int | None) -> int:
        """Return the number of restarts left: all of them if `newest`, the step of the newest snapshot, has grown."""
        return self.limit - (0 if (newest or 0) > self._best else self._used)

    def after(self, failure: FirstFailure, newest: int | None) -> tuple[Word, str] | None:
        """Return (verdict, reason) if `failure` ends the run, otherwise count the restart and return None.

        `newest` is the step of the newest snapshot."""
        if newest is not None and newest > self._best:
            passed = {error for error in self._errors - self._mistakes if error[2] is None or error[2] < newest}
            self._used, self._best, self._errors = 0, newest, self._errors - passed
        was_overwritten, self._was_overwritten = self._was_overwritten, failure.origin == "overwritten"
        if self._was_overwritten and not was_overwritten:
            return None
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
            advice = "; this is a limit of the machine, not an error of the script" if failure.is_system_limit else ""
            return "gave-up", f"{failure.line}{advice}; {limit}"
        self._used += 1
        return None
