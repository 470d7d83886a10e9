"""Builds histories with a clock that the test moves, and a cause for every second."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.events import (
    Attempt,
    Commit,
    Detect,
    Done,
    Event,
    Judged,
    Launch,
    Open,
    Plan,
    Preempted,
    Recover,
    Regroup,
    Restart,
    Save,
    Seconds,
    Step,
    Strike,
    What,
    line,
)
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

NOON = 1.7e9


class FakeHistory:
    """The events of a run: `passes` moves the clock and names the cause, and the other methods write events."""

    def __init__(self, *, world: int = 1, supervised: bool = True) -> None:
        self.events: list[Event] = []
        self.truth: defaultdict[str, float] = defaultdict(float)
        self.now = NOON
        self.world = world
        self.supervised = supervised
        self.attempt = 0
        self.next_step = 0
        self.committed = 0
        self._work: list[tuple[int, float, float]] = []  # of the steps that stand: step, data, compute

    def passes(self, cause: str, seconds: float) -> None:
        self.now += seconds
        self.truth[cause] += seconds

    def says(self, who: str, what: What) -> None:
        self.events.append(Event(self.now, who, what))

    def supervisor(self, what: What) -> None:
        if self.supervised:
            self.says("supervisor", what)

    def rank_0(self, what: What) -> None:
        self.says("rank-0", what)

    def launches(
        self, seconds: float = 1.0, *, cause: str = "startup", verb: str = "launch", read: float = 0.0
    ) -> None:
        """A new attempt, up to where its first step begins."""
        self.attempt += 1
        if verb == "launch":
            self.supervisor(Open(2))
        self.supervisor((Launch if verb == "launch" else Restart)(self.attempt, self.world))
        if self.supervised:
            self.passes(cause, seconds)
        self.says("rank-0", Open(2))
        if not self.supervised:
            self.passes(cause, seconds)
        self.rank_0(Attempt(self.attempt, self.world, 0, 7))
        self._recovers(cause, read if self.attempt > 1 else 0.0)

    def trains(self, data: float = 0.25, compute: float = 1.0, *, idle: float = 0.0, stall: float = 0.0) -> None:
        """The next step; `stall` is what it says that it waited before, `idle` what it does not say."""
        self.passes("unaccounted", idle)
        self.passes("data", data)
        self.passes("compute", compute)
        self._work.append((self.next_step, data, compute))
        self.reports(self.next_step, Seconds(data, compute, stall))
        self.next_step += 1

    def saves(self, *, durable: float | None = None, overlapped: float = 0.0, **parts: float) -> float:
        """A save at this boundary, told at once; returns how long training waited."""
        for part, seconds in parts.items():
            self.passes(part, seconds)
        waited = sum(parts.values())
        parts.pop("unaccounted", None)
        self.tells_of_a_save(self.next_step, Stall(waited=waited, overlapped=overlapped, **parts))
        if durable is not None:
            self.commits(durable)
        return waited

    def commits(self, seconds: float = 0.5) -> None:
        self.committed = self.next_step
        self.rank_0(Commit(self.attempt, self.next_step, 4000, seconds))

    def tells_of_a_save(self, step: int, stall: Stall) -> None:
        self.rank_0(Save(self.attempt, step, "blocking", 4000, stall))

    def dies(self, seconds: float = 0.5, *, how: str = "signal", rank: int = 0, injected: str | None = None) -> None:
        """A failure that is there at once, and detected after some seconds."""
        if injected:
            self.strikes(injected, rank)
        self.passes("recovery", seconds)
        self.supervisor(detected(self.attempt, rank, how))

    def strikes(self, kind: str, rank: int) -> None:
        """A failure of the schedule, told in a file of its own."""
        self.says(f"injected-{rank}", Strike(self.attempt, self.next_step, kind, rank))

    def restarts(self, seconds: float = 1.0, *, read: float = 0.25) -> None:
        self.launches(seconds, cause="recovery", verb="restart", read=read)

    def finishes(self, seconds: float = 0.125, *, verdict: str = "completed") -> None:
        """The end in order of this attempt."""
        self.rank_0((Done if verdict == "completed" else Preempted)(self.attempt, self.next_step))
        if self.supervised:  # or else nobody says anything after rank 0
            self.passes("closing", seconds)
        self.judges(verdict)

    def judges(self, verdict: str) -> None:
        self.supervisor(Judged(verdict, self.attempt, "so it was"))

    def _recovers(self, cause: str, read: float) -> None:
        self.passes(cause, read)
        restored = self.committed or None
        epoch, cursor = divmod(self.committed, 10)
        self.rank_0(Recover(self.attempt, restored, epoch, cursor, "keyed", read))
        for step, data, compute in self._work:
            if step >= self.committed:
                self.truth["data"] -= data
                self.truth["compute"] -= compute
                self.truth["rework"] += data + compute
        self._work = [work for work in self._work if work[0] < self.committed]
        self.next_step = self.committed

    def reports(self, step: int, seconds: Seconds, rank: int = 0) -> None:
        """A rank's share of a step."""
        place = (self.attempt, self.world, rank, *divmod(step, 10), step)
        self.says(f"rank-{rank}", Step(*place, Samples(8), seconds))


def detected(attempt: int, rank: int, kind: str) -> Detect:
    return Detect(attempt, rank, rank, kind, "it failed", signal="SIGKILL")


def write_history(folder: Path, files: Mapping[str, Sequence[Event]]) -> Path:
    """The folder, with each of these files holding its events, whoever told them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, events in files.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(line(*event) for event in events))
    return folder


def killed_once(*, stall: float = 0.25, steps: int = 3) -> list[Event]:
    """So many steps and a save, a kill after one more, a restart that trains it again, a save and the end."""
    told = FakeHistory()
    told.launches(1.0)
    for _ in range(steps):
        told.trains()
    told.saves(durable=1.0, snapshot=stall)
    told.trains(stall=stall)
    told.dies(1.0, injected="kill")
    told.restarts(2.0)
    told.trains()
    told.saves(durable=1.0, snapshot=stall)
    told.finishes()
    return told.events


def calm(workers: int = 4, steps: int = 40, *, step: float = 0.5, save: float = 0.25) -> FakeHistory:
    """A run in which nothing fails: a start of 2 s, and a save every 10 steps."""
    run = FakeHistory(world=workers)
    run.launches(2.0)
    run.rank_0(Plan(1, 1000, 64, 4, 0, 10, "blocking", "c"))
    for number in range(steps):
        if number % 10 == 0:
            run.saves(write=save, durable=save)
        run.trains(0.0, step)
    return run


def replayed(seconds: float = 0.75, *, save: float = 0.25) -> FakeHistory:
    """A run of 4 workers in which one was replaced within so many seconds."""
    run = calm(save=save)
    run.strikes("kill", 2)
    run.supervisor(detected(1, 2, "signal"))
    run.passes("recovery", seconds)
    run.rank_0(Regroup(1, 1, 40, "replay", (0, 1, 2, 3), (2,), seconds=seconds))
    run.passes("compute", 0.5)
    run.reports(40, Seconds(0.0, 0.5 + seconds, 0.0))
    return run


def sharded(events: Sequence[Event], *, saved: bool = True) -> list[Event]:
    """These events with a sharded model, with or without the commits of saves."""
    return [
        event._replace(what=event.what._replace(sharded=True)) if isinstance(event.what, Plan) else event
        for event in events
        if saved or not isinstance(event.what, Commit)
    ]
