"""How the run in a folder stands, from its lock and the ends of its histories: quick, however long it has trained.

What a run writes into its folder, by name: anything else there is somebody's, and is never removed with the run.
"""

import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holdfast.checkpoint import retention, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.cost.formulas import goodput
from holdfast.errors import HoldfastError
from holdfast.events import Commit, Done, Event, Iterate, Judged, Open, Preempted, Recover, Serve, Step, Stopped
from holdfast.history.log import backwards, recall, stream_history
from holdfast.runs.config import read_config
from holdfast.runs.lock import is_held

_HISTORY = r"(?:supervisor(?:-\d+)?|rank-\d+|injected-[\w.-]+|controller|node-\d+|worker-\d+)\.jsonl"
_SNAPSHOT = r"(?:step-\d{8,18}|set-aside-\d{8,18}-\d+)/(?:state\.safetensors|extra\.json|manifest\.json)"
_RUNNING = r"running/(?:index-\d{8,18}\.json|segment-\d{8,18}-[\w.-]+\.safetensors)"
_BETWEEN_NODES = r"nodes/term-\d{8}|histories/\w[\w.-]*\.jsonl/[0-9a-f]{16}/\d{8}"
_UNFINISHED = r"(?:\.[0-9a-f]{8}\.tmp)?"
_FILES = re.compile(
    r"run\.json|\.run-\d+\.tmp|\.supervisor-\d+\.lock|scale\.(?:json|partial)|join(?:\.new)?"
    rf"|history(?:-before-\d+)?/{_HISTORY}"
    r"|logs/attempt-\d{4,18}/(?:(?:rank|worker)-\d+\.(?:out|err|error\.json)|ranks\.jsonl)"
    rf"|checkpoints/(?:latest\.json|{_SNAPSHOT}|{_RUNNING}|{_BETWEEN_NODES}|probe-[0-9a-f]{{16}}){_UNFINISHED}",
    re.ASCII,
)
_FOLDERS = re.compile(
    r"history(?:-before-\d+)?|logs(?:/attempt-\d{4,18})?"
    r"|checkpoints(?:/(?:step-\d{8,18}|set-aside-\d{8,18}-\d+|running|nodes|histories(?:/.*)?))?",
    re.ASCII,
)


def is_history(name: str) -> bool:
    """Whether a file of a history has a name that a run gives."""
    return re.fullmatch(_HISTORY, name, re.ASCII) is not None


def foreign(folder: Path) -> list[str]:
    """What lies in the folder of a run, at any depth, that no run has written; of a folder all that is in it, as one."""
    found = []
    waiting = [""]
    while waiting:
        within = waiting.pop()
        for entry in os.scandir(folder / within):
            name = f"{within}{entry.name}"
            if entry.is_dir(follow_symlinks=False) and _FOLDERS.fullmatch(name):
                waiting.append(f"{name}/")
            elif not (entry.is_file(follow_symlinks=False) and _FILES.fullmatch(name)):
                found.append(name)
    return sorted(found)


DEEP = 3  # folders below the given one in which runs are looked for
SILENT = 600.0  # seconds without a word after which a served run is taken for dead
ENDS = (Judged, Done, Preempted, Stopped)
STAMPS = (Open, *ENDS)  # events from which it follows when somebody was at work


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run: whether it trains now or how it ended, how far it came, committed steps per second, and bytes on the disk."""

    folder: Path
    state: str
    step: int
    goodput: float | None
    size: int
    last: float  # when something was last written about it

    @property
    def has_trained(self) -> bool:
        """Whether anything was trained, by us or by the script itself; where that cannot be told, it counts as trained."""
        return self.step > 0 or self.state in ("completed", "preempted", "trains", "unreadable")

    @property
    def trains(self) -> bool:
        """Whether somebody trains in it now."""
        return self.state == "trains"


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs at this place, or a little below it, in the order of their names."""
    return sorted(_runs_below(folder, DEEP))


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, of `holdfast run`, of `holdfast serve` or of a script alone."""
    try:
        return has_config(folder) or any(is_history(file.name) for file in (folder / "history").glob("*.jsonl"))
    except OSError:
        return False


def has_config(folder: Path) -> bool:
    """Whether this folder has the config of a run; others may call a file run.json, too."""
    with suppress(HoldfastError):
        read_config(folder)
        return True
    return False


def begins_as_a_history(file: Path) -> bool:
    """Whether the first line of a file is that of a history."""
    with suppress(HoldfastError, OSError):
        return any(isinstance(event.what, Open) for _, event in itertools.islice(stream_history(file, []), 1))
    return False


def trains(folder: Path) -> bool:
    """Whether somebody trains in this folder now: who does holds its lock."""
    nodes = (path.name.removeprefix(".supervisor-").removesuffix(".lock") for path in folder.glob(".supervisor-*.lock"))
    return any(is_held(folder, int(node)) for node in nodes if node.isdigit()) or _serves(folder)


def _serves(folder: Path) -> bool:
    """Whether a parameter server seems to be at work: it holds no lock, but writes all the time until it is done."""
    controller = folder / "history" / "controller.jsonl"
    silent = time.time() - max((_changed(file) for file in controller.parent.glob("*.jsonl")), default=0.0)
    return controller.is_file() and silent < SILENT and not any(recall(controller, "done"))


def standing(folder: Path) -> RunStatus:
    """How the run in this folder stands."""
    try:
        return _stands(folder)
    except (HoldfastError, OSError):
        return RunStatus(
            folder=folder, state="unreadable", step=0, goodput=None, size=_size(folder), last=_changed(folder)
        )


def _stands(folder: Path) -> RunStatus:
    files, lead, ranks = _files(folder)
    ends = [_end(file) for file in ranks]
    reached, committed = (max((end[i] for end in ends), default=0) for i in (0, 1))
    stamps = list(_stamps(lead or (ranks[0] if ranks else None), files))
    if lead is not None and lead.stem == "controller":
        reached = committed = next(
            (each.what.iteration + 1 for each in backwards(lead) if isinstance(each.what, Iterate)), 0
        )
    seconds = wall(stamps)
    return RunStatus(
        folder=folder,
        state=state_of(folder, reached),
        step=reached or _saved(folder),
        goodput=goodput(committed, seconds) if seconds > 0 and committed else None,
        size=_size(folder),
        last=max((_changed(file) for file in files), default=_changed(folder)),
    )


def _files(folder: Path) -> tuple[list[Path], Path | None, list[Path]]:
    """All histories of a run; that of whoever leads it, if somebody does; and those of its ranks."""
    files = sorted((folder / "history").glob("*.jsonl"))
    lead = next((file for file in files if file.stem.startswith(("supervisor", "controller"))), None)
    return files, lead, [file for file in files if file.stem.startswith("rank-")]


def state_of(folder: Path, reached: int) -> str:
    """Whether somebody trains in this folder, which has come so far, or else how that ended."""
    if trains(folder):
        return "trains"
    _, lead, ranks = _files(folder)
    for file in [*([lead] if lead else []), *ranks[:1]]:
        for event in backwards(file):
            match event.what:
                case Judged(verdict=word):
                    return word
                case Done() if file is not lead or file.stem == "controller":
                    return "completed"
                case Stopped():
                    return "completed"
                case Preempted():
                    return "preempted"
                case Open() | Serve():
                    break
    return "was killed" if reached else "history lost" if _saved(folder) else "nothing trained"


def _saved(folder: Path) -> int:
    """The newest step of which a snapshot is in the folder, also one that was set aside: whatever its history says."""
    store = DirectoryStore(folder / "checkpoints")
    return max((*snapshot.steps(store), *retention.steps_aside(store)), default=0)


def _end(file: Path) -> tuple[int, int]:
    """How many steps a rank had trained at last, and how many of them were committed, as it tells."""
    reached = committed = None
    for event in backwards(file):
        match event.what:
            case Step(step=step):
                reached = step + 1 if reached is None else reached
            case Commit(step=step):
                committed = step if committed is None else committed
            case Recover(restored=restored):
                reached = (restored or 0) if reached is None else reached
                committed = (restored or 0) if committed is None else committed
        if reached is not None and committed is not None:
            break
        if reached is not None and not file.stem.endswith("-0") and not isinstance(event.what, Step):
            break  # only one rank saves
    return reached or 0, committed or 0


def _stamps(lead: Path | None, files: list[Path]) -> Iterator[Event]:
    """When whoever leads a run began and ended, again and again; of one that has not ended, the last that anybody said."""
    if lead is None:
        return
    stamps = list(recall(lead, "open", "verdict", "done", "preempted", "stopped"))
    yield from stamps
    lasts = [event for file in files for event in islice(backwards(file), 1)]
    if lasts and not (stamps and isinstance(stamps[-1].what, ENDS)):
        yield max(lasts, key=lambda event: event.time)


def wall(stamps: Sequence[Event]) -> float:
    """Seconds from the beginning to the end, without those between an end in order and the next beginning."""
    total, begun = 0.0, None
    last: Event | None = None
    for event in stamps:
        if isinstance(event.what, Open) and last is not None and isinstance(last.what, ENDS) and begun is not None:
            total, begun = total + last.time - begun, event.time
        begun = event.time if begun is None else begun
        last = event
    return total + (last.time - begun if last is not None and begun is not None else 0.0)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    if not depth:
        return
    try:
        below = [Path(each.path) for each in os.scandir(folder) if each.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for each in below:
        if not each.name.startswith("."):
            yield from _runs_below(each, depth - 1)


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - there may be very many
            except OSError:
                continue
    return total


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
