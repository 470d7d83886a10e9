"""What nodes say when they meet: each greets, and the node that keeps the store answers with who starts. Plain JSON."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class Greeting(TypedDict):
    """What a node says when it has come for the next start."""

    node: int
    of: int  # how many nodes there are, as its user said
    who: str  # a name that this supervisor alone has: one that was started anew for the same node has another
    attempt: int  # the number that it would give the next attempt
    workers: int  # how many it starts
    term: int  # the term that it was in last; 0 if it has met nobody yet
    where: str  # it keeps a store of its own there, in which the others meet if the one at the endpoint is lost
    wrong: str | None  # why it cannot use the checkpoints
    command: Mapping[str, Any]  # what must be the same on all nodes


class Answer(TypedDict):
    """What closes a round: those that start, and with what; or why they cannot start together."""

    nodes: list[Greeting]
    host: int  # the node that says so
    refused: str | None
    # If nothing is refused:
    term: NotRequired[list[Any]]
    round: NotRequired[str]
    address: NotRequired[str]  # of the workers' store
    port: NotRequired[int]
