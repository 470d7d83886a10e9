"""Events of every run, and what stands for lines of a history that cannot be read as one of the known kinds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

VERSION = 2
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


class Open(NamedTuple):
    """A writer has opened its file: the format it writes, and how many bytes of a torn line it cut off."""

    version: int
    torn: int = 0


class Commit(NamedTuple):
    """The snapshot of a step exists; if `found`, since before this attempt. `state` is a digest of what it holds.

    It `stops` where the script has stopped the run there. Of a served run these blocks are in the running checkpoint as
    they were after so many iterations.
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
    """A rank has nothing left to train."""

    attempt: int
    step: int


class Other(NamedTuple):
    """An event of a kind that this holdfast does not know."""

    kind: str
    fields: Mapping[str, JSON]


class Malformed(NamedTuple):
    """An event that lacks something that its kind must say, or says it in another form; in which line of its file."""

    kind: str
    fields: Mapping[str, JSON]
    why: str
    line: int | None = None
