"""Being rid of a run: its folder, whole, and never one that is being trained or holds something else too."""

import os
import secrets
import shutil
from pathlib import Path

from holdfast.errors import BadInput, HoldfastError
from holdfast.runs import lock
from holdfast.runs.config import RUN, read_config
from holdfast.runs.status import begins_as_a_history, foreign, has_config, is_run, trains


def check_removable(folder: Path) -> None:
    """Refuse what is no run, what is being trained, and what holds files that no run has written."""
    if folder.is_symlink() or not is_run(folder):
        raise BadInput(f"{folder} is not the folder of a run: nothing is removed.")
    if trains(folder):
        raise BadInput(f"{folder} is being trained: stop it first (SIGTERM or Ctrl-C saves and stops).")
    _check_ours(folder)
    if others := foreign(folder):
        raise BadInput(f"{folder} also holds {', '.join(others[:4])}, which no run has written: move that away first.")


def _check_ours(folder: Path) -> None:
    """Refuse a folder that only looks like that of a run, by the names of its files."""
    if os.path.lexists(folder / RUN):
        if not has_config(folder):
            raise BadInput(f"{folder / RUN} is not that of a run, or is damaged: nothing is removed.")
    elif not any(map(begins_as_a_history, (folder / "history").glob("*.jsonl"))):
        raise BadInput(f"the history in {folder} is not that of a run, or is damaged: nothing is removed.")


def remove(folder: Path) -> None:
    """Remove the folder of a run; from the first moment on it is no run any more."""
    check_removable(folder)
    with lock.hold(folder):  # nobody begins to train in it now
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.removed")
        try:
            folder.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise BadInput(f"cannot remove {folder}: {error.strerror or error}; what is left is {doomed}.") from error


def elsewhere(folder: Path) -> str | None:
    """Where the snapshots of a run are, if not in its folder: they stay."""
    try:
        return read_config(folder).checkpoints if (folder / RUN).is_file() else None
    except HoldfastError:
        return None
