"""The state of a run and its latest events, read from its histories as they grow."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import BadInput
from holdfast.events import (
    Attempt,
    Commit,
    Detect,
    Event,
    Iterate,
    Joined,
    Judged,
    Launch,
    Lost,
    Preempt,
    Recover,
    Regroup,
    Restart,
    Restored,
    Save,
    Scale,
    Serve,
    Step,
    Straggler,
    What,
    parse,
    rank_of,
)
from holdfast.finding import counted
from holdfast.history.follow import GrowingFile
from holdfast.history.lineage import Lineage
from holdfast.runs.status import ENDS, STAMPS, is_run, state_of, wall

STEP = b'{"event": "step"'  # the beginning of the line of a step
LEADS = ("supervisor", "controller")  # the processes that begin and end a run
WRITERS = (*LEADS, "rank-")  # the prefixes of the history files to read
LATEST = 60  # steps of a rank that give the present speed
SHOWN = 8  # latest events


@dataclass(slots=True)
class Rank:
    """The progress of one rank: steps trained, the time of its last event, and (time, step) of its latest steps."""

    step: int = 0
    heard: float = 0.0
    latest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LATEST))


class CurrentState(NamedTuple):
    """The present state of a run, and its goodput in steps per second."""

    folder: Path
    state: str  # "trains", or how the run ended
    goodput: float | None

    @property
    def trains(self) -> bool:
        return self.state == "trains"


@dataclass(slots=True)
class RunState:
    """The progress, speed, failures, saves and latest events of a run, collected from its events."""

    lineage: Lineage = field(default_factory=Lineage)
    ranks: dict[int, Rank] = field(default_factory=dict)
    loss: float | None = None
    saves: int = 0
    saved_bytes: int = 0
    stalled: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    samples_lost: int = 0
    latest: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=SHOWN))
    served: Serve | None = None
    iterations: int = 0
    _controller: Rank = field(default_factory=Rank)  # of a parameter server: the progress of the whole run
    _stamps: dict[str, list[Event]] = field(default_factory=dict)  # by process: the events of its start and end
    _last: Event | None = None
    _regroups: set[tuple[int, int]] = field(default_factory=set)

    @property
    def reached(self) -> int:
        """The number of steps trained, or of iterations on a parameter server."""
        return self.iterations if self.served else self.lineage.reached

    @property
    def planned(self) -> int | None:
        """The number of steps in the whole run; None if the script has not reported it yet.

        It is None on a parameter server, too, where a run ends when it has converged."""
        if self.served:
            return None
        plan = self.lineage.plan
        if plan is None or not plan.batch:
            return None
        return plan.steps

    @property
    def committed(self) -> int:
        """The number of steps trained before the newest snapshot, from which the run would resume after a failure."""
        return self.iterations if self.served else max(self.lineage.committed, self.lineage.restored or 0)

    @property
    def speed(self) -> float | None:
        """The steps per second of the most advanced rank in its latest steps; None if unknown."""
        lead = self._controller if self.served else max(self.ranks.values(), key=lambda rank: rank.step, default=Rank())
        if len(lead.latest) < 2:
            return None
        (begin, first), (end, last) = lead.latest[0], lead.latest[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the end of the run at the present speed, or None if unknown."""
        if self.planned is None or self.speed is None:
            return None
        return max(0, self.planned - self.reached) / self.speed

    @property
    def goodput(self) -> float | None:
        """The saved steps per second of wall-clock time, from the start to the last event; None if unknown."""
        leads = [who for who in self._stamps if who.startswith(LEADS)]
        if leads and self.ranks and 0 not in self.ranks:
            return None  # only rank 0 records what was saved, and it is on another node
        stamps = [stamp for who in leads or ["rank-0"] for stamp in self._stamps.get(who, [])]
        if len(leads) > 1:
            stamps.sort(key=lambda stamp: stamp.time)
        if self._last and not (stamps and isinstance(stamps[-1].what, ENDS)):
            stamps = [*stamps, self._last]
        seconds = wall(stamps)
        return self.committed / seconds if seconds > 0 and self.committed else None

    def add(self, event: Event) -> None:
        what = event.what
        if isinstance(what, Attempt) and what.attempt > self.lineage.attempt:  # it may have fewer ranks than the last
            self.ranks = {rank: progress for rank, progress in self.ranks.items() if rank < what.world}
        self.lineage.add(what)
        self._last = event if self._last is None or event.time >= self._last.time else self._last
        if isinstance(what, STAMPS):
            self._stamps.setdefault(event.who, []).append(event)
        if (rank := rank_of(event.who)) is not None:
            self._add_rank(self.ranks.setdefault(rank, Rank()), event)
        match what:
            case Save(bytes=size, seconds=stall):
                self.saves, self.saved_bytes = self.saves + 1, self.saved_bytes + size
                self.stalled += stall.waited
            case Commit(found=False, bytes=size) if event.who == "controller":
                self.saves, self.saved_bytes = self.saves + 1, self.saved_bytes + size
            case Detect(kind=kind) if kind not in ("peer", "return"):
                self.failures[kind] += 1
            case Lost(kind=kind):
                self.failures[kind] += 1
            case Serve():
                self.served = what
            case Iterate(iteration=iteration, loss=loss, checkpoint=waited):
                self.iterations, self.loss = iteration + 1, loss if loss is not None else self.loss
                self.stalled += waited
                self._add_speed(self._controller, event.time, iteration)
            case _:
                pass
        if isinstance(what, Regroup):
            if (what.attempt, what.number) in self._regroups:
                return  # another rank recorded it
            self._regroups.add((what.attempt, what.number))
            self.samples_lost += len(what.missing)
        if text := _description(what):
            self.latest.append((event.time, text))

    def _add_rank(self, rank: Rank, event: Event) -> None:
        rank.heard = max(rank.heard, event.time)
        match event.what:
            case Step(step=step, loss=loss):
                self.loss = loss if loss is not None else self.loss
                self._add_speed(rank, event.time, step)
            case Recover(restored=restored):
                rank.step = restored or 0
                rank.latest.clear()
            case _:
                pass

    def _add_speed(self, rank: Rank, time: float, step: int) -> None:
        rank.step, rank.heard = step + 1, time
        rank.latest.append((time, step))


def _description(what: What) -> str:
    match what:
        case Regroup(number=number, lost=lost) if lost or number:
            continues = "continues" if len(what.members) == 1 else "continue"
            members = f"{counted(len(what.members), 'worker')} {continues} with step {what.step}"
            return f"rank {', '.join(map(str, lost))} lost: {members} ({what.strategy})" if lost else members
        case Launch(workers=workers):
            return f"launched with {counted(workers, 'worker')}"
        case Restart(workers=workers, newest=newest):
            return f"restarted with {counted(workers, 'worker')}" + (
                f" from step {newest}" if newest is not None else ""
            )
        case Detect(kind="corruption" | "return", message=message):
            return message  # it names the ranks or the nodes
        case Detect(rank=rank, message=message, step=step):
            where = f" in step {step}" if step is not None else ""
            return f"rank {rank} {message.splitlines()[0] if message else 'failed'}{where}"
        case Scale(workers=workers):
            return f"scaled to {counted(workers, 'worker')}"
        case Straggler(step=step, ratio=ratio, seconds=seconds):
            return f"{what.name} is {ratio:.1f} times as slow as the others since step {step}: {seconds:.1f} s"
        case Preempt():
            return "asked to stop"
        case Judged(verdict=verdict, because=because):
            return f"{verdict}: {because}"
        case Lost(kind=kind, number=number, iteration=iteration):
            return f"{kind} {number} lost in iteration {iteration}"
        case Restored(node=node, blocks=blocks):
            return f"{len(blocks)} blocks restored on node {node}"
        case Joined(kind=kind, number=number):
            return f"{kind} {number} joined"
        case _:
            return ""


class RunWatcher:
    """A reader of the history files of one run, which may still be training."""

    def __init__(self, folder: Path) -> None:
        if not is_run(folder):
            raise BadInput(f"{folder} is not the folder of a run: name one that `holdfast runs` lists.")
        self.folder = folder
        self.run = RunState()
        self._files: dict[Path, GrowingFile] = {}

    def look(self) -> tuple[RunState, CurrentState]:
        """Read the new events of the run, and return its totals and its present state."""
        for path in sorted((self.folder / "history").glob("*.jsonl")):
            if path not in self._files and path.stem.startswith(WRITERS):
                self._files[path] = GrowingFile(path, from_start=True)
        events = [event for file in self._files.values() for event in _new(file)]
        for event in sorted(events, key=lambda event: event.time):
            self.run.add(event)
        return self.run, CurrentState(self.folder, state_of(self.folder, self.run.reached), self.run.goodput)


def _new(file: GrowingFile) -> Iterator[Event]:
    """Yield the events that were added to a file since the last call.

    Only the last few step events (`LATEST`) are included, because there may be millions."""
    lines: list[bytes] = []
    while more := file.lines():
        lines += more
        steps = [number for number, line in enumerate(lines) if line.startswith(STEP)]
        old = set(steps[:-LATEST])
        lines = [line for number, line in enumerate(lines) if number not in old]
    for line in lines:
        with suppress(ValueError):  # the audit reports damage
            yield parse(line)
