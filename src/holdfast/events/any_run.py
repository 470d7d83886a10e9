"""Events of every kind of run, and stand-ins for lines that cannot be read as a known kind."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

VERSION = 2
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Open(NamedTuple):
    """Event: a process opened its history file."""

    version: int  # the format version of the history
    torn: int = 0  # how many bytes of an unfinished last line were removed


class Commit(NamedTuple):
    """Event: the snapshot of `step` was committed: it is completely stored, and a restart may use it."""

    attempt: int
    step: int  # how many steps the snapshot includes; on a parameter server, how many iterations
    bytes: int  # the size of the snapshot
    seconds: float | None = None  # the time from the beginning of the save to its commit
    found: bool = False  # true if an earlier attempt committed the snapshot
    state: str | None = None  # a digest of the contents of the snapshot
    blocks: Sequence[int] = ()  # on a parameter server: the numbers of the saved blocks (parts of the model)
    stops: bool = False  # true if the script stopped the run at `step`

    @property
    def is_new(self) -> bool:
        """True for a save of trained values: not for the initial state, nor for a save that was found."""
        return self.step > 0 and not self.found


class Done(NamedTuple):
    """Event: a rank has trained all planned steps."""

    attempt: int
    step: int  # the number of all planned steps


class Other(NamedTuple):
    """An event of a kind that this version of holdfast does not know."""

    kind: str
    fields: Mapping[str, JSON]


class Malformed(NamedTuple):
    """An invalid event, with a missing field or a field of the wrong type; `why` and `line` are for messages."""

    kind: str
    fields: Mapping[str, JSON]
    why: str
    line: int | None = None
