"""Whether the audit can be fooled about the end of a run: one that was stopped, and one that was made longer."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from fake_runs import changed, extended, is_a, preempted, stopped
from fake_two_ranks import TwoRankRun
from holdfast.audit.verdicts import audit
from holdfast.events import Commit, Done, Event, Plan, Preempted, Stopped
from seeds import seeds

SEEDS = seeds(40)


def verdict(events: list[Event]) -> str:
    order = ("pass", "unknown", "fail")
    return max((each.verdict for each in audit(events)), key=order.index)


def told(events: list[Event]) -> str:
    return next(each.because for each in audit(events) if each.check == "reached_the_end")


def put(events: list[Event], which: Callable[[Event], bool], make: Callable[[Any], Any]) -> list[Event]:
    assert any(map(which, events))
    return [each._replace(what=make(each.what)) if which(each) else each for each in events]


def first(events: list[Event], which: Callable[[Event], bool]) -> Callable[[Event], bool]:
    found = next(event for event in events if which(event))
    return lambda event: event is found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_its_script_stops_passes(seed: int) -> None:
    run = stopped(random.Random(seed))
    assert verdict(run.events) == "pass"
    assert told(run.events).startswith("stopped by the script at step ")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_is_extended_passes(seed: int) -> None:
    assert verdict(extended(random.Random(seed), stops=seed % 2 == 1).events) == "pass"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stop_that_was_not_is_caught(seed: int) -> None:
    run = stopped(random.Random(seed))
    events = run.events
    stops = [each.what for each in events if isinstance(each.what, Stopped)]
    one = first(events, is_a(Stopped))
    forged = [
        put(events, is_a(Stopped), lambda what: Done(what.attempt, what.step)),
        put(events, is_a(Stopped), lambda what: what._replace(step=what.step + 1)),
    ]
    if len(stops) > 1:
        forged += [
            [each for each in events if not one(each)],
            put(events, one, lambda what: Preempted(what.attempt, what.step)),
        ]
    if not stops[0].left:
        forged.append(
            put(events, is_a(Commit, step=stops[0].step, stops=True), lambda what: what._replace(stops=False))
        )
    assert [number for number, each in enumerate(forged) if verdict(each) == "pass"] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_continues_after_its_script_stopped_it_fails(seed: int) -> None:
    assert verdict(stopped(random.Random(seed), goes_on=True).events) == "fail"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_preemption_that_is_called_a_stop_is_caught(seed: int) -> None:
    """What was saved then says nothing of a stop; of a script that leaves its loop, it need not."""
    events = preempted(random.Random(seed)).events
    assert verdict(put(events, is_a(Preempted), lambda what: Stopped(what.attempt, what.step))) != "pass"


def test_a_rank_whose_history_of_the_last_attempt_is_absent_is_named_as_not_done() -> None:
    run = TwoRankRun().trains(1, None, 20).saves(1, 20).trains(2, 20, 20)
    run.says(0, Done(2, 20))
    run.events = [each for each in run.events if each.who == "rank-0" or getattr(each.what, "attempt", 1) == 1]
    assert run.found("reached_the_end") == (
        "unknown",
        "all 20 steps were trained and committed, but not every rank was done: rank-1 was not",
    )


def test_a_stop_without_a_mark_in_its_snapshot_fails() -> None:
    run = TwoRankRun().trains(1, None, 17).stops(1, 17)
    run.events = changed(run.events, is_a(Commit, step=17), stops=False)
    assert run.found("reached_the_end") == (
        "fail",
        "rank-0 says that its script stopped the run at step 17 in attempt 1, but the snapshot that was saved there has "
        "no mark of a stop",
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_that_shrinks_or_grows_without_extending_fails(seed: int) -> None:
    run = extended(random.Random(seed))
    events = run.events
    number = max(each.what.attempt for each in events if isinstance(each.what, Plan))
    forged = [
        changed(events, is_a(Plan, extends=True), extends=False),
        changed(events, is_a(Plan, extends=False), epochs=3),
        changed(events, is_a(Plan, attempt=number), epochs=1),
        changed(events, first(events, is_a(Plan, attempt=number)), epochs=3),
        changed(events, is_a(Done, attempt=1), step=20),
    ]
    assert [place for place, each in enumerate(forged) if verdict(each) == "pass"] == []
