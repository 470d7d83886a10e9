"""The errors that holdfast raises on purpose. Their classes differ in what the calling program can do.

Every message is one line: what happened, why, and what to do.
"""


class HoldfastError(Exception):
    """The base class of every error that holdfast raises on purpose."""


class BadInput(HoldfastError):
    """An argument, an option, a script or a file is invalid. Correct it as the message says, and try again."""


class Interrupted(HoldfastError):
    """The user interrupted the command; the message names the results that were kept."""


class DataMissing(HoldfastError):
    """A data set is neither in the data folder nor available for download; pass the folder that contains it."""


class NotAStore(HoldfastError):
    """The path or URL that was given is not a checkpoint store. Pass the path or URL of a store."""


class NoSnapshot(HoldfastError):
    """The checkpoint store has no intact snapshot. Train from the beginning."""


class Corrupt(HoldfastError):
    """A snapshot, a data file or a history is damaged: its bytes are not the bytes that were written."""


class FutureVersion(HoldfastError):
    """A snapshot or a history has a format that this version of holdfast does not read.

    If a newer version wrote it, upgrade holdfast. If an older version wrote it, read it with that version."""


class CommitConflict(HoldfastError):
    """The checkpoint store already has what would be written, such as a snapshot of this step. Give each run its own store."""


class StorageFailed(HoldfastError):
    """A read from or a write to the disk or the object store failed. Free space, correct permissions, or try again."""


class InitialWeightsLost(StorageFailed):
    """No snapshot can be used, and reading them has overwritten the initial weights; start the script again."""


class StateCorrupted(HoldfastError):
    """A bit of the state of a rank has changed by itself: that of rank `rank`, or of one that is not known (None)."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerLost(HoldfastError):
    """A worker process died before its work was done, or other nodes have continued the run without this node."""
