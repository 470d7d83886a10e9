"""The status of the run in a folder, read from its lock and the ends of its histories, and the removal of the folder.

This module knows the names of all files that a run writes. A folder that holds any other file is never removed.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holdfast.checkpoint import manifest, retention
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import Commit, Done, Event, Iterate, Judged, Open, Preempted, Recover, Serve, Step, Stopped
from holdfast.history.log import backwards, recall, stream_history
from holdfast.runs.config import RUN, read_config
from holdfast.runs.lock import hold, others_hold

_HISTORY = r"(?:supervisor(?:-\d+)?|rank-\d+|injected-[\w.-]+|controller|node-\d+|worker-\d+)\.jsonl"
_SNAPSHOT = (
    r"(?:step-\d{8,18}(?:-term-\d{8})?|set-aside-\d{8,18}-\d+)"
    r"/(?:shard-\d{5,}-of-\d{5,}\.safetensors|extra\.json|manifest\.json)"
)
_RUNNING = r"running/(?:index-\d{8,18}\.json|segment-\d{8,18}-[\w.-]+\.safetensors)"
_BETWEEN_NODES = r"nodes/(?:term|attempt)-\d{8}|histories/\w[\w.-]*\.jsonl/[0-9a-f]{16}/\d{8}"
_UNFINISHED = r"(?:\.[0-9a-f]{8}\.tmp)?"
_FILES = re.compile(
    r"run\.json|\.run-\d+\.tmp|\.supervisor-\d+\.lock|scale\.(?:json|partial)|join(?:\.new)?"
    rf"|history(?:-before-\d+)?/(?:{_HISTORY}|segments/(?:\d{{6,}}-rank-\d+-to-\d+\.npz|\.\d+\.tmp))"
    r"|logs/attempt-\d{4,18}/(?:(?:rank|worker)-\d+\.(?:out|err|error\.json)|ranks\.jsonl|standby)"
    rf"|checkpoints/(?:latest\.json|{_SNAPSHOT}|{_RUNNING}|{_BETWEEN_NODES}|probe-[0-9a-f]{{16}}){_UNFINISHED}",
    re.ASCII,
)
_FOLDERS = re.compile(
    r"history(?:-before-\d+)?(?:/segments)?|logs(?:/attempt-\d{4,18})?"
    r"|checkpoints(?:/(?:step-\d{8,18}(?:-term-\d{8})?|set-aside-\d{8,18}-\d+|running|nodes|histories(?:/.*)?))?",
    re.ASCII,
)


def foreign_files(folder: Path) -> list[str]:
    """Return the files and folders in a run's folder, at any depth, that holdfast did not write."""
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


DEEP = 3  # levels of folders in which runs are looked for
SILENT = 600.0  # seconds without a new event after which a served run counts as dead
ENDS = (Judged, Done, Preempted, Stopped)
STAMPS = (Open, *ENDS)  # events that show when a supervisor or a script began or ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run: its state, steps, steps per second (`goodput`), bytes, and time of its last event."""

    folder: Path
    state: str  # `trains`, or how it ended
    step: int
    goodput: float | None
    size: int
    last: float

    @property
    def has_trained(self) -> bool:
        """True if the run has trained a step, trains now, was completed or preempted, or cannot be read."""
        return self.step > 0 or self.state in ("completed", "preempted", "trains", "unreadable")

    @property
    def is_training(self) -> bool:
        return self.state == "trains"


def runs_in(folder: Path, depth: int = DEEP) -> list[Path]:
    """Return the sorted folders of all runs at `folder` or at most `depth` levels below it."""
    if is_run(folder):
        return [folder]
    try:
        below = [Path(entry.path) for entry in os.scandir(folder) if depth and entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(run for path in below if not path.name.startswith(".") for run in runs_in(path, depth - 1))


def is_run(folder: Path) -> bool:
    """Return True if `folder` holds the config or the history files of a run."""
    with suppress(OSError):
        files = (folder / "history").glob("*.jsonl")
        return has_config(folder) or any(re.fullmatch(_HISTORY, file.name, re.ASCII) for file in files)
    return False


def has_config(folder: Path) -> bool:
    with suppress(HoldfastError):
        read_config(folder)
        return True
    return False


def begins_as_history(file: Path) -> bool:
    """Return True if the first event in `file` is an `open` event, with which every history file begins."""
    with suppress(HoldfastError, OSError):
        return any(isinstance(event.what, Open) for _, event in islice(stream_history(file, []), 1))
    return False


def is_training(folder: Path) -> bool:
    """Return True if a process holds the lock of `folder`, or a parameter server runs in it."""
    if others_hold(folder):
        return True
    controller = folder / "history" / "controller.jsonl"  # a server holds no lock, but writes events until it is done
    silent = time.time() - max((_changed(file) for file in controller.parent.glob("*.jsonl")), default=0.0)
    return controller.is_file() and silent < SILENT and not any(recall(controller, "done"))


def run_status(folder: Path) -> RunStatus:
    """Return the status of the run in `folder`, with state `unreadable` if its files cannot be read."""
    with suppress(HoldfastError, OSError):
        return _read_status(folder)
    return RunStatus(folder=folder, state="unreadable", step=0, goodput=None, size=_size(folder), last=_changed(folder))


def _read_status(folder: Path) -> RunStatus:
    files, leads, ranks = _files(folder)
    ends = [_end(file) for file in ranks]
    reached, committed = (max((end[i] for end in ends), default=0) for i in (0, 1))
    stamps = _stamps(leads or ranks[:1], files)
    if leads and ranks and ranks[0].stem != "rank-0":
        committed = 0  # only rank 0 records what was saved, and it is on another node
    lead = leads[0] if leads else None
    if lead is not None and lead.stem == "controller":
        reached = committed = next(
            (event.what.iteration + 1 for event in backwards(lead) if isinstance(event.what, Iterate)), 0
        )
    seconds = wall(stamps)
    return RunStatus(
        folder=folder,
        state=state_of(folder, reached),
        step=reached or _saved(folder),
        goodput=committed / seconds if seconds > 0 and committed else None,
        size=_size(folder),
        last=max((_changed(file) for file in files), default=_changed(folder)),
    )


def _files(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Return all history files in `folder`, those of supervisors (or of a controller), and those of ranks.

    The supervisor that wrote the newest event comes first: a run may continue with another number of nodes."""
    files = sorted((folder / "history").glob("*.jsonl"))
    leads = [file for file in files if file.stem.startswith(("supervisor", "controller"))]
    if len(leads) > 1:
        leads.sort(
            key=lambda file: max((event.time for event in islice(backwards(file), 1)), default=0.0), reverse=True
        )
    return files, leads, [file for file in files if file.stem.startswith("rank-")]


def state_of(folder: Path, reached: int) -> str:
    """Return the state of the run in `folder`: "trains", or how it ended, such as "completed".

    `reached` is the number of steps that the run has trained."""
    if is_training(folder):
        return "trains"
    _, leads, ranks = _files(folder)
    lead = leads[0] if leads else None
    for file in [*leads[:1], *ranks[:1]]:
        for event in backwards(file):
            match event.what:
                case Judged(verdict=word):
                    return word
                case Stopped():
                    return "completed"
                case Done() if file is not lead or file.stem == "controller":
                    return "completed"
                case Preempted():
                    return "preempted"
                case Open() | Serve():
                    break
    return "was killed" if reached else "history lost" if _saved(folder) else "nothing trained"


def _saved(folder: Path) -> int:
    """Return the step of the newest snapshot in `folder`, even if it is damaged; 0 if there is none."""
    store = DirectoryStore(folder / "checkpoints")
    return max((*manifest.steps(store), *retention.steps_aside(store)), default=0)


def _end(file: Path) -> tuple[int, int]:
    """Return the number of steps trained and the number of steps saved, according to a rank's history file."""
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


def _stamps(leads: Sequence[Path], files: Sequence[Path]) -> list[Event]:
    """Return when the processes `leads` began and ended; if they have not ended, also the last event in `files`."""
    kinds = "open", "verdict", "done", "preempted", "stopped"
    stamps = [event for lead in leads for event in recall(lead, *kinds)]
    if len(leads) > 1:
        stamps.sort(key=lambda event: event.time)
    if leads and not (stamps and isinstance(stamps[-1].what, ENDS)):
        lasts = [event for file in files for event in islice(backwards(file), 1)]
        stamps += [max(lasts, key=lambda event: event.time)] if lasts else []
    return stamps


def wall(stamps: Sequence[Event]) -> float:
    """Return the seconds from the first to the last event in `stamps`, without pauses after a clean stop."""
    total, begun = 0.0, None
    last: Event | None = None
    for event in stamps:
        if isinstance(event.what, Open) and last is not None and isinstance(last.what, ENDS) and begun is not None:
            total, begun = total + last.time - begun, event.time
        begun = event.time if begun is None else begun
        last = event
    return total + (last.time - begun if last is not None and begun is not None else 0.0)


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(path, name))  # noqa: PTH118 - there may be very many
                total += min(status.st_size, status.st_blocks * 512)  # a history has holes where it was folded
    return total


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def check_removable(folder: Path) -> None:
    """Raise BadInput if `folder` is not a run, is being trained, or holds files that holdfast did not write."""
    if folder.is_symlink() or not is_run(folder):
        raise BadInput(f"{folder} is not the folder of a run: nothing is removed.")
    if is_training(folder):
        raise BadInput(f"{folder} is being trained: stop it first with SIGTERM or Ctrl-C, which saves.")
    if os.path.lexists(folder / RUN):
        if not has_config(folder):
            raise BadInput(f"{folder / RUN} is not the config of a run, or is damaged: nothing is removed.")
    elif not any(map(begins_as_history, (folder / "history").glob("*.jsonl"))):
        raise BadInput(f"the history in {folder} is not that of a run, or is damaged: nothing is removed.")
    if others := foreign_files(folder):
        raise BadInput(f"{folder} also holds {', '.join(others[:4])}, which no run has written: move that away first.")


def remove(folder: Path) -> None:
    """Remove the folder of a run. It is renamed first, so that an interruption leaves no incomplete run."""
    check_removable(folder)
    with hold(folder):  # no training begins in it now
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.removed")
        try:
            folder.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise BadInput(f"cannot remove {folder}: {error.strerror or error}; what is left is {doomed}.") from error


def snapshots_elsewhere(folder: Path) -> str | None:
    """Return the directory or URL of a run's snapshots if they are outside its folder, otherwise None."""
    with suppress(HoldfastError):
        return read_config(folder).checkpoints
    return None
