"""Events of every kind of run, and stand-ins for lines that cannot be read as a known kind."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

VERSION = 2
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Open(NamedTuple):
    """Event: a process opened its history file in format `version`, and removed an unfinished line of `torn` bytes."""

    version: int
    torn: int = 0


class Commit(NamedTuple):
    """Event: the snapshot of `step` was committed: it is completely stored, and a restart may use it."""

    attempt: int
    step: int
    bytes: int
    seconds: float | None = None
    found: bool = False  # an earlier attempt committed it
    state: str | None = None  # a digest of its contents
    blocks: Sequence[int] = ()  # on a parameter server: the saved parts of the model, as after iteration `step`
    stops: bool = False  # the script stopped the run at `step`


class Done(NamedTuple):
    """Event: a rank has trained all planned steps; `step` is the number of these steps."""

    attempt: int
    step: int


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
