"""Find the checkpoint store of a run, inside or outside the run's folder, and notice a missing last snapshot."""

import os
from pathlib import Path

from holdfast.checkpoint import manifest, retention
from holdfast.checkpoint.place import open_store
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import HoldfastError, NoSnapshot
from holdfast.history.tail import last_commit
from holdfast.runs.config import RUN, read_config


def missing_commit(run: Path, store: Store) -> int | None:
    """Return the step of the last snapshot that the run recorded as committed, if `store` lacks it; otherwise None."""
    try:
        step = last_commit(run / "history")
    except (HoldfastError, OSError):  # the audit reports a damaged history
        return None
    if step is None or max(manifest.steps(store), default=-1) >= step:
        return None
    return None if step in retention.steps_aside(store) else step


def looks_like_run(folder: Path) -> bool:
    return (folder / RUN).is_file() or (folder / "history").is_dir()


def store_of(place: str | os.PathLike[str]) -> Store:
    """Return the checkpoint store of the run in the folder `place`, or the store at the path or URL `place`."""
    text = os.fspath(place)
    folder = Path(text)
    if "://" in text or not looks_like_run(folder):
        return open_store(place)
    elsewhere = read_config(folder).checkpoints if (folder / RUN).is_file() else None
    if elsewhere is None:
        store = DirectoryStore(folder / "checkpoints")
        if not manifest.steps(store) and (step := missing_commit(folder, store)):
            raise NoSnapshot(f"the snapshots of {text} are gone: the last commit was step {step}, and none is left.")
        if not store.path.is_dir():
            raise NoSnapshot(f"the run {text} has no snapshot yet: train it first.")
    return open_store(elsewhere or folder / "checkpoints")


def missing_commit_of(place: str | os.PathLike[str]) -> int | None:
    """Return the step of the last snapshot that the run in `place` committed, if its store lacks it; otherwise None."""
    text = os.fspath(place)
    if "://" in text or not looks_like_run(Path(text)):
        return None
    return missing_commit(Path(text), store_of(place))
