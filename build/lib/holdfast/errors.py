"""The errors that holdfast raises on purpose, one class for each way in which a caller can react.

Every message is one line: what happened, why, and what to do.
"""


class HoldfastError(Exception):
    """The base class of every error that holdfast raises on purpose."""


class BadInput(HoldfastError):
    """Raised for an invalid request; correct it and try again."""


class Interrupted(HoldfastError):
    """The user interrupted the command; the message names the results that were kept."""


class DataMissing(HoldfastError):
    """A data set is neither in the data folder nor available for download; pass the folder that contains it."""


class NotAStore(HoldfastError):
    """The given path or address is not a checkpoint store; pass another one."""


class NoSnapshot(HoldfastError):
    """The store has no snapshot that passes verification; start from the beginning."""


class Corrupt(HoldfastError):
    """Stored bytes are not the bytes that were written: a snapshot, a data file or a history is damaged."""


class FutureVersion(HoldfastError):
    """A snapshot or history has the format of another, usually newer, version of holdfast; upgrade holdfast."""


class CommitConflict(HoldfastError):
    """Another run has already written to this checkpoint store; give each run its own store."""


class StorageFailed(HoldfastError):
    """The disk or the object store refused a read or a write; free space, fix permissions or retry."""


class InitialWeightsLost(StorageFailed):
    """No snapshot can be used, and reading them has overwritten the initial weights; start the script again."""


class WorkerLost(HoldfastError):
    """A worker process died before its work was done; see its log."""
