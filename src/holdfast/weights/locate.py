"""Where the snapshots of a run are: its folder is named, and they may lie in it or at a place of their own.

Whether the newest snapshot that a run has committed, as its history tells, is still there.
"""

import os
from pathlib import Path

from holdfast.checkpoint import retention, snapshot
from holdfast.checkpoint.place import open_store
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import HoldfastError, NoSnapshot
from holdfast.history.tail import last_commit
from holdfast.runs.config import RUN, read_config


def gone(run: Path, store: Store) -> int | None:
    """The step that the run in this folder has committed last, if its snapshot is there no more.

    Older snapshots are removed when newer ones are committed, the newest never is. What was set aside is still there.
    """
    try:
        step = last_commit(run / "history")
    except (HoldfastError, OSError):  # what cannot be read is the audit's to tell
        return None
    if step is None or max(snapshot.steps(store), default=-1) >= step:
        return None
    return None if step in retention.steps_aside(store) else step


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, whoever trained it: it has a history."""
    return (folder / RUN).is_file() or (folder / "history").is_dir()


def store_of(place: str | os.PathLike[str]) -> Store:
    """The store of the run in this folder; or the store that is at this path or URL itself."""
    text = os.fspath(place)
    folder = Path(text)
    if "://" in text or not is_run(folder):
        return open_store(place)
    elsewhere = read_config(folder).checkpoints if (folder / RUN).is_file() else None
    if elsewhere is None:
        store = DirectoryStore(folder / "checkpoints")
        if not snapshot.steps(store) and (step := gone(folder, store)):
            raise NoSnapshot(f"the snapshots of {text} are gone: step {step} was committed last, and none is there")
        if not store.path.is_dir():
            raise NoSnapshot(f"{text} is a run that has no snapshot yet: train it first")
    return open_store(elsewhere or folder / "checkpoints")


def gone_from(place: str | os.PathLike[str]) -> int | None:
    """The step that was committed last in the run at this place, if it is a run and the snapshot is there no more."""
    text = os.fspath(place)
    if "://" in text or not is_run(Path(text)):
        return None
    return gone(Path(text), store_of(place))
