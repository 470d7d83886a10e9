"""Saves, restarts and terms hold under every schedule of a simulated cluster, and planted errors are found."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.checkpoint import manifest, snapshot, terms
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Term
from holdfast.distributed.ranks import Ranks
from simulation.schedule import play

SCHEDULES = 100
WITHIN = 1000  # schedules, for a planted error


def test_a_seed_gives_the_same_schedule_again() -> None:
    first, again = play(12), play(12)
    assert (again.digest, again.trace) == (first.digest, first.trace)
    assert play(13).digest != first.digest


def test_no_schedule_loses_a_snapshot_or_commits_twice() -> None:
    for seed in range(SCHEDULES):
        outcome = play(seed)
        assert outcome.violations == (), f"python benchmarks/simulation/bench.py --replay {seed}"


def take_again(store: Store, term: Term) -> bool:
    store.put(terms._name(term.number), [b"[%d]" % term.number])
    return True


def count_own_vote_for_all(ranks: Ranks, topic: str, value: str) -> list[str] | None:
    return None if ranks.rank else [value] * ranks.size


def keep_only_the_newest(store: Store, count: int, *, trusted: int | None = None) -> list[int]:
    return manifest.steps(store)[:-1]


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a term is taken twice": (terms, "take", take_again, "belongs to the nodes"),
    "a commit does not wait for all votes": (Ranks, "gather", count_own_vote_for_all, "without all of its parts"),
    "retention removes too much": (snapshot, "outdated", keep_only_the_newest, "newer snapshots are good"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, message = PLANTED[planted]
    monkeypatch.setattr(owner, name, wrong)
    for seed in range(WITHIN):
        if any(message in violation for violation in play(seed).violations):
            return
    pytest.fail(f"{WITHIN} schedules did not show that {planted}")
