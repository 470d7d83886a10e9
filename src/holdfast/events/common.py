"""Events of every kind of run, and stand-ins for lines that cannot be read as a known kind."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

VERSION = 2
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Open(NamedTuple):
    """A writer opened its file, in format `version`, and cut off `torn` bytes of an unfinished line."""

    version: int
    torn: int = 0


class Commit(NamedTuple):
    """The snapshot of a step was committed; if `found`, before this attempt. `state` is a digest of its contents.

    It `stops` if the script stopped the run at this step. On the parameter server, `blocks` were saved to the running
    checkpoint as they were after iteration `step`.
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
    """A rank trained its plan to the end."""

    attempt: int
    step: int


class Other(NamedTuple):
    """An event of a kind that this holdfast does not know."""

    kind: str
    fields: Mapping[str, JSON]


class Malformed(NamedTuple):
    """An event with a missing field or a field of the wrong type, and the line of its file."""

    kind: str
    fields: Mapping[str, JSON]
    why: str
    line: int | None = None
