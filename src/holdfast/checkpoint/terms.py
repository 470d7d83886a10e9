"""Which nodes of a run may write to its store: numbered terms, each taken by one part of the nodes and by no other.

Nodes that have lost others go on without them only as the term after the one that they were in. Of two parts that do
not reach each other, but both reach the store, one takes it: a name is created once. Whoever was left behind finds a
newer term there, and writes no more.
"""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from holdfast.checkpoint.store import Reader, Store, read
from holdfast.errors import CommitConflict, Corrupt, WorkerLost

TERMS = "nodes/term-"
_NAME = re.compile(rf"{TERMS}(\d{{8}})", re.ASCII)
_LONGEST = 1 << 16  # bytes that a record of one may have


class Term(NamedTuple):
    """One part of the nodes: its number, a token that no other has, where its nodes meet, and which nodes they are."""

    number: int
    token: str
    where: str
    nodes: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.number, self.token, self.where, list(self.nodes)]

    @classmethod
    def from_json(cls, said: Any) -> "Term":
        """The inverse; ValueError for anything else."""
        try:
            number, token, where, nodes = said
        except TypeError as error:
            raise ValueError(str(error)) from error
        whole = all(type(each) is int for each in (number, *nodes)) if isinstance(nodes, list) else False
        if not (whole and isinstance(token, str) and isinstance(where, str)):
            raise ValueError("it is no term")
        return cls(number, token, where, tuple(nodes))


def newest(store: Store) -> Term | None:
    """The term that was taken last."""
    number = _last(store)
    if not number:
        return None
    try:
        return Term.from_json(json.loads(read(store, _name(number), _LONGEST)))
    except FileNotFoundError:
        return None  # it was given back as we looked
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{_name(number)} in {store} says nothing of which nodes go on: remove it") from error


def take(store: Store, term: Term) -> bool:
    """Take a term; not if it, or a later one, was taken."""
    if _last(store) >= term.number:
        return False
    try:
        store.create(_name(term.number), [json.dumps(term.to_json()).encode()])
    except CommitConflict:
        return False
    return True


def give_back(store: Store, number: int) -> None:
    """Remove a term as which nobody has started."""
    store.remove(_name(number))


class Fenced:
    """A store to which nothing is committed, and in which nothing is cleared away, once there is a newer term.

    `is_ours` says of a newer term whether this process belongs to it: it goes on while others were lost.

    Between this look and the commit a newer term may still come: such a snapshot is whole, and one of this run.
    """

    def __init__(self, store: Store, number: int, is_ours: Callable[[Term], bool] = lambda _: False) -> None:
        self._store, self._number, self._is_ours = store, number, is_ours

    def __str__(self) -> str:
        return str(self._store)

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self._store.put(name, parts)

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self._require_present()
        self._store.create(name, parts)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self._store.open(name)

    def names(self, prefix: str = "") -> list[str]:
        return self._store.names(prefix)

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def move(self, folder: str, to: str) -> None:
        self._store.move(folder, to)

    def sweep(self, prefix: str) -> None:
        self._require_present()  # a save begins with it
        self._store.sweep(prefix)

    def _require_present(self) -> None:
        if _last(self._store) <= self._number:
            return
        term = newest(self._store)
        if term and term.number > self._number:
            if not self._is_ours(term):
                raise WorkerLost(
                    f"other nodes went on without this one (term {term.number}, and this is {self._number}): "
                    "it saves no more"
                )
            self._number = term.number


def _last(store: Store) -> int:
    found = (_NAME.fullmatch(name) for name in store.names(TERMS))
    return max((int(each[1]) for each in found if each), default=0)


def _name(number: int) -> str:
    return f"{TERMS}{number:08d}"
