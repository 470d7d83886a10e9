"""Builds histories of runs of four members in which some are lost in step 6 and the others continue."""

from collections.abc import Callable, Sequence
from typing import Any

from fake_runs import PLAN, digest, trained
from holdfast.audit.verdicts import Finding
from holdfast.events import Attempt, Commit, Done, Event, Open, Plan, Recover, Regroup, Seconds, Step, What

WORLD, LOST_AT = 4, 6


class FakeLiveRun:
    """A run of four members in which some are lost in step 6, and which the others finish."""

    def __init__(self, *lost: int, strategy: str = "forward", how: str = "redone") -> None:
        self.files: dict[str, list[Event]] = {f"rank-{member}": [] for member in range(WORLD)}
        self.members = self.basis = tuple(range(WORLD))
        self.number = self.reached = 0  # the last membership, and the window that comes next
        for member in self.members:
            self.begins(member, None, member)
        self.trains(0, LOST_AT)
        self.loses(LOST_AT, lost, strategy, how)

    def ends(self) -> "FakeLiveRun":
        self.trains(self.reached, PLAN.steps)
        self.says(self.members[0], Commit(1, PLAN.steps, 4096, 0.5, state=digest("end")))
        for member in self.members:
            self.says(member, Done(1, PLAN.steps))
        return self

    def begins(self, member: int, restored: int | None, own: object, joined: Regroup | None = None) -> None:
        state = digest("shared", (restored or 0) - 1) + digest(own)
        self.says(member, Open(2))
        self.says(member, Attempt(1, WORLD, member, 7))
        self.says(member, Plan(1, PLAN.samples, PLAN.batch, PLAN.epochs, PLAN.seed, 50, "overlapped", "c"))
        if joined:
            self.says(member, joined)
        self.says(member, Recover(1, restored, *PLAN.position(restored or 0), "keyed", 0.0, fingerprint=state))

    def trains(self, first: int, end: int, state: int | None = None) -> None:
        for step in range(first, end):
            shared = digest("shared", step if state is None else state)
            for member in (each for each in self.basis if each in self.members):
                stepped = int(state in (None, step))
                self.says(member, self.share(member, step, shared + digest(member, step), stepped))
        self.reached = end

    def share(self, member: int, step: int, state: str, stepped: int = 1) -> Step:
        place, world, at = self.basis.index(member), len(self.basis), PLAN.position(step)
        samples, took = trained(PLAN, step, place, world), Seconds(0.0, 1.0, 0.0)
        return Step(1, world, place, *at, step, samples, took, state, reduced=1, stepped=stepped)

    def loses(self, step: int, lost: Sequence[int], strategy: str = "forward", how: str = "redone") -> "FakeLiveRun":
        """Members are lost before this window or in it, and those who are left finish it."""
        at = PLAN.position(step)
        shares = [PLAN.share(at, self.basis.index(member), len(self.basis)) for member in lost]
        ids = [PLAN.window(at)] if strategy == "skip" else shares
        missing = tuple(int(each) for share in ids for each in share) if how == "redone" else ()
        self.members = tuple(member for member in self.members if member not in lost)
        kept, redone = {"redone": (1, 2), "complete": (3, 0), "before": (0, 0)}[how]
        self.number += 1
        for member in self.members:
            self.says(member, Regroup(1, self.number, step, strategy, self.members, tuple(lost), missing, kept, redone))
        if how == "before":
            self.basis = self.members
        self.trains(step, step + 1, state=step - 1 if strategy == "skip" and how == "redone" else None)
        self.basis = self.members
        return self

    def joins(self, member: int, strategy: str = "forward") -> "FakeLiveRun":
        """Before the next window."""
        self.members = self.basis = tuple(sorted([*self.members, member]))
        self.number += 1
        joined = Regroup(1, self.number, self.reached, strategy, self.members)
        self.begins(member, self.reached, member, joined)
        for each in self.members:
            if each != member:
                self.says(each, joined)
        return self

    def says(self, member: int, what: What) -> None:
        self.files[f"rank-{member}"].append(Event(1.0, f"rank-{member}", what))

    @property
    def events(self) -> list[Event]:
        return [event for who in self.files for event in self.files[who]]

    def without(self, which: Callable[[str, Any], bool]) -> list[Event]:
        return [event for event in self.events if not which(event.who, event.what)]

    def with_other(self, which: Callable[[str, Any], bool], **fields: object) -> list[Event]:
        assert any(which(event.who, event.what) for event in self.events)
        return [
            event._replace(what=event.what._replace(**fields)) if which(event.who, event.what) else event  # type: ignore[arg-type]
            for event in self.events
        ]


def found(findings: Sequence[Finding], check: str) -> Finding:
    return next(each for each in findings if each.check == check)


def is_regroup(who: str, what: What) -> bool:
    return isinstance(what, Regroup)
