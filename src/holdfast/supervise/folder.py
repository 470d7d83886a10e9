"""The folder of a run: whose it is, and that only one supervisor of a node works in it."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from holdfast.ddp.config import IDENTITY, RunConfig, read_config
from holdfast.errors import BadInput, StorageFailed

FREE_WITHIN = 5.0


@contextmanager
def claimed(out: Path, config: RunConfig, node: int = 0) -> Iterator[None]:
    """Make the folder this run's, or go on with the run that it holds, and keep a second supervisor out meanwhile."""
    with ExitStack() as held:
        try:
            held.enter_context(_lock(out, node))
            _claim(out, config, node)
        except OSError as error:
            why = error.strerror or error
            raise StorageFailed(f"cannot use {out} for a run: {why}. Name another --out.") from error
        yield


def _lock(out: Path, node: int) -> TextIO:
    out.mkdir(parents=True, exist_ok=True)
    lock = (out / f".supervisor-{node}.lock").open("w")
    if not _locked(lock):
        lock.close()
        raise BadInput(f"{out} is in use by another supervisor: wait for it, or name another --out.")
    return lock


def _locked(lock: TextIO) -> bool:
    """Take the lock, if it becomes free in time: workers share it, and those of a dead supervisor take a moment to die."""
    deadline = time.monotonic() + FREE_WITHIN
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def differing(mine: RunConfig, theirs: RunConfig) -> list[str]:
    """The fields that make the two configs those of different runs."""
    return [name for name in IDENTITY if getattr(mine, name) != getattr(theirs, name)]


def _claim(out: Path, config: RunConfig, node: int) -> None:
    path = out / "run.json"
    if path.exists():
        theirs = read_config(out)
        if fields := differing(config, theirs):
            was = "; ".join(f"{name} was {_shown(theirs, name)}, not {_shown(config, name)}" for name in fields)
            raise BadInput(f"{out} holds another run ({was}): name another --out, or give the same command.")
    elif any(each for each in out.iterdir() if not each.name.startswith(".")):
        raise BadInput(f"{out} is not empty and holds no run: name another --out.")
    temporary = out / f".run-{node}.tmp"
    temporary.write_text(json.dumps(config.to_json(), indent=2) + "\n")
    os.replace(temporary, path)


def _shown(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    return repr(" ".join(value)) if isinstance(value, tuple) else repr(value)
