"""Everything holdfast raises on purpose, one class for each different thing a caller can do about it.

    HoldfastError
    ├── BadInput          the request cannot be met as it stands: correct it
    ├── DataMissing       a data set is not at hand: fetch it, or say where it is
    ├── NotAStore         no checkpoint store at this place: name another
    ├── NoSnapshot        the store holds no good snapshot: start from the beginning
    ├── Corrupt           bytes do not match their manifest: fall back to an older save
    ├── FutureVersion     written by a newer holdfast: upgrade
    ├── CommitConflict    somebody else committed this name first: two writers share one store
    ├── StorageFailed     the disk or object store refused: free space, fix permissions, retry
    └── WorkerLost        a worker process died: see why, or run fewer at once

Every message is one line that says what happened, why, and what to do.
"""


class HoldfastError(Exception):
    """The base of every error that holdfast raises on purpose."""


class BadInput(HoldfastError):
    """The request cannot be met as it stands; correct it and ask again."""


class Interrupted(HoldfastError):
    """Somebody has interrupted the command; what stays of its work is said."""


class DataMissing(HoldfastError):
    """A data set is neither in the data folder nor to be fetched."""


class NotAStore(HoldfastError):
    """There is no checkpoint store at this place."""


class NoSnapshot(HoldfastError):
    """The store holds no snapshot that passes verification."""


class Corrupt(HoldfastError):
    """Bytes are not those that were written: a save does not match its manifest, a data file or history is damaged."""


class FutureVersion(HoldfastError):
    """A manifest or history was written by a newer version of holdfast."""


class CommitConflict(HoldfastError):
    """A name that may be committed only once was already committed by somebody else."""


class StorageFailed(HoldfastError):
    """The disk or the object store refused a read or a write."""


class WorkerLost(HoldfastError):
    """A worker process died before its work was done."""
