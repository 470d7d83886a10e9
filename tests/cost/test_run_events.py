"""The cost of a run is the same whether its steps are lines or were folded into segments."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fake_histories import FakeHistory, killed_once, write_history
from holdfast.cost.breakdown import cost_breakdown, cost_of
from holdfast.cost.run_events import read_events
from holdfast.cost.step_block import KnownSteps, StepBlock
from holdfast.events import Event, Regroup, Seconds, Step, Straggler
from holdfast.history.fold import fold
from holdfast.history.log import read_history


def long_run(ranks: int = 3, steps: int = 700) -> list[Event]:
    """Steps of random length on several ranks, with saves, a kill, and a report of the supervisor within a block."""
    rng = random.Random(5)
    run = FakeHistory(world=ranks)
    run.launches()
    for number in range(steps):
        run.trains(rng.random(), 1 + rng.random(), stall=rng.random() * (number % 7 == 0))
        for rank in range(1, ranks):
            run.reports(run.next_step - 1, Seconds(rng.random(), 2 * rng.random(), 0.0), rank)
        if number % 100 == 99:
            run.saves(snapshot=0.5, durable=0.25)
        if number == 350:
            run.supervisor(Straggler(1, 2, 300, 350, 1.5, 4.0))
        if number == 430:
            run.dies(injected="kill")
            run.restarts()
    run.saves(snapshot=0.5, durable=0.25)
    run.finishes()
    return run.events


def survived(steps: int = 300) -> list[Event]:
    """A loss of rank 0 whose last steps only rank 1 recorded; rank 1 then leads."""
    run = FakeHistory(world=2)
    run.launches()
    for number in range(2 * steps):
        run.passes("compute", 1.0)
        if number < steps - 3:
            run.reports(number, Seconds(0.0, 1.0, 0.0))
        run.reports(number, Seconds(0.0, 0.5, 0.0), rank=1)
        run.next_step = number + 1
        if number == steps - 4:
            run.commits()
        if number == steps:
            run.passes("recovery", 3.0)
            run.says("rank-1", Regroup(1, 1, steps + 1, "replay", (1,), lost=(0,), seconds=3.0))
    return run.events


def clock_back(steps: int = 300) -> list[Event]:
    run = FakeHistory()
    run.launches()
    for number in range(steps):
        run.trains()
        if number == 150:
            run.now -= 60
    run.saves(durable=0.5)
    run.finishes()
    return run.events


def written(folder: Path, events: Sequence[Event]) -> Path:
    """Write the history file of each process; return the folder."""
    return write_history(folder, {who: [e for e in events if e.who == who] for who in {e.who for e in events}})


def shown(value: object) -> object:
    """Return a JSON value with its numbers rounded: sums of a block have another order."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {name: shown(part) for name, part in value.items()}
    return [shown(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("make", [long_run, survived, clock_back, killed_once], ids=lambda make: make.__name__)
def test_folded_steps_cost_what_their_lines_cost(make: Callable[[], list[Event]], tmp_path: Path) -> None:
    history = written(tmp_path, make())
    lines = cost_breakdown(read_history(history).events).to_json()
    assert shown(cost_of(read_events(history)).to_json()) == shown(lines)
    assert fold(history, least=1, is_over=True)
    run = read_events(history)
    assert any(isinstance(item, StepBlock) for item in run.items)
    assert shown(json.loads(json.dumps(cost_of(run).to_json()))) == shown(json.loads(json.dumps(lines)))


def test_the_steps_of_other_ranks_are_not_kept(tmp_path: Path) -> None:
    run = read_events(written(tmp_path, long_run(ranks=5)))
    assert {event.who for event in run.events if isinstance(event.what, Step)} == {"rank-0"}


def test_a_long_folded_run_is_a_few_items(tmp_path: Path) -> None:
    history = written(tmp_path, long_run(steps=2000))
    while fold(history, least=1, is_over=True):
        pass
    steps = sum(item.steps for item in read_events(history).items if isinstance(item, StepBlock))
    assert steps > 1800
    assert sum(isinstance(item, StepBlock) for item in read_events(history).items) < 100


def test_known_steps_say_which_steps_are_new() -> None:
    known = KnownSteps()
    assert known.add(1, 10, 5) == [(0, 5)]
    assert known.add(1, 8, 10) == [(0, 2), (7, 10)]
    assert known.add(1, 9, 3) == []
    assert known.add(2, 9, 3) == [(0, 3)]
