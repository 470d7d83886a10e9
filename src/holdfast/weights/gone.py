"""Whether the newest snapshot that a run has committed, as its history tells, is still there."""

from pathlib import Path

from holdfast.checkpoint import retention, snapshot
from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError
from holdfast.history.tail import last_commit


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
