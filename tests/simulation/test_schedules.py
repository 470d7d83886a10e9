"""Saves, restarts and terms hold under every schedule of a simulated cluster, and planted errors are found."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.checkpoint import manifest, snapshot, terms
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.distributed.ranks import Ranks
from holdfast.live import recovery
from holdfast.live.settlement import RecoveryPlan, make_plan
from holdfast.supervise.nodes.rendezvous import Peers
from simulation.kinds import play_any
from simulation.live import play_live
from simulation.schedule import Outcome, play

SCHEDULES = 80
WITHIN = 1000  # schedules, for a planted error


@pytest.mark.parametrize("seed", [12, 13])
def test_a_seed_gives_the_same_schedule_again(seed: int) -> None:
    first, again = play_any(seed), play_any(seed)
    assert (again.digest, again.trace) == (first.digest, first.trace)
    assert play_any(seed + 2).digest != first.digest


def test_in_no_schedule_is_anything_lost_or_stuck() -> None:
    for seed in range(SCHEDULES):
        outcome = play_any(seed)
        assert outcome.violations == (), f"python benchmarks/simulation/bench.py --replay {seed}"


@pytest.mark.parametrize("seed", [2013783, 1000659, 60015091, 48, 1160, 2612])
def test_a_schedule_that_showed_a_defect_shows_none_now(seed: int) -> None:
    assert play_any(seed).violations == ()


def take_again(store: Store, term: Term) -> bool:
    store.put(terms._name(term.number), [json.dumps(term.to_json()).encode()])
    return True


def count_own_vote_for_all(ranks: Ranks, topic: str, value: str) -> list[str] | None:
    return None if ranks.rank else [value] * ranks.size


def keep_only_the_newest(store: Store, count: int, *, trusted: int | None = None) -> list[int]:
    return manifest.steps(store)[:-1]


def leave_behind(reports: Any, asleep: tuple[int, ...] = ()) -> RecoveryPlan | str:
    plan = make_plan(reports, asleep)
    return plan if isinstance(plan, str) else replace(plan, behind=())


PLANTED: dict[str, tuple[Callable[[int], Outcome], Any, str, Callable[..., Any], str]] = {
    "a term is taken twice": (play, terms, "take", take_again, "belongs to the nodes"),
    "a commit does not wait for all votes": (play, Ranks, "gather", count_own_vote_for_all, "without all of its parts"),
    "a writer does not look for newer terms": (
        play,
        Fenced,
        "require_present",
        lambda self: None,
        "without all of its parts",
    ),
    "retention removes too much": (play, snapshot, "outdated", keep_only_the_newest, "newer snapshots are good"),
    "a membership is lost": (
        play_live,
        Peers,
        "publish",
        lambda self, membership: None,
        "neither finished nor given up",
    ),
    "a survivor that is behind is left there": (play_live, recovery, "make_plan", leave_behind, "has another state"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play_one, owner, name, wrong, message = PLANTED[planted]
    monkeypatch.setattr(owner, name, wrong)
    for seed in range(WITHIN):
        if any(message in violation for violation in play_one(seed).violations):
            return
    pytest.fail(f"{WITHIN} schedules did not show that {planted}")


RARE = {
    "parts are removed of a save that may still be committed": (
        571,
        "_close",
        lambda store, step, term: True,
        "without all of its parts",
    ),
    "an older term commits after a newer one has chosen the snapshot to restore": (
        50604,
        "close_unfinished",
        lambda store: None,
        "though step 3 was committed",
    ),
}


@pytest.mark.parametrize("planted", RARE)
def test_a_planted_error_is_found_in_the_schedule_that_shows_it(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, name, wrong, message = RARE[planted]
    monkeypatch.setattr(manifest, name, wrong)
    assert any(message in violation for violation in play(seed).violations)
