"""When nodes start without others, by what was heard of each."""

import pytest

from holdfast.supervise.nodes.quorum import Came, Heard, lost, present

LIMITS = {"of": 4, "least": 2, "lost_after": 10.0}
MEMBERS = {name: node for node, name in enumerate("abcd")}


def heard(last: dict[str, float]) -> Heard:
    """Each counted up once a second until so and so late."""
    found = Heard()
    for now in range(int(max(last.values())) + 1):
        found.note({who: min(now, int(until)) for who, until in last.items()}, float(now))
    return found


def came(names: str, *, has_met: bool = True) -> list[Came]:
    return [Came(MEMBERS[name], name, has_met) for name in names]


def test_all_nodes_start_at_once() -> None:
    everybody = came("abcd", has_met=False)
    assert present(everybody, {}, heard(dict.fromkeys("abcd", 0.0)), 0.0, **LIMITS) == everybody


@pytest.mark.parametrize(("names", "silent", "start"), [("ab", 9.0, False), ("ab", 10.0, True), ("a", 10.0, False)])
def test_a_part_starts_if_enough_are_left_and_the_others_are_silent(names: str, silent: float, start: bool) -> None:
    now = 20.0
    found = heard({who: now if who in names else now - silent for who in "abcd"})
    there = came(names)
    assert present(there, MEMBERS, found, now, **LIMITS) == (there if start else None)


def test_nodes_that_never_met_wait_for_all_others() -> None:
    assert present(came("abc", has_met=False), {}, heard(dict.fromkeys("abc", 99.0)), 99.0, **LIMITS) is None


def test_a_node_that_lives_is_waited_for_and_one_that_was_lost_before_is_not() -> None:
    found = heard(dict.fromkeys("abc", 50.0))
    assert present(came("ab"), {"a": 0, "b": 1, "c": 2}, found, 50.0, **LIMITS) is None
    assert present(came("abc"), {"a": 0, "b": 1, "c": 2}, found, 50.0, **LIMITS) == came("abc")


def test_whoever_came_and_fell_silent_is_not_counted() -> None:
    found = heard({"a": 50.0, "b": 50.0, "c": 30.0, "d": 30.0})
    assert present(came("abcd"), MEMBERS, found, 50.0, **LIMITS) == came("ab")


def test_a_node_that_starts_again_is_not_mistaken_for_two() -> None:
    again = [*came("abcd"), Came(3, "D", False)]
    for silent in (0.0, 1.0, 2.0, 9.0):
        found = heard(dict.fromkeys("abcD", 50.0) | {"d": 50.0 - silent})
        assert (present(again, MEMBERS, found, 50.0, **LIMITS) is None) == (silent >= 2.0)
    found = heard(dict.fromkeys("abcD", 50.0) | {"d": 40.0})
    assert present(again, MEMBERS, found, 50.0, **LIMITS) == [*came("abc"), Came(3, "D", False)]


def test_nodes_are_lost_that_were_not_heard_of_for_too_long() -> None:
    assert lost(MEMBERS, heard({"a": 50.0, "b": 50.0, "c": 40.0, "d": 41.0}), 10.0, 50.0) == [2]


def test_a_pause_of_our_own_is_nobodys_silence() -> None:
    found = heard(dict.fromkeys("ab", 50.0) | {"c": 45.0})
    found.note({"a": 50, "b": 50, "c": 45}, 80.0)  # we were stopped, and what they said meanwhile has yet to come
    assert lost(MEMBERS, found, 10.0, 80.0) == []
    for now in range(81, 86):
        found.note({"a": now, "b": now, "c": 45}, float(now))
    assert lost({"a": 0, "b": 1, "c": 2}, found, 10.0, 85.0) == [2]
