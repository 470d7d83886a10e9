"""What of a run counts, event by event: how far its one line of states reaches, and which commits of it stand.

A recover ends one branch of that line and begins the next: what was trained or committed beyond the snapshot that came
back no longer counts. Everybody who asks what counts (the audit, the cost, the live view, the next attempt) asks here.
"""

from dataclasses import dataclass, field

from holdfast.events import Attempt, Commit, Launch, Plan, Recover, Restart, Step, What


@dataclass(slots=True)
class Lineage:
    """Where a run stands, as rank 0 and the supervisor tell it; events are added in the order they were written."""

    attempt: int = 0
    workers: int = 0
    restarts: int = 0
    plan: Plan | None = None
    restored: int | None = None
    reached: int = 0  # steps trained
    commits: dict[int, Commit] = field(default_factory=dict)  # those that stand, by step

    @property
    def committed(self) -> int:
        """How many steps the newest commit that stands covers."""
        return max(self.commits, default=0)

    def add(self, what: What) -> None:
        """Take one event into account."""
        match what:
            case Attempt(attempt=number):
                self.attempt = max(self.attempt, number)
            case Plan():
                self.plan = what
            case Recover():
                self._go_back(what)
            case Step(step=step):
                self.reached = step + 1
            case Commit(step=step):
                self.commits[step] = what
            case Launch(workers=workers):
                self.workers = workers
            case Restart(workers=workers):
                self.workers, self.restarts = workers, self.restarts + 1
            case _:
                pass

    def _go_back(self, recover: Recover) -> None:
        self.restored, self.reached = recover.restored, recover.restored or 0
        last = -1 if recover.restored is None else recover.restored
        self.commits = {step: commit for step, commit in self.commits.items() if step <= last}
