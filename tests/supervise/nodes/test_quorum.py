"""Nodes start without others if these were silent for too long."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.checkpoint import terms
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, StorageFailed
from holdfast.supervise.nodes import close_round
from holdfast.supervise.nodes.close_round import Arrival, Heartbeats, RoundCloser, silent_nodes, starting
from holdfast.supervise.nodes.rendezvous import Node, Peers

LIMITS = {"of": 4, "least": 2, "lost_after": 10.0}
MEMBERS = {name: node for node, name in enumerate("abcd")}


def heartbeats(last: dict[str, float]) -> Heartbeats:
    """Return the heartbeats of supervisors that count up once a second until the time in `last`."""
    beats = Heartbeats()
    for now in range(int(max(last.values())) + 1):
        beats.update({who: min(now, int(until)) for who, until in last.items()}, float(now))
    return beats


def arrivals(names: str, *, has_met: bool = True) -> list[Arrival]:
    return [Arrival(MEMBERS[name], name, has_met) for name in names]


def test_all_nodes_start_at_once() -> None:
    all_nodes = arrivals("abcd", has_met=False)
    assert starting(all_nodes, {}, heartbeats(dict.fromkeys("abcd", 0.0)), 0.0, **LIMITS) == all_nodes


@pytest.mark.parametrize(("names", "silent", "start"), [("ab", 9.0, False), ("ab", 10.0, True), ("a", 10.0, False)])
def test_a_part_starts_if_enough_are_left_and_the_others_are_silent(names: str, silent: float, start: bool) -> None:
    now = 20.0
    beats = heartbeats({who: now if who in names else now - silent for who in "abcd"})
    there = arrivals(names)
    assert starting(there, MEMBERS, beats, now, **LIMITS) == (there if start else None)


def test_nodes_that_never_met_wait_for_all_others() -> None:
    assert starting(arrivals("abc", has_met=False), {}, heartbeats(dict.fromkeys("abc", 99.0)), 99.0, **LIMITS) is None


def test_a_live_node_is_waited_for_but_not_one_that_was_lost_before() -> None:
    beats = heartbeats(dict.fromkeys("abc", 50.0))
    assert starting(arrivals("ab"), {"a": 0, "b": 1, "c": 2}, beats, 50.0, **LIMITS) is None
    assert starting(arrivals("abc"), {"a": 0, "b": 1, "c": 2}, beats, 50.0, **LIMITS) == arrivals("abc")


def test_a_node_that_came_and_fell_silent_does_not_count() -> None:
    beats = heartbeats({"a": 50.0, "b": 50.0, "c": 30.0, "d": 30.0})
    assert starting(arrivals("abcd"), MEMBERS, beats, 50.0, **LIMITS) == arrivals("ab")


def test_a_node_that_starts_again_does_not_count_twice() -> None:
    again = [*arrivals("abcd"), Arrival(3, "D", False)]
    for silent in (0.0, 1.0, 2.0, 9.0):
        beats = heartbeats(dict.fromkeys("abcD", 50.0) | {"d": 50.0 - silent})
        assert (starting(again, MEMBERS, beats, 50.0, **LIMITS) is None) == (silent >= 2.0)
    beats = heartbeats(dict.fromkeys("abcD", 50.0) | {"d": 40.0})
    assert starting(again, MEMBERS, beats, 50.0, **LIMITS) == [*arrivals("abc"), Arrival(3, "D", False)]


def test_a_node_that_was_silent_for_too_long_is_lost() -> None:
    assert silent_nodes(MEMBERS, heartbeats({"a": 50.0, "b": 50.0, "c": 40.0, "d": 41.0}), 10.0, 50.0) == [2]


def test_a_pause_of_our_own_does_not_count_as_silence() -> None:
    beats = heartbeats(dict.fromkeys("ab", 50.0) | {"c": 45.0})
    beats.update({"a": 50, "b": 50, "c": 45}, 80.0)  # we were suspended, and have yet to read their heartbeats
    assert silent_nodes(MEMBERS, beats, 10.0, 80.0) == []
    for now in range(81, 86):
        beats.update({"a": now, "b": now, "c": 45}, float(now))
    assert silent_nodes({"a": 0, "b": 1, "c": 2}, beats, 10.0, 85.0) == [2]


def test_a_host_that_was_silent_in_its_own_store_is_not_waited_for_again_in_another() -> None:
    beats = Heartbeats()
    beats.expect_silence("a", since=90.0)
    beats.update({"a": 0, "b": 3}, 100.0)
    assert silent_nodes({"a": 0, "b": 1}, beats, 10.0, 100.0) == [0]
    beats.update({"a": 1, "b": 4}, 101.0)
    assert silent_nodes({"a": 0, "b": 1}, beats, 10.0, 101.0) == []


def test_a_machine_without_a_network_claims_no_term_which_the_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(SimpleNamespace):
        rank, of, least, lost_after = 1, 2, 1, 10.0

        @property
        def address(self) -> str:
            raise BadInput("cannot reach --rendezvous")

    def take(term: object) -> bool:
        raise AssertionError("it claimed a term")

    greeting = {"node": 1, "of": 2, "who": "b", "term": 1, "command": {}, "wrong": None}
    monkeypatch.setattr(close_round, "read_greetings", lambda *_: [greeting])
    monkeypatch.setattr(close_round, "heartbeats", lambda *_: {"a": 0, "b": 1})
    closer = RoundCloser(cast(Any, Cut()), "10.0.0.2:1", cast(Any, SimpleNamespace(take=take)))
    peers, heard = Peers(), Heartbeats()
    peers.members = {"a": 0, "b": 1}
    heard.expect_silence("a", since=-1e9)
    connection = cast(Any, SimpleNamespace(ask=lambda question: question(None)))
    closer.close_when_due(2, connection, peers, heard)
    assert closer.server is None


def test_nodes_continue_after_a_claim_whose_answer_was_lost(tmp_path: Path) -> None:
    class Answers:
        """The terms in a checkpoint store, whose answer to the first claim is lost."""

        lost = 1

        def term(self) -> Term | None:
            return terms.newest(store)

        def take(self, term: Term) -> bool:
            is_taken = terms.take(store, term)
            self.lost -= 1
            if self.lost >= 0:
                raise StorageFailed("it did not answer")
            return is_taken

    store = DirectoryStore(tmp_path)
    node = Node(rank=1, of=2, endpoint="node0:29400")
    closer = RoundCloser(node, "10.0.0.2:1", cast(Any, Answers()))
    with pytest.raises(StorageFailed):
        closer.claim(2, (1,))
    greeting = cast(Any, {"node": 1, "who": "b", "term": 1})
    assert cast(Any, closer._take_term([greeting], Peers())).number == 3
    other = RoundCloser(node, "10.0.0.1:1", cast(Any, SimpleNamespace(take=lambda term: terms.take(store, term))))
    assert other._take_term([greeting], Peers()) is None


def test_nodes_continue_after_two_claims_of_which_only_the_first_took_effect(tmp_path: Path) -> None:
    class Answers:
        """The terms in a checkpoint store, which does not take the second claim."""

        claims = 0

        def term(self) -> Term | None:
            return terms.newest(store)

        def take(self, term: Term) -> bool:
            self.claims += 1
            if self.claims == 2:
                raise StorageFailed("the storage is away")
            return terms.take(store, term)

    store = DirectoryStore(tmp_path)
    closer = RoundCloser(Node(rank=1, of=2, endpoint="node0:29400"), "10.0.0.2:1", cast(Any, Answers()))
    greeting = cast(Any, {"node": 1, "who": "b", "term": 1})
    assert cast(Any, closer._take_term([greeting], Peers())).number == 2  # and the nodes change before they hear of it
    with pytest.raises(StorageFailed):
        closer._take_term([greeting], Peers())
    assert cast(Any, closer._take_term([greeting], Peers())).number == 3


def test_nodes_that_are_together_again_follow_a_claim_that_took_effect_late(tmp_path: Path) -> None:
    class Slow:
        """The terms in a checkpoint store, which takes the first claim, but not in time."""

        is_slow = True

        def term(self) -> Term | None:
            return terms.newest(store)

        def take(self, term: Term) -> bool:
            is_taken = terms.take(store, term)
            if self.is_slow:
                self.is_slow = False
                raise StorageFailed("it did not answer")
            return is_taken

    store, own = DirectoryStore(tmp_path), "10.0.0.1:1"
    closer = RoundCloser(Node(rank=0, of=2, endpoint="node0:29400"), own, cast(Any, Slow()))
    both = cast(Any, [{"node": 0, "who": "a", "term": 1}, {"node": 1, "who": "b", "term": 1}])
    last = Peers()
    last.term, last.members = Term(1, "token", own, (0, 1)), {"a": 0, "b": 1}
    terms.take(store, last.term)
    assert closer._take_term(both, last) == last.term
    with pytest.raises(StorageFailed):
        closer._take_term(both[:1], last)  # node 1 is silent, and comes back before the store answers
    assert cast(Any, closer._take_term(both, last)).number == 3  # in term 1 their workers could no longer save


def test_a_host_that_was_frozen_does_not_start_in_a_term_that_the_other_nodes_have_left(tmp_path: Path) -> None:
    store, own = DirectoryStore(tmp_path), "10.0.0.1:1"
    checkpoints = cast(Any, SimpleNamespace(term=lambda: terms.newest(store)))
    closer = RoundCloser(Node(rank=0, of=2, endpoint="node0:29400"), own, checkpoints)
    both = cast(Any, [{"node": 0, "who": "a", "term": 1}, {"node": 1, "who": "b", "term": 1}])
    last = Peers()
    last.term, last.members = Term(1, "token", own, (0, 1)), {"a": 0, "b": 1}
    terms.take(store, last.term)
    assert closer._take_term(both, last) == last.term
    terms.take(store, Term(2, "other", "10.0.0.2:1", (1,)))  # node 1 came before the freeze, and continued meanwhile
    assert closer._take_term(both, last) is None


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (["--out", "a0.pt"], ["--out", "a1.pt"], "the script's argument --out (a0.pt on node 0, a1.pt on node 1)"),
        (["small"], [], "the script's argument 1 (small on node 0, nothing on node 1)"),
        (["-a", "-b"], ["-b", "-a"], "args"),
    ],
)
def test_nodes_whose_commands_differ_are_refused_with_the_argument(
    first: list[str], second: list[str], difference: str
) -> None:
    nodes = [
        {"node": node, "of": 2, "who": str(node), "term": 0, "command": {"args": args}, "wrong": None}
        for node, args in enumerate((first, second))
    ]
    why = close_round.refusal(cast(Any, nodes), 2)
    assert why == f"the nodes that met differ in {difference}: give the same command on each."
