"""Removal of a run's folder, unless the run is being trained or the folder holds other files too."""

import os
import secrets
import shutil
from pathlib import Path

from holdfast.errors import BadInput, HoldfastError
from holdfast.runs import lock
from holdfast.runs.config import RUN, read_config
from holdfast.runs.status import begins_as_history, foreign_files, has_config, is_run, is_training


def check_removable(folder: Path) -> None:
    """Raise BadInput for a folder that is not a run, is being trained, or holds files of other origin."""
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
    """Remove the folder of a run; it is renamed first, so that no part of a run is left if this is interrupted."""
    check_removable(folder)
    with lock.hold(folder):  # no training begins in it now
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.removed")
        try:
            folder.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise BadInput(f"cannot remove {folder}: {error.strerror or error}; what is left is {doomed}.") from error


def snapshots_elsewhere(folder: Path) -> str | None:
    """Return the place of a run's snapshots if that is not its folder: they stay there."""
    try:
        return read_config(folder).checkpoints if (folder / RUN).is_file() else None
    except HoldfastError:
        return None
