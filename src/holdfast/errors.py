"""The errors that holdfast raises on purpose: one class for each way in which a caller can react.

    HoldfastError
    ├── BadInput          the request is invalid: correct it
    ├── DataMissing       a data set is missing: download it, or name its folder
    ├── NotAStore         the place is not a checkpoint store: name another
    ├── NoSnapshot        the store has no verified snapshot: start from the beginning
    ├── Corrupt           bytes differ from their manifest: fall back to an older snapshot
    ├── FutureVersion     a file was written by a newer holdfast: upgrade
    ├── CommitConflict    another writer committed this name first: give each run its own store
    ├── StorageFailed     the disk or object store refused: free space, fix permissions, retry
    ├── WorkerLost        a worker process died: see its log, or start fewer at once
    └── Interrupted       the user interrupted the command: start it again

Every message is one line: what happened, why, and what to do.
"""


class HoldfastError(Exception):
    """The base class of every error that holdfast raises on purpose."""


class BadInput(HoldfastError):
    """The request is invalid; correct it and try again."""


class Interrupted(HoldfastError):
    """The user interrupted the command; the message names the results that were kept."""


class DataMissing(HoldfastError):
    """A data set is neither in the data folder nor available for download."""


class NotAStore(HoldfastError):
    """The given path or address is not a checkpoint store."""


class NoSnapshot(HoldfastError):
    """The store has no snapshot that passes verification."""


class Corrupt(HoldfastError):
    """Stored bytes are not the bytes that were written: a snapshot, a data file or a history is damaged."""


class FutureVersion(HoldfastError):
    """A manifest or history was written by a newer version of holdfast."""


class CommitConflict(HoldfastError):
    """Another writer has already committed this name, which can be committed only once."""


class StorageFailed(HoldfastError):
    """The disk or the object store refused a read or a write."""


class WorkerLost(HoldfastError):
    """A worker process died before its work was done."""
