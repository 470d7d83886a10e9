"""The folder of a run: whose it is, and that only one supervisor of a node works in it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from holdfast.ddp import lock
from holdfast.ddp.config import IDENTITY, RunConfig, read_config
from holdfast.errors import BadInput, StorageFailed


@contextmanager
def claimed(out: Path, config: RunConfig, node: int = 0) -> Iterator[None]:
    """Make the folder this run's, or go on with the run that it holds, and keep a second supervisor out meanwhile."""
    with lock.hold(out, node):
        try:
            _claim(out, config, node)
        except OSError as error:
            why = error.strerror or error
            raise StorageFailed(f"cannot use {out} for a run: {why}. Name another --out.") from error
        yield


def differing(mine: RunConfig, theirs: RunConfig) -> list[str]:
    """The fields that make the two configs those of different runs."""
    return [name for name in IDENTITY if getattr(mine, name) != getattr(theirs, name)]


def continued(out: Path, config: RunConfig) -> RunConfig:
    """The config with the seed of the run that the folder holds, if the command gives none."""
    if config.seed is not None or not (out / "run.json").exists():
        return config
    return replace(config, seed=read_config(out).seed)


def _claim(out: Path, config: RunConfig, node: int) -> None:
    path = out / "run.json"
    if path.exists():
        theirs = read_config(out)
        if fields := differing(config, theirs):
            was = "; ".join(f"{name} was {_shown(theirs, name)}, not {_shown(config, name)}" for name in fields)
            raise BadInput(f"{out} holds another run ({was}): name another --out, or give the same command.")
    elif any(each for each in out.iterdir() if not each.name.startswith(".")):
        raise BadInput(f"{out} is not empty and holds no run: name another --out.")
    _write(path, out / f".run-{node}.tmp", json.dumps(config.to_json(), indent=2) + "\n")


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
    if value is None:
        return "not given"
    return repr(" ".join(value)) if isinstance(value, tuple) else repr(value)
