"""Histories told by hand: a clock that the teller moves, a cause for every second, and the events of a run."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.history import JSON, Event

NOON = 1.7e9


class Told:
    """A run as it is told: `passes` moves the clock and says why, the other verbs write what the run would."""

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

    def says(self, who: str, event: str, **fields: JSON) -> None:
        self.events.append(Event(event, self.now, who, fields))

    def supervisor(self, event: str, **fields: JSON) -> None:
        if self.supervised:
            self.says("supervisor", event, **fields)

    def rank_0(self, event: str, **fields: JSON) -> None:
        self.says("rank-0", event, attempt=self.attempt, **fields)

    def launches(
        self, seconds: float = 1.0, *, cause: str = "startup", verb: str = "launch", read: float = 0.0
    ) -> None:
        """A new attempt, up to where its first step begins."""
        self.attempt += 1
        if verb == "launch":
            self.supervisor("open", version=1)
        self.supervisor(verb, attempt=self.attempt, workers=self.world)
        if self.supervised:
            self.passes(cause, seconds)
        self.says("rank-0", "open", version=1)
        if not self.supervised:
            self.passes(cause, seconds)
        self.rank_0("attempt", world=self.world, rank=0, pid=7)
        if self.attempt > 1:
            self._recovers(cause, read)

    def trains(self, data: float = 0.25, compute: float = 1.0, *, idle: float = 0.0, stall: float = 0.0) -> None:
        """The next step; `stall` is what it says that it waited before, `idle` what it does not say."""
        self.passes("unaccounted", idle)
        self.passes("data", data)
        self.passes("compute", compute)
        self._work.append((self.next_step, data, compute))
        self._step(self.next_step, {"data": data, "compute": compute, "stall": stall})
        self.next_step += 1

    def saves(self, *, durable: float | None = None, overlapped: float = 0.0, **parts: float) -> float:
        """A save at this boundary, told at once; returns how long training waited."""
        for part, seconds in parts.items():
            self.passes(part, seconds)
        waited = sum(parts.values())
        parts.pop("unaccounted", None)
        told = {"waited": waited, "overlapped": overlapped, **parts}
        self.rank_0("save", step=self.next_step, writer="blocking", bytes=4000, retries=0, seconds=told)
        if durable is not None:
            self.commits(durable)
        return waited

    def commits(self, seconds: float = 0.5) -> None:
        self.committed = self.next_step
        self.rank_0("commit", step=self.next_step, bytes=4000, seconds=seconds)

    def dies(self, seconds: float = 0.5, *, how: str = "signal", rank: int = 0, injected: str | None = None) -> None:
        """A failure that is there at once, and detected after some seconds."""
        if injected:
            self.says(f"rank-{rank}", "failure", attempt=self.attempt, step=self.next_step, kind=injected, rank=rank)
        self.passes("recovery", seconds)
        self.supervisor("detect", attempt=self.attempt, rank=rank, kind=how, exit=None, signal=9)

    def restarts(self, seconds: float = 1.0, *, read: float = 0.25) -> None:
        self.launches(seconds, cause="recovery", verb="restart", read=read)

    def finishes(self, seconds: float = 0.125, *, verdict: str = "completed") -> None:
        """The end in order of this attempt."""
        self.rank_0("done" if verdict == "completed" else "preempted", step=self.next_step)
        if self.supervised:  # or else nobody says anything after rank 0
            self.passes("closing", seconds)
        self.supervisor("verdict", verdict=verdict, attempts=self.attempt)

    def _recovers(self, cause: str, read: float) -> None:
        self.passes(cause, read)
        restored = self.committed or None
        epoch, cursor = divmod(self.committed, 10)
        self.rank_0("recover", restored=restored, epoch=epoch, cursor=cursor, rng="keyed", passed_over=[], seconds=read)
        for step, data, compute in self._work:
            if step >= self.committed:
                self.truth["data"] -= data
                self.truth["compute"] -= compute
                self.truth["rework"] += data + compute
        self._work = [work for work in self._work if work[0] < self.committed]
        self.next_step = self.committed

    def _step(self, step: int, seconds: Mapping[str, float], rank: int = 0) -> None:
        epoch, cursor = divmod(step, 10)
        at = {"attempt": self.attempt, "world": self.world, "epoch": epoch, "cursor": cursor, "step": step}
        self.says(f"rank-{rank}", "step", **at, rank=rank, samples={"count": 8, "digest": "00"}, seconds=dict(seconds))


def written(folder: Path, files: Mapping[str, Sequence[Event]]) -> Path:
    """The folder, with each of these files holding its events, whoever told them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, events in files.items():
        lines = [json.dumps({"event": e.event, "time": e.time, "who": e.who, **e.fields}) + "\n" for e in events]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder
