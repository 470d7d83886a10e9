"""What of a run counts, event by event: how far its one line of states reaches, and which commits of it stand.

A recover ends one branch of that line and begins the next: what was trained or committed beyond the snapshot that came
back no longer counts. A member that joins an attempt in its middle begins with what the others have, and ends nothing. Everybody who asks what counts (the audit, the cost, the live view, the next attempt) asks here.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass, field

from holdfast.events import Attempt, Commit, Launch, Plan, Recover, Regroup, Restart, Step, What

EVERY_STEP = sys.maxsize  # more than any run has


@dataclass(slots=True)
class Lineage:
    """Where a run stands, as rank 0 and the supervisor tell it; events are added in the order they were written.

    Recovers and commits of other ranks may be added too, in the order of attempts.
    """

    attempt: int = 0
    workers: int = 0  # those that were launched, or are left of them
    restarts: int = 0
    plan: Plan | None = None
    restored: int | None = None
    reached: int = 0  # steps trained
    commits: dict[int, Commit] = field(default_factory=dict)  # those that stand, by step
    _recovered: int | None = None  # the attempt that went back last
    _backs: list[tuple[int, int]] = field(
        default_factory=list
    )  # attempts, and the last commit that each left: both rise

    @property
    def committed(self) -> int:
        """How many steps the newest commit that stands covers; what came back was committed."""
        return max(self.commits, default=self.restored or 0)

    def add(self, what: What) -> None:
        """Take one event into account."""
        match what:
            case Attempt(attempt=number):
                self.attempt = max(self.attempt, number)
            case Plan():
                self.plan = what
            case Recover(attempt=number) if number != self._recovered:  # else of another rank, or who joins its attempt
                self._recovered = number
                self._go_back(what)
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
        """The steps of an attempt that stand, as far as is known by now, are those below this one."""
        place = bisect_right(self._backs, attempt, key=lambda back: back[0])
        return max(0, self._backs[place][1]) if place < len(self._backs) else EVERY_STEP

    def trainer(self, step: int) -> int | None:
        """The attempt whose branch holds this step, trained or not, if any attempt began at or before it."""
        place = bisect_right(self._backs, step, key=lambda back: max(0, back[1]))
        return self._backs[place - 1][0] if place else None

    def _go_back(self, recover: Recover) -> None:
        self.restored, self.reached = recover.restored, recover.restored or 0
        last = -1 if recover.restored is None else recover.restored
        self.commits = {step: commit for step, commit in self.commits.items() if step <= last}
        while self._backs and self._backs[-1][1] >= last:  # what they left is no more than this leaves
            self._backs.pop()
        if not self._backs or self._backs[-1][0] < recover.attempt:
            self._backs.append((recover.attempt, last))
