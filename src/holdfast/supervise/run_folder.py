"""The folder of a run: whose it is, and that only one supervisor of a node works in it.

Which run it holds is told by its script, what that is given, its seed and how it recovers. What the script is given may
change where somebody says so, name by name, or where the run is extended; and a folder in which nothing was trained yet
is anybody's.

Whether the folder of a run is still where it was: somebody may move it, or remove it, while the run trains.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, StorageFailed
from holdfast.events import Judged
from holdfast.history.log import recall
from holdfast.history.tail import has_trained
from holdfast.runs import lock
from holdfast.runs.arguments import changes, plain
from holdfast.runs.config import IDENTITY, RunConfig, read_config

LOOK = 0.5  # seconds between two looks


class Home:
    """The folder, as it was when the run began."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._looked, self._is_gone = folder, 0.0, False
        self._was: tuple[int, int] | None = None
        self._was = self._identity()

    def is_gone(self, *, now: bool = False) -> bool:
        """Whether its name stands for another folder, or for none, when it was last looked at, or now."""
        if now or time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            self._is_gone = self._identity() != self._was
        return self._is_gone

    @property
    def line(self) -> str:
        """What there is to say of it."""
        return (
            f"{self._folder} was moved or removed while the run trained: put it back, or name its new place with --out"
        )

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._folder.stat()
        except FileNotFoundError:
            return None
        except OSError:  # a disk that does not answer is no folder that was moved
            return self._was
        return found.st_dev, found.st_ino


@contextmanager
def claimed(
    out: Path, config: RunConfig, node: int = 0, *, may_change: Sequence[str] = (), alone: bool = True
) -> Iterator[None]:
    """Make the folder this run's, or go on with the run that it holds, and keep a second supervisor out meanwhile."""
    with lock.hold(out, node):
        try:
            _claim(out, config, node, may_change, alone=alone)
        except OSError as error:
            why = error.strerror or error
            raise StorageFailed(f"cannot use {out} for a run: {why}. Name another --out.") from error
        yield


def differing(mine: RunConfig, theirs: RunConfig) -> list[str]:
    """The fields that make the two configs those of different runs."""
    return [name for name in IDENTITY if getattr(mine, name) != getattr(theirs, name)]


def continued(out: Path, config: RunConfig) -> RunConfig:
    """The config with the seed of the run that the folder holds, if the command gives none."""
    if config.seed is not None or not (out / "run.json").exists() or not has_trained(out / "history"):
        return config
    return replace(config, seed=read_config(out).seed)


def _claim(out: Path, config: RunConfig, node: int, may_change: Sequence[str], *, alone: bool) -> None:
    path = out / "run.json"
    if path.exists():
        theirs = read_config(out)
        if differing(config, theirs) and not (alone and _cleared(out, theirs)):
            _check_same(out, config, theirs, may_change)
    elif any(each for each in out.iterdir() if not each.name.startswith(".")):
        raise BadInput(f"{out} is not empty and holds no run: name another --out.")
    _write(path, out / f".run-{node}.tmp", json.dumps(config.to_json(), indent=2) + "\n")


def _check_same(out: Path, mine: RunConfig, theirs: RunConfig, may_change: Sequence[str]) -> None:
    """Refuse a command that is another run's, and say in what it is; what may change is the same run's."""
    fields = [name for name in differing(mine, theirs) if name != "args"]
    was = [f"{name} was {_shown(theirs, name)}, not {_shown(mine, name)}" for name in fields]
    allowed = {plain(name) for name in may_change}
    refused = [each for each in changes(theirs.args, mine.args) if plain(each.name) not in allowed]
    refused = [each for each in refused if not (mine.extend and each.lengthens)]
    if not was and not refused and mine.args != theirs.args and not changes(theirs.args, mine.args):
        was = ["its arguments come in another order"]
    if not (was or refused):
        return
    ways = "name another --out, or give the same command"
    if refused:
        names = ",".join(plain(each.name) for each in refused)
        ways += f". If it is the same run all the same: --may-change {names}"
        ways += ", or --extend to train it for longer" if all(each.lengthens for each in refused) else ""
    raise BadInput(f"{out} holds another run ({'; '.join([*was, *map(str, refused)])}): {ways}.")


def _cleared(out: Path, theirs: RunConfig) -> bool:
    """Whether nothing was trained in the folder yet; then what earlier commands left is put out of the way."""
    history, checkpoints = out / "history", DirectoryStore(out / "checkpoints")
    judged = [event.what for event in recall(history / "supervisor.jsonl", "verdict")]
    ended = any(isinstance(what, Judged) and what.verdict in ("completed", "preempted") for what in judged)
    if ended or theirs.checkpoints is not None or has_trained(history) or any(snapshot.steps(checkpoints)):
        return False
    for step in snapshot.steps(checkpoints):
        snapshot.remove(checkpoints, step)  # first weights, by other arguments
    if history.exists():
        taken = [int(each.name.rpartition("-")[2]) for each in out.glob("history-before-[0-9]*")]
        history.rename(out / f"history-before-{max(taken, default=0) + 1}")
    return True


def _write(path: Path, temporary: Path, text: str) -> None:
    """Put a file in place whole, so that a power cut leaves the old one or the new one."""
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = text.encode()
        while rest:
            rest = rest[os.write(number, rest) :]
        os.fsync(number)
    finally:
        os.close(number)
    os.replace(temporary, path)
    _sync(path.parent)
    with suppress(PermissionError):  # the folder's own name, if it is new; where we may not look, it is not
        _sync(path.parent.parent)


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _shown(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    return "not given" if value is None else repr(value)
