"""Where the events of a rank go: a history, or nowhere."""

from typing import Protocol

from holdfast.events import What


class Record(Protocol):
    """Takes events, and keeps them."""

    def append(self, what: What, time: float | None = None) -> None:
        """Remember an event, of now or of an earlier moment."""

    def flush(self) -> None:
        """Hand what is remembered to the system: the death of this process no longer loses it."""

    def sync(self) -> None:
        """Wait until what was flushed is on the disk: a power cut no longer loses it."""

    def close(self) -> None:
        """Flush, sync and end."""


class Unrecorded:
    """The record of a run without a folder: nothing is kept."""

    def append(self, what: What, time: float | None = None) -> None:
        pass

    def flush(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass
