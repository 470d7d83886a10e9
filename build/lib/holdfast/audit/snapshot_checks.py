"""Audit check of the snapshots that a run has left: every row of every tensor is in exactly one file.

It reads the headers of the files and no values; `holdfast verify` reads every byte.
"""

from holdfast.checkpoint import manifest
from holdfast.checkpoint.place import open_store
from holdfast.checkpoint.reader import IncompleteSnapshot, SnapshotReader
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, Corrupt, FutureVersion, HoldfastError, NoSnapshot, NotAStore
from holdfast.finding import Verdict, counted


def snapshots_hold_every_row_once(place: str) -> tuple[Verdict, str] | None:
    """Check that the files of each snapshot in the store at `place` hold every row of every tensor exactly once.

    Return None if there is no snapshot, or no store any more. A file that was damaged after its commit is no failure,
    because a run passes such a snapshot over."""
    try:
        return _check(open_store(place))
    except (BadInput, NotAStore):
        return None
    except HoldfastError as error:
        return "unknown", f"the snapshots cannot be read: {error}"


def _check(store: Store) -> tuple[Verdict, str] | None:
    whole: list[int] = []
    damaged: list[int] = []
    for step in manifest.steps(store):
        try:
            if lost := manifest.missing(store, manifest.read_manifest(store, step)):
                raise IncompleteSnapshot(f"{lost[0]} is missing.")
            SnapshotReader(store, step).check_rows()
            whole.append(step)
        except NoSnapshot:
            continue  # the run removed it meanwhile
        except IncompleteSnapshot as error:
            if step in manifest.steps(store):
                return "fail", f"the snapshot of step {step} does not hold every row once: {error}"
        except (Corrupt, FutureVersion):
            damaged.append(step)
    if not (whole or damaged):
        return None
    note = f"; damaged: step {', '.join(map(str, damaged))} (holdfast verify says where)" if damaged else ""
    if not whole:
        return "unknown", f"no snapshot can be read{note}"
    return "pass", f"{counted(len(whole), 'snapshot')}, every row of every tensor in one file{note}"
