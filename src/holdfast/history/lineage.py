"""Decides which steps and commits of a run still count after restores, event by event.

A restore undoes all steps and commits after the restored snapshot. A worker that joins a running attempt takes the
state of the others and undoes nothing. The audit, the cost, the live view and the next attempt all use this module.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass, field

from holdfast.events import Attempt, Commit, Launch, Plan, Recover, Regroup, Restart, Step, What

EVERY_STEP = sys.maxsize  # more than any run has


@dataclass(slots=True)
class Lineage:
    """The steps and commits of a run that still count, because no restore to an earlier step has undone them.

    Add the events of rank 0 and the supervisor in the order they were written. Recover and Commit events of other ranks
    may be added too, in the order of attempts."""

    attempt: int = 0
    workers: int = 0  # those that were launched, or are left of them
    restarts: int = 0
    plan: Plan | None = None
    restored: int | None = None
    reached: int = 0  # steps trained
    commits: dict[int, Commit] = field(default_factory=dict)  # those that count, by step
    _recovered: int | None = None  # the last attempt that began with a restore
    _restores: list[tuple[int, int]] = field(default_factory=list)  # attempts and restored steps: both rise

    @property
    def committed(self) -> int:
        """The number of steps in the newest committed snapshot; before the first commit, in the restored snapshot."""
        return max(self.commits, default=self.restored or 0)

    def add(self, what: What) -> None:
        match what:
            case Attempt(attempt=number):
                self.attempt = max(self.attempt, number)
            case Plan():
                self.plan = what
            case Recover(attempt=number) if number != self._recovered:  # not of another rank, or of one that joins
                self._recovered = number
                self.restored, self.reached = what.restored, what.restored or 0
                last = -1 if what.restored is None else what.restored
                self.commits = {step: commit for step, commit in self.commits.items() if step <= last}
                while self._restores and self._restores[-1][1] >= last:  # their branches end here, too
                    self._restores.pop()
                if not self._restores or self._restores[-1][0] < number:
                    self._restores.append((number, last))
            case Step(step=step):
                self.reached = step + 1
            case Regroup(members=members):
                self.workers = len(members)
            case Commit(step=step):
                self.commits[step] = what
            case Launch(workers=workers):
                self.workers = workers
            case Restart(workers=workers):
                self.workers, self.restarts = workers, self.restarts + 1
            case _:
                pass

    def limit(self, attempt: int) -> int:
        """Return the first step of `attempt` that a later restore undid, or `EVERY_STEP` if there is none."""
        place = bisect_right(self._restores, attempt, key=lambda restore: restore[0])
        return max(0, self._restores[place][1]) if place < len(self._restores) else EVERY_STEP

    def trainer(self, step: int) -> int | None:
        """Return the attempt that last trained `step`, or the newest attempt if none did, or None without attempts.

        The step before the first, -1, is of the attempt that last began without a snapshot."""
        place = bisect_right(self._restores, step, key=lambda restore: restore[1])
        return self._restores[place - 1][0] if place else None
