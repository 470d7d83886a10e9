"""Terms: numbered groups of nodes of a run; only the newest group may commit to the store.

When nodes are lost, the other nodes continue as the next term. If the network splits the nodes into two groups, only
one group can create the next term in the store. The nodes of the other group find the newer term and stop writing.
Meanwhile both groups may start workers. So each start also claims the number of its attempt in the store.
"""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from holdfast.checkpoint.store import Reader, Store, read
from holdfast.errors import CommitConflict, Corrupt, WorkerLost

TERMS = "nodes/term-"
ATTEMPTS = "nodes/attempt-"


class Term(NamedTuple):
    """A group of nodes that train together, with a number that grows with every change of the group.

    `where` is the rendezvous address, and `token` a unique id."""

    number: int
    token: str
    where: str
    nodes: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.number, self.token, self.where, list(self.nodes)]

    @classmethod
    def from_json(cls, record: Any) -> "Term":
        try:
            number, token, where, nodes = record
        except TypeError as error:
            raise ValueError(str(error)) from error
        whole = isinstance(nodes, list) and all(type(value) is int for value in (number, *nodes))
        if not (whole and isinstance(token, str) and isinstance(where, str)):
            raise ValueError("it is not a term")
        return cls(number, token, where, tuple(nodes))


def newest(store: Store) -> Term | None:
    """Return the newest group of nodes that claimed the right to save, or None if there is none."""
    number = _last(store)
    if not number:
        return None
    try:
        return Term.from_json(json.loads(read(store, _name(number), limit=1 << 16)))
    except FileNotFoundError:
        return None  # removed meanwhile
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{_name(number)} in {store} does not name the nodes of its term: remove it.") from error


def take(store: Store, term: Term) -> bool:
    """Claim the right to save for the group of nodes `term`, by creating a file for it in the store.

    Return False if another group with the same number or a higher one has already claimed the right."""
    if _last(store) >= term.number:
        return newest(store) == term
    try:
        store.create(_name(term.number), [json.dumps(term.to_json()).encode()])
    except CommitConflict:
        return newest(store) == term  # a client that lost the answer to its first attempt finds its own claim
    return True


def give_back(store: Store, number: int, attempt: int) -> None:
    """Remove the files that claim the term `number` and the attempt number `attempt`, because the nodes did not start."""
    store.remove(_name(attempt, ATTEMPTS))
    store.remove(_name(number))


def take_attempt(store: Store, number: int) -> int:
    """Claim a number for the next attempt, by creating a file for it in the store, and return it.

    This is `number`, or the number after the last claimed one if that is higher. No other group of nodes gets it."""
    number = max(number, _last(store, ATTEMPTS) + 1)
    while True:
        try:
            store.create(_name(number, ATTEMPTS), [b"%d\n" % number])
        except CommitConflict:
            number += 1  # another group has claimed it; or a client that lost the answer to its own claim
        else:
            return number


class Fenced:
    """A wrapper of a store that raises WorkerLost from writes once a newer group of nodes has taken over.

    `number` is the term (the group of nodes) of this node. `is_ours(term)` returns True if this node belongs to the
    newer group `term`."""

    def __init__(self, store: Store, number: int, is_ours: Callable[[Term], bool] = lambda _: False) -> None:
        self._store, self._number, self._is_ours = store, number, is_ours
        self.term = number  # all ranks of an attempt save in the same folder, whenever they learn of a newer term

    def __str__(self) -> str:
        return str(self._store)

    def owns(self, term: int) -> bool:
        return term == self.term == self._number

    def require_present(self) -> None:
        """Raise WorkerLost if a newer group of nodes, to which this node does not belong, has claimed the right to save."""
        if _last(self._store) <= self._number:
            return
        term = newest(self._store)
        if term and term.number > self._number:
            if not self._is_ours(term):
                terms = f"term {term.number}, this node has term {self._number}"
                raise WorkerLost(f"other nodes continued without this node ({terms}): it stops saving.")
            self._number = term.number

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self.require_present()
        self._store.put(name, parts)

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        # A newer term may appear after this look: `manifest.clear_uncommitted` sees to it that nothing breaks then.
        self.require_present()
        self._store.create(name, parts)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self._store.open(name)

    def names(self, prefix: str = "") -> list[str]:
        return self._store.names(prefix)

    def remove(self, name: str) -> None:
        self.require_present()
        self._store.remove(name)

    def move(self, folder: str, to: str) -> None:
        self.require_present()
        self._store.move(folder, to)

    def sweep(self, prefix: str) -> None:
        self.require_present()
        self._store.sweep(prefix)


def _last(store: Store, prefix: str = TERMS) -> int:
    matches = (re.fullmatch(r"\d{8}", name.removeprefix(prefix), re.ASCII) for name in store.names(prefix))
    return max((int(match[0]) for match in matches if match), default=0)


def _name(number: int, prefix: str = TERMS) -> str:
    return f"{prefix}{number:08d}"
