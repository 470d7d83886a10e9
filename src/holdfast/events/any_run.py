"""Events of every kind of run, and stand-ins for lines that cannot be read as a known kind."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

VERSION = 2
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Open(NamedTuple):
    """Event: a writer opened its history file in format `version`, and cut `torn` bytes of an unfinished line."""

    version: int
    torn: int = 0


class Commit(NamedTuple):
    """Event: the snapshot of `step` was committed; `state` is a digest of its contents.

    `found` is True if an earlier attempt committed it, and `stops` if the script stopped the run at this step. On the
    parameter server, `blocks` (parts of the model) were saved as they were after iteration `step`.
    """

    attempt: int
    step: int
    bytes: int
    seconds: float | None = None
    found: bool = False
    state: str | None = None
    blocks: Sequence[int] = ()
    stops: bool = False


class Done(NamedTuple):
    """Event: a rank has trained all planned steps; `step` is their number."""

    attempt: int
    step: int


class Other(NamedTuple):
    """An event of a kind that this version of holdfast does not know."""

    kind: str
    fields: Mapping[str, JSON]


class Malformed(NamedTuple):
    """An event with a missing field or a field of the wrong type, the reason, and its line number."""

    kind: str
    fields: Mapping[str, JSON]
    why: str
    line: int | None = None
