"""Of several parts of a run, one goes on; the others find out and write no more."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.checkpoint import terms
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.errors import Corrupt, WorkerLost

FIRST = Term(1, "a", "node0:29400", (0, 1, 2, 3))
LEFT = Term(2, "b", "node0:29400", (0, 1))
RIGHT = Term(2, "c", "node2:4000", (2, 3))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path)
    assert terms.take(store, FIRST)
    return store


def test_of_two_halves_one_goes_on(store: DirectoryStore) -> None:
    assert terms.take(store, RIGHT)
    assert not terms.take(store, LEFT)
    assert terms.newest(store) == RIGHT


def test_a_claim_that_is_repeated_because_its_answer_was_lost_succeeds(store: DirectoryStore) -> None:
    class Repeated(DirectoryStore):
        def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
            value = [*parts]
            super().create(name, value)
            super().create(name, value)

    assert terms.take(Repeated(store.path), RIGHT)
    assert terms.take(store, RIGHT)
    assert not terms.take(store, LEFT)


def test_whoever_was_left_behind_never_catches_up(store: DirectoryStore) -> None:
    assert terms.take(store, RIGHT)
    assert terms.take(store, Term(4, "d", "node3:4000", (3,)))
    terms.give_back(store, 2, terms.take_attempt(store, 2))
    assert not terms.take(store, LEFT)


def test_nothing_is_committed_or_cleared_away_by_those_that_were_left_behind(store: DirectoryStore) -> None:
    fenced = Fenced(store, 1)
    fenced.create("one", [b"1"])
    assert terms.take(store, RIGHT)
    for write in (
        lambda: fenced.create("two", [b"2"]),
        lambda: fenced.put("two", [b"2"]),
        lambda: fenced.sweep("step-"),
        lambda: fenced.remove("one"),
        lambda: fenced.move("one", "two"),
    ):
        with pytest.raises(WorkerLost, match="other nodes continued without this node"):
            write()
    assert "one" in store.names()
    assert "two" not in store.names()
    Fenced(store, 2).create("two", [b"2"])


@pytest.mark.parametrize("text", [b"", b"[]", b"[1, 2]", b'[2, "a", "b", 3]', b'{"number": 2}', b"\xff"])
def test_a_record_that_says_nothing_is_one_clear_line(store: DirectoryStore, text: bytes) -> None:
    store.put("nodes/term-00000002", [text])
    with pytest.raises(Corrupt, match="does not name the nodes of its term"):
        terms.newest(store)


def test_no_two_starts_get_the_same_attempt_number(store: DirectoryStore) -> None:
    assert terms.take_attempt(store, 3) == 3
    assert terms.take_attempt(store, 3) == 4  # by other nodes, which have not heard of attempt 3
    assert terms.take_attempt(store, 2) == 5  # not 2: attempts begin in the order of their numbers
    assert terms.take_attempt(store, 9) == 9


def test_a_number_that_was_claimed_during_the_look_for_a_free_one_is_left_to_its_owner(store: DirectoryStore) -> None:
    class Late(DirectoryStore):
        def names(self, prefix: str = "") -> list[str]:
            before = super().names(prefix)
            terms.take_attempt(store, 3)
            return before

    assert terms.take_attempt(Late(store.path), 3) == 4


def test_nodes_that_refuse_to_start_leave_no_claim(store: DirectoryStore) -> None:
    terms.give_back(store, 1, terms.take_attempt(store, 1))
    assert store.names() == []


def test_attempts_are_no_terms(store: DirectoryStore) -> None:
    terms.take_attempt(store, 7)
    assert terms.newest(store) == FIRST
