"""What a run cost: every second has one cause, whatever struck the run, and however its history was cut and shuffled."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_histories import FakeHistory, detected, write_history
from holdfast.cost.breakdown import CAUSES, CostBreakdown, cost_breakdown
from holdfast.errors import BadInput
from holdfast.events import Attempt as Began
from holdfast.events import (
    Commit,
    Detect,
    Done,
    Event,
    Judged,
    Launch,
    Malformed,
    Open,
    Preempt,
    Recover,
    Regroup,
    Restart,
    Seconds,
    Step,
    Straggler,
    Strike,
)
from holdfast.history.log import read_history
from holdfast.stall import Stall

NEAR = 1e-4  # seconds since 1970 leave a float no more than this


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=NEAR)


def causes(result: CostBreakdown) -> dict[str, float]:
    """The causes that took any time at all."""
    return {cause: seconds for cause, seconds in result.seconds.items() if abs(seconds) > NEAR}


def assert_adds_up(result: CostBreakdown) -> None:
    assert sum(result.seconds.values()) == near(result.wall)
    assert sum(attempt.wall for attempt in result.attempts) == near(result.wall)
    for attempt in result.attempts:
        assert sum(attempt.seconds.values()) == near(attempt.wall)
    assert sum(failure.recovery for failure in result.failures) == near(result.seconds["recovery"])
    assert sum(failure.rework for failure in result.failures) <= result.seconds["rework"] + NEAR


def killed_once(*, injected: str | None = "kill", world: int = 4) -> FakeHistory:
    """Two steps, a save, two steps, a failure detected after 0.5 s, a restart of 2 s, two steps again, and one more."""
    run = FakeHistory(world=world)
    run.launches(3.0)
    for _ in range(2):
        run.trains()
    waited = run.saves(snapshot=0.25, write=0.5, sync=0.125, durable=0.875)
    run.trains(stall=waited)
    run.trains()
    run.dies(0.5, rank=2, injected=injected)
    run.restarts(1.75, read=0.25)
    for _ in range(3):
        run.trains()
    run.saves(snapshot=0.25, write=0.5, sync=0.125, durable=0.875)
    run.finishes(0.125)
    return run


def test_every_second_of_a_killed_run_has_its_cause() -> None:
    result = cost_breakdown(killed_once().events)
    assert causes(result) == {
        "compute": near(5.0),
        "data": near(1.25),
        "rework": near(2.5),
        "snapshot": near(0.5),
        "write": near(1.0),
        "sync": near(0.25),
        "recovery": near(2.5),
        "startup": near(3.0),
        "closing": near(0.125),
    }
    assert result.wall == near(16.125)
    assert result.ended == "completed"
    assert_adds_up(result)


def test_goodput_counts_a_step_done_twice_once() -> None:
    result = cost_breakdown(killed_once().events)
    assert (result.trained, result.rolled_back, result.committed, result.restarts) == (7, 2, 5, 1)
    assert result.goodput == near(5 / 16.125)


def test_the_parts_of_a_restart_add_up_to_the_time_until_the_first_new_step_has_ended() -> None:
    told = killed_once().events
    (without,) = cost_breakdown(told).failures
    assert without.parts == {}  # an older version did not record when the model was built
    (failure,) = cost_breakdown(
        [
            event._replace(what=event.what._replace(built=0.0)) if isinstance(event.what, Recover) else event
            for event in told
        ]
    ).failures
    expected = {"notice": 0.5, "start": 1.75, "model": 0.0, "restore": 0.25, "first batch": 0.25, "first step": 1.0}
    assert failure.parts == {part: near(seconds) for part, seconds in expected.items()}
    assert sum(failure.parts.values()) == near(failure.to_first_step or 0.0)


def test_a_failure_is_told_from_its_strike_to_its_detection_to_the_first_new_step() -> None:
    (failure,) = cost_breakdown(killed_once().events).failures
    assert (failure.attempt, failure.step, failure.kind, failure.rank) == (1, 4, "kill", 2)
    assert (failure.detected, failure.ended_attempt) == ("signal", True)
    assert (failure.detection, failure.restart, failure.restore) == (near(0.5), near(2.0), near(0.25))
    assert (failure.recovery, failure.to_first_step) == (near(2.5), near(3.75))
    assert (failure.rework_steps, failure.rework) == (2, near(2.5))


def test_a_failure_that_nobody_injected_begins_with_the_last_word_of_rank_0() -> None:
    (failure,) = cost_breakdown(killed_once(injected=None).events).failures
    assert (failure.step, failure.kind, failure.rank, failure.detection) == (4, None, 2, near(0.5))


def test_a_hang_costs_what_it_takes_to_notice() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.dies(30.0, how="hang", rank=1, injected="hang")
    run.restarts(1.0, read=0.0)
    run.trains()
    result = cost_breakdown(run.events)
    assert (result.failures[0].detected, result.failures[0].detection) == ("hang", near(30.0))
    assert result.seconds["recovery"] == near(31.0)


def test_a_failure_struck_while_rank_0_still_wrote_its_step_takes_nothing_from_the_step() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.now += 0.75
    run.next_step = 1
    run.strikes("exit", 1)
    run.now -= 0.75
    run.next_step = 0
    run.trains()
    run.dies(0.5)
    run.restarts()
    run.trains()
    result = cost_breakdown(run.events)
    assert result.failures[0].kind == "exit"
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


def test_rank_0_may_end_its_step_and_speak_after_the_failure_was_detected() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.now -= 0.25
    run.supervisor(detected(1, 1, "signal"))
    run.now += 0.25
    run.passes("recovery", 0.5)
    run.rank_0(Commit(1, 0, 1, 1.0))
    run.restarts()
    run.trains()
    result = cost_breakdown(run.events)
    assert (result.failures[0].detection, result.failures[0].restart) == (
        near(0.0),
        near(1.75),
    )  # 0.5 until it was stopped, and 1.25
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


def test_a_clock_of_another_node_that_is_ahead_cannot_put_a_failure_behind_its_detection() -> None:
    run = killed_once(injected=None)
    ahead = Event(run.now + 60, "injected-2", Strike(1, 4, "kill", 2))
    result = cost_breakdown([*run.events, ahead])
    assert (result.failures[0].kind, result.failures[0].detection) == ("kill", near(0.0))
    assert_adds_up(result)


def test_a_flipped_bit_is_the_cause_of_the_corruption_that_was_found_later() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.strikes("flip", 1)
    run.trains()
    run.trains()
    run.dies(0.5, how="corruption", rank=1)
    run.restarts()
    run.trains()
    (flip,) = cost_breakdown(run.events).failures
    assert (flip.kind, flip.rank, flip.detected, flip.ended_attempt) == ("flip", 1, "corruption", True)
    assert_adds_up(cost_breakdown(run.events))


def test_a_failure_that_the_run_survived_is_listed_and_cost_no_recovery() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.strikes("slow", 1)
    run.trains()
    run.dies(0.5)
    run.restarts()
    run.trains()
    slow, kill = cost_breakdown(run.events).failures
    assert (slow.kind, slow.rank, slow.ended_attempt, slow.recovery, slow.detected) == ("slow", 1, False, 0.0, None)
    assert (kill.kind, kill.ended_attempt) == (None, True)


def survived(lost: int, first: int) -> FakeHistory:
    """Two steps; a member is lost in the third, which the others finish after half a second; then one more."""
    run = FakeHistory(world=3)
    run.launches(2.0)
    run.trains()
    run.trains()
    run.strikes("kill", lost)
    run.passes("data", 0.25)
    run.passes("compute", 0.5)
    run.supervisor(detected(1, lost, "signal"))
    run.passes("recovery", 0.5)
    left = tuple(member for member in range(3) if member != lost)
    run.says(f"rank-{first}", Regroup(1, 1, 2, "forward", left, (lost,), (5, 7), redone=1, seconds=0.5))
    run.passes("compute", 0.25)
    run.reports(2, Seconds(0.25, 1.25, 0.0), rank=first)
    run.passes("compute", 1.0)
    run.reports(3, Seconds(0.0, 1.0, 0.0), rank=first)
    run.says(f"rank-{first}", Commit(1, 4, 4000, 0.5))
    run.says(f"rank-{first}", Done(1, 4))
    run.passes("closing", 0.125)
    run.judges("completed")
    return run


@pytest.mark.parametrize(("lost", "first"), [(2, 0), (0, 1)])
def test_a_loss_that_others_survive_costs_its_seconds_and_samples_and_no_step(lost: int, first: int) -> None:
    run = survived(lost, first)
    result = cost_breakdown(run.events)
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}
    assert (result.ended, result.restarts, result.trained, result.rolled_back) == ("completed", 0, 4, 0)
    assert (result.committed, result.samples_lost) == (4, 2)
    (failure,) = result.failures
    assert (failure.kind, failure.rank, failure.step, failure.ended_attempt) == ("kill", lost, 2, False)
    assert (failure.detected, failure.detection, failure.recovery) == ("signal", near(0.75), near(0.5))
    assert (failure.to_first_step, failure.rework_steps, failure.samples_lost) == (near(1.5), 0, 2)
    assert_adds_up(result)


def test_the_last_step_of_a_lost_rank_0_is_told_by_its_successor() -> None:
    run = survived(0, 1)
    last = next(e for e in run.events if e.who == "rank-0" and isinstance(e.what, Step) and e.what.step == 1)
    history = [e._replace(who="rank-1") if e is last else e for e in run.events]
    assert cost_breakdown(history).seconds == cost_breakdown(run.events).seconds
    assert cost_breakdown(history).trained == 4


def test_a_rank_0_that_joins_again_begins_no_attempt() -> None:
    run = survived(0, 1)
    begin = [Open(2), Began(1, 3, 0, 8), Recover(1, 3, 0, 3, "keyed", 0.0)]
    done = next(i for i, e in enumerate(run.events) if isinstance(e.what, Done))
    joined = [Event(run.events[done].time, "rank-0", what) for what in begin]
    result = cost_breakdown([*run.events[:done], *joined, *run.events[done:]])
    assert (len(result.attempts), result.trained, result.rolled_back) == (1, 4, 0)


def test_a_step_that_is_written_after_a_later_commit_is_no_clock_that_went_back() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.trains()
    step = run.events.pop()
    run.now += 0.125
    run.commits()
    run.now -= 0.125
    run.events.append(step)
    run.trains()
    assert cost_breakdown(run.events).clock_back == 0.0


def test_an_attempt_that_never_came_to_a_step_prolongs_the_recovery() -> None:
    run = FakeHistory()
    run.launches(1.0)
    run.trains()
    run.dies(0.5)
    run.restarts(2.0, read=0.0)
    run.dies(0.5)
    run.restarts(4.0, read=0.0)
    run.trains()
    result = cost_breakdown(run.events)
    assert result.seconds["recovery"] == near(7.0)
    assert [failure.recovery for failure in result.failures] == [near(2.5), near(4.5)]
    assert [failure.to_first_step for failure in result.failures] == [None, near(5.75)]
    assert result.restarts == 2


def test_an_attempt_that_rank_0_never_joined_is_one_too() -> None:
    run = FakeHistory()
    run.launches(1.0)
    run.trains()
    run.dies(0.5)
    run.supervisor(Restart(2, 1))
    run.passes("recovery", 3.0)
    run.supervisor(detected(2, 0, "exit"))
    run.restarts(4.0)  # rank 0 counts this as its second, the supervisor as its third
    run.trains()
    result = cost_breakdown(run.events)
    assert len(result.attempts) == 3
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


def test_the_order_of_a_restart_and_of_rank_0s_first_word_does_not_matter() -> None:
    def told(late: float) -> list[Event]:
        run = FakeHistory()
        run.launches()
        run.trains()
        run.dies()
        run.launches(0.25, cause="recovery", verb="restart")
        events = [*run.events]
        at = next(i for i, event in enumerate(events) if isinstance(event.what, Restart))
        events[at] = events[at]._replace(time=events[at].time + late)
        run.events = events
        run.trains()
        return run.events

    assert cost_breakdown(told(0.0)).seconds == {c: near(s) for c, s in cost_breakdown(told(0.5)).seconds.items()}


def test_without_a_supervisor_the_gap_between_attempts_is_recovery() -> None:
    run = FakeHistory(supervised=False)
    run.launches(0.0)
    run.trains()
    run.passes("recovery", 8.0)
    run.launches(0.0, cause="recovery")
    run.trains()
    run.rank_0(Done(2, 1))
    result = cost_breakdown(run.events)
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}
    assert (result.failures[0].detected, result.failures[0].detection) == (None, None)
    assert result.failures[0].restart == near(8.0)
    assert result.ended == "completed"


@pytest.mark.parametrize("supervised", [True, False])
def test_the_night_between_a_preemption_and_the_next_start_is_not_wall_clock(supervised: bool) -> None:
    run = FakeHistory(supervised=supervised)
    run.launches(1.0)
    run.trains()
    run.saves(snapshot=0.5, durable=0.5)
    run.finishes(0.0, verdict="preempted")
    run.now += 30_000
    run.launches(1.0)
    run.trains()
    result = cost_breakdown(run.events)
    assert (result.away, result.wall) == (near(30_000), near(sum(run.truth.values())))
    assert (result.restarts, result.failures, result.rolled_back) == (0, (), 0)
    assert [attempt.ended for attempt in result.attempts] == ["preempted", None]
    assert_adds_up(result)


def test_the_next_start_begins_when_its_supervisor_does() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.finishes(0.0, verdict="preempted")
    run.now += 30_000
    run.supervisor(Open(2))
    run.passes("startup", 2.0)
    run.launches(1.0, verb="restart")
    run.trains()
    result = cost_breakdown(run.events)
    assert result.away == near(30_000)
    assert result.attempts[1].seconds["startup"] == near(3.0)


def test_a_run_that_gave_up_and_was_taken_up_again_recovers_without_the_time_between() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.dies(0.5)
    run.judges("gave-up")
    run.now += 5000
    run.launches(1.0, cause="recovery")
    run.trains()
    result = cost_breakdown(run.events)
    assert (result.away, result.ended) == (near(5000), None)
    assert result.failures[0].recovery == near(1.5)
    assert cost_breakdown(run.events[:-6]).ended == "gave-up"


def test_a_supervisor_that_was_killed_left_the_run_down_and_that_is_recovery() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.passes("recovery", 60.0)
    run.launches(1.0, cause="recovery")
    run.trains()
    result = cost_breakdown(run.events)
    assert result.away == 0
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


def test_a_supervisor_that_was_killed_before_rank_0_came_has_had_its_attempt() -> None:
    run = FakeHistory()
    run.supervisor(Open(2))
    run.supervisor(Launch(1, 1))
    run.now += 4.0
    run.supervisor(Open(2))
    run.now += 2.0
    run.supervisor(Launch(2, 1))
    first, second = cost_breakdown(run.events).attempts
    assert (first.wall, second.wall) == (near(4.0), near(2.0))


def test_a_run_that_goes_on_is_told_up_to_its_last_event() -> None:
    run = FakeHistory(world=2)
    run.launches(1.0)
    run.trains()
    run.trains()
    assert cost_breakdown(run.events).ended is None
    assert cost_breakdown(run.events).wall == near(3.5)
    run.strikes("slow", 0)
    result = cost_breakdown(run.events)
    assert result.attempts[0].ended is None
    assert [failure.ended_attempt for failure in result.failures] == [None]
    assert result.to_json()["steps"] == {"committed": 0, "trained": 2, "rolled_back": 0, "uncommitted": 2}


def test_a_run_of_which_only_the_supervisor_is_known_was_starting_up() -> None:
    run = FakeHistory()
    run.supervisor(Open(2))
    run.supervisor(Launch(1, 2))
    assert (cost_breakdown(run.events).wall, cost_breakdown(run.events).goodput) == (0, 0)
    run.passes("startup", 5.0)
    run.supervisor(Preempt(1))
    assert causes(cost_breakdown(run.events)) == {"startup": near(5.0)}


@pytest.mark.parametrize("others", [[], [Event(1.0, "rank-3", Done(1, 0))]])
def test_a_history_without_a_critical_path_is_refused_in_one_line(others: Sequence[Event]) -> None:
    with pytest.raises(BadInput, match="neither a supervisor nor a rank 0") as refusal:
        cost_breakdown(others)
    assert "\n" not in str(refusal.value)


def test_an_event_that_lacks_something_is_refused_in_one_line() -> None:
    with pytest.raises(
        BadInput, match=r"a step event of rank-0 cannot be read \(it lacks cursor\): the cost is unknown"
    ):
        cost_breakdown([Event(1.0, "rank-0", Malformed("step", {}, "it lacks cursor"))])


def test_whether_compute_was_measured_on_the_device_is_told() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    assert cost_breakdown(run.events).device is False
    run.reports(1, Seconds(0.25, 1.0, 0.0, device=True))
    assert cost_breakdown(run.events).to_json()["device"] is True


def test_what_no_part_of_a_save_explains_is_unaccounted_and_shown_with_the_stall() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    waited = run.saves(snapshot=0.5, unaccounted=0.25, durable=0.75)
    run.trains(idle=0.125, stall=waited)
    result = cost_breakdown(run.events)
    assert result.seconds["unaccounted"] == near(0.375)
    assert (result.stall.waited, result.stall.unaccounted) == (near(0.75), near(0.25))


def test_the_stall_of_a_save_that_was_never_finished_is_known_from_its_step() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.passes("unaccounted", 0.75)
    run.trains(stall=0.75)
    result = cost_breakdown(run.events)
    assert (result.saves, result.stall.waited, result.stall_per_save) == ((), near(0.75), 0)
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}
    run.saves(snapshot=2.0)  # after the last step: no step tells of it
    assert cost_breakdown(run.events).stall.waited == near(2.75)


def found_by_a_restart() -> FakeHistory:
    """Two saves; rank 0 is killed before it records the second one, which the next attempt finds."""
    run = FakeHistory()
    run.launches()
    run.trains()
    run.saves(snapshot=0.25, durable=0.5)
    run.trains()
    run.dies()
    run.committed = 2
    run.launches(1.0, cause="recovery", verb="restart")
    recover = run.events.pop()
    run.rank_0(Commit(2, 2, 4000, found=True))
    run.events.append(recover)
    run.trains()
    run.saves(snapshot=0.25, durable=0.5)
    run.finishes()
    return run


def test_a_save_that_only_a_restart_found_is_listed_without_times() -> None:
    result = cost_breakdown(found_by_a_restart().events)
    assert [(save.attempt, save.step) for save in result.listed_saves] == [(1, 1), (2, 2), (2, 3)]
    assert [save.step for save in result.saves] == [1, 3]
    assert result.to_json()["found_saves"] == [{"attempt": 2, "step": 2, "bytes": 4000}]
    assert_adds_up(result)


def test_a_save_before_the_first_step_is_no_part_of_starting_up() -> None:
    run = FakeHistory()
    run.launches(1.0)
    run.passes("snapshot", 0.5)
    run.trains(stall=0.5)
    run.tells_of_a_save(0, Stall(waited=0.5, snapshot=0.5, overlapped=0.5))
    assert cost_breakdown(run.events).seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


def test_writing_behind_the_training_is_no_part_of_the_wall_clock() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.trains(stall=run.saves(snapshot=0.5, overlapped=1.0))
    run.next_step -= 1
    run.commits(1.5)  # said when it was found finished, a boundary later
    run.next_step += 1
    result = cost_breakdown(run.events)
    assert result.seconds["write"] == 0
    (save,) = result.saves
    assert (save.stall.overlapped, save.durable_after, save.stall.unaccounted) == (1.0, 1.5, near(0))
    assert_adds_up(result)


def test_waiting_for_the_last_saves_after_the_last_step_is_closing() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.saves(snapshot=0.5)
    run.passes("closing", 4.0)
    run.commits(4.5)
    run.finishes(0.5)
    result = cost_breakdown(run.events)
    assert (result.seconds["closing"], result.seconds["unaccounted"]) == (near(4.5), near(0))


def test_what_was_measured_twice_shows_as_negative_and_still_adds_up() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.trains(compute=1.0)
    run.tells_of_a_save(1, Stall(waited=0.5, snapshot=0.5))
    result = cost_breakdown(run.events)
    assert result.seconds["unaccounted"] == near(-0.5)
    assert_adds_up(result)


def test_a_step_that_claims_more_than_there_was_takes_nothing_from_starting_up() -> None:
    run = FakeHistory()
    run.launches(1.0)
    run.now -= 0.5
    run.trains(data=0.0, compute=1.0)
    result = cost_breakdown(run.events)
    assert (result.seconds["startup"], result.seconds["unaccounted"]) == (near(1.0), near(-0.5))


def test_snapshots_found_damaged_later_roll_back_what_an_earlier_restart_had_kept() -> None:
    run = FakeHistory()
    run.launches()
    for _ in range(4):
        run.trains()
        run.saves(snapshot=0.1, durable=0.1)
    run.dies()
    run.restarts()
    run.trains()
    run.committed = 2
    run.dies()
    run.restarts()
    result = cost_breakdown(run.events)
    assert (result.rolled_back, result.committed) == (3, 2)
    assert [attempt.rolled_back for attempt in result.attempts] == [2, 1, 0]


def test_commits_may_be_told_in_any_order() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.trains()
    run.commits()
    run.rank_0(Commit(1, 1, 1, 2.0))
    assert cost_breakdown(run.events).committed == 2


def test_a_snapshot_that_could_not_be_restored_takes_its_commit_back() -> None:
    run = FakeHistory()
    run.launches()
    for _ in range(4):
        run.trains()
        run.saves(snapshot=0.1, durable=0.1)
    run.committed = 2  # the newest two are found to be damaged
    run.dies()
    run.restarts()
    assert (cost_breakdown(run.events).committed, cost_breakdown(run.events).rolled_back) == (2, 2)


def test_a_run_that_starts_from_the_beginning_again_did_everything_in_vain() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.dies()
    run.restarts()
    run.trains()
    result = cost_breakdown(run.events)
    assert (result.rolled_back, result.committed, result.seconds["rework"]) == (1, 0, near(1.25))


def test_a_rank_that_begins_late_is_found_by_how_short_it_computes() -> None:
    run = FakeHistory(world=3)
    run.launches()
    for _ in range(4):
        run.trains(compute=1.0)
        run.reports(run.next_step - 1, Seconds(0.25, 1.0, 0.0), rank=1)
        run.reports(run.next_step - 1, Seconds(1.0, 0.25, 0.0), rank=2)
    waiting = cost_breakdown(run.events).waiting
    assert waiting is not None
    assert (waiting.rank, waiting.seconds, waiting.rank_seconds) == (2, near(3.0), near(3.0))
    assert waiting.share == near(3.0 / 6.0)


def test_one_rank_waits_for_nobody_that_is_known() -> None:
    assert cost_breakdown(killed_once(world=1).events).waiting is None


def test_the_supervisor_of_another_node_may_see_the_failure_first() -> None:
    run = killed_once(injected=None)
    first = [e._replace(who="supervisor-0") if e.who == "supervisor" else e for e in run.events]
    seen = next(event for event in first if isinstance(event.what, Detect))
    other = Event(seen.time - 0.25, "supervisor-1", detected(1, 3, "exit"))
    (failure,) = cost_breakdown([*first, other]).failures
    assert (failure.rank, failure.detected, failure.detection) == (3, "exit", near(0.25))
    assert cost_breakdown([*first, other]).seconds == cost_breakdown(first).seconds


def test_a_node_that_only_lost_its_peers_does_not_name_the_casualty() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.dies(0.25, how="peer", rank=-1)
    run.says("supervisor-7", detected(1, 1, "signal"))
    run.restarts()
    run.trains()
    (failure,) = cost_breakdown(run.events).failures
    assert (failure.rank, failure.detected, failure.detection) == (1, "signal", near(0.25))


def test_a_restart_for_a_node_that_comes_back_is_not_called_a_failure() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.dies(0.25, how="return", rank=-1)
    run.says("supervisor-7", detected(1, 1, "peer"))  # its workers lost those that node 0 had killed for this
    run.restarts(0.5)
    run.trains()
    (returned,) = cost_breakdown(run.events).failures
    assert (returned.name, returned.rank, returned.detected) == ("node returned", None, "return")
    assert returned.recovery == near(0.25 + 0.5 + 0.25)


def test_a_node_that_comes_back_does_not_hide_the_failure_of_a_worker() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.dies(0.25, how="return", rank=-1)
    run.says("supervisor-7", detected(1, 1, "signal"))
    run.restarts()
    run.trains()
    (failure,) = cost_breakdown(run.events).failures
    assert (failure.name, failure.rank, failure.detected) == ("not injected", 1, "signal")


def test_the_supervisor_of_a_node_that_returns_is_not_mixed_with_the_attempt_that_it_joins() -> None:
    """Node 0 is lost, node 1 continues, and node 0 waits for the next start while the workers still train."""
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.saves(snapshot=0.25, durable=0.5)
    run.dies(0.5)
    run.restarts(0.5)
    run.trains()
    began = run.now
    run.trains()
    run.saves(snapshot=0.25, durable=0.5)
    run.dies(0.25, how="return", rank=-1)
    restarted = run.now
    run.restarts(0.5)
    run.trains()
    run.finishes()
    first, *others = [event for event in run.events if event.who == "supervisor"]
    launch = next(event for event in others if isinstance(event.what, Launch))
    zero = [first, launch, Event(began, "", Open(2)), Event(restarted, "", Launch(3, 2)), others[-1]]
    one = [first, launch, *[event for event in others if event is not launch]]
    nodes = [event._replace(who=f"supervisor-{node}") for node, file in enumerate((zero, one)) for event in file]
    history = [*nodes, *[event for event in run.events if event.who != "supervisor"]]
    result = cost_breakdown(history)
    assert causes(result) == causes(cost_breakdown(run.events))
    assert [failure.name for failure in result.failures] == ["not injected", "node returned"]
    assert result.failures == cost_breakdown(run.events).failures
    assert all(seconds >= 0 for failure in result.failures for seconds in failure.parts.values())


def test_a_supervisor_that_waited_for_nodes_in_vain_takes_no_time_of_the_run_on_fewer_nodes() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.saves(snapshot=0.25, durable=0.5)
    run.finishes(verdict="preempted")
    whole = [event._replace(who="supervisor-0") if event.who == "supervisor" else event for event in run.events]
    before = len(run.events)
    run.now += 100.0
    waited = [Event(run.now, "supervisor-0", Open(2)), Event(run.now + 600.0, "supervisor-0", Judged("gave-up", 1, ""))]
    run.now += 1000.0
    run.launches()
    run.trains()
    run.finishes()
    result = cost_breakdown([*whole, *waited, *run.events[before:]])
    assert result.wall == near(cost_breakdown(run.events).wall)
    assert [attempt.ended for attempt in result.attempts] == ["preempted", "completed"]


def test_a_worker_that_dies_while_it_is_to_save_was_not_preempted_in_order() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.dies(0.5)
    run.judges("preempted")
    result = cost_breakdown(run.events)
    assert (result.ended, result.attempts[0].ended, result.seconds["recovery"]) == ("preempted", "failed", near(0.5))


def test_a_run_killed_by_a_second_signal_was_preempted_and_its_work_lost() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    run.judges("preempted")
    run.now += 100
    run.launches()
    run.trains()
    result = cost_breakdown(run.events)
    assert (result.away, result.restarts, result.rolled_back) == (near(100), 0, 1)
    assert result.seconds["startup"] == near(2.0)


def test_a_crash_after_the_end_that_was_restarted_is_a_failure() -> None:
    run = FakeHistory(world=2)
    run.launches()
    run.trains()
    run.saves(snapshot=0.5, durable=0.5)
    run.rank_0(Done(1, 1))
    run.dies(0.5, rank=1)
    run.restarts(1.0, read=0.0)
    run.finishes(0.25)
    result = cost_breakdown(run.events)
    assert [attempt.ended for attempt in result.attempts] == ["failed", "completed"]
    assert (result.restarts, result.rolled_back, result.committed) == (1, 0, 1)
    assert result.seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


def test_attempts_add_up_and_say_how_they_ended() -> None:
    first, second = cost_breakdown(killed_once().events).attempts
    assert (first.attempt, first.world, first.ended, first.steps, first.rolled_back) == (1, 4, "failed", 4, 2)
    assert (second.attempt, second.restored, second.ended, second.committed) == (2, 2, "completed", 5)
    assert (first.wall, second.wall) == (near(9.375), near(6.75))


def test_the_numbers_are_plain_json_with_these_names() -> None:
    record = cost_breakdown(killed_once().events).to_json()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    stall = ["waited", "snapshot", "enqueue", "backpressure", "write", "sync", "overlapped", "unaccounted"]
    assert list(record) == [
        *("ended", "goodput", "wall", "away", "clock_back", "restarts", "steps", "samples_lost"),
        *("rework", "seconds", "share"),
        *("stall", "waiting", "stragglers", "device", "saves", "found_saves", "failures", "attempts"),
    ]
    assert list(record["seconds"]) == list(record["share"]) == list(CAUSES)
    assert list(record["stall"]) == [*stall, "saves", "per_save"]
    assert sorted(record["saves"][0]) == sorted(
        [*stall, "attempt", "step", "writer", "bytes", "retries", "durable_after"]
    )
    assert list(record["failures"][0]) == [
        *("attempt", "step", "kind", "rank", "ended_attempt", "detected", "detection", "restart", "restore"),
        *("parts", "recovery", "to_first_step", "rework_steps", "rework", "samples_lost"),
    ]
    assert list(record["attempts"][0]) == [
        *("attempt", "world", "ended", "restored", "steps", "rolled_back", "committed", "wall"),
        *CAUSES,
    ]


# Laws, for runs of any course.

short = st.floats(0.01, 5)
steps = st.lists(st.tuples(short, short, st.floats(0, 1)), max_size=5)
stalls = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("snapshot", "enqueue", "backpressure", "write", "sync", "unaccounted"), short)
)


@st.composite
def runs(draw: st.DrawFn) -> FakeHistory:
    """A run that is killed, hangs, is preempted and continued, and at last completes, goes on, or is not heard of."""
    run = FakeHistory(supervised=draw(st.booleans()))
    run.launches(draw(short))
    for ending in [*draw(st.lists(st.sampled_from(["kill", "hang", "unknown", "preempted"]), max_size=3)), "last"]:
        trained = draw(steps)
        waited = run.saves(durable=1.0, **draw(stalls)) if trained and draw(st.booleans()) else 0.0
        for number, (data, compute, idle) in enumerate(trained):
            # Nothing in a history divides what comes before the first step.
            run.trains(data, compute, idle=idle if number else 0.0, stall=waited)
            waited = run.saves(durable=1.0, **draw(stalls)) if draw(st.booleans()) else 0.0
        if ending == "preempted" and run.committed == run.next_step > 0:
            run.finishes(0.0, verdict="preempted")
            run.now += draw(st.floats(1, 1e5))
            run.launches(draw(short), read=draw(short))
        elif ending != "last":
            run.dies(draw(short), how="hang" if ending == "hang" else "signal")
            run.restarts(draw(short), read=draw(short))
    if run.next_step and draw(st.booleans()):
        run.finishes(draw(short))
    return run


def shuffled(events: Sequence[Event], choose: Callable[[list[str]], str]) -> list[Event]:
    """The same events, each teller's in their own order, and nothing else kept."""
    tellers = {who: [event for event in events if event.who == who] for who in {event.who for event in events}}
    mixed: list[Event] = []
    while tellers:
        who = choose(sorted(tellers))
        mixed.append(tellers[who].pop(0))
        tellers = {who: rest for who, rest in tellers.items() if rest}
    return mixed


@given(runs())
def test_the_parts_add_up_to_the_wall_clock(run: FakeHistory) -> None:
    assert_adds_up(cost_breakdown(run.events))


@given(runs())
def test_every_second_is_found_at_the_cause_it_passed_for(run: FakeHistory) -> None:
    assert cost_breakdown(run.events).seconds == {cause: near(run.truth[cause]) for cause in CAUSES}


@given(runs(), st.data())
def test_how_the_files_were_interleaved_changes_nothing(run: FakeHistory, data: st.DataObject) -> None:
    mixed = shuffled(run.events, lambda tellers: data.draw(st.sampled_from(tellers)))
    assert cost_breakdown(mixed) == cost_breakdown(run.events)


@given(runs(), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_how_the_events_were_split_into_files_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, run: FakeHistory, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(run.events)))
    folder = tmp_path_factory.mktemp("split")
    write_history(folder, {"a": run.events[:cut], "b": run.events[cut:]})
    assert cost_breakdown(read_history(folder).events) == cost_breakdown(run.events)


@given(runs(), st.data())
def test_files_torn_at_any_byte_still_add_up(
    tmp_path_factory: pytest.TempPathFactory, run: FakeHistory, data: st.DataObject
) -> None:
    tellers = {event.who for event in run.events}
    folder = write_history(
        tmp_path_factory.mktemp("torn"), {who: [event for event in run.events if event.who == who] for who in tellers}
    )
    for who in sorted(tellers):
        path = folder / f"{who}.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))])
    assert_adds_up(cost_breakdown(read_history(folder).events))


@given(runs(), st.floats(1, 1e6))
def test_a_clock_that_was_put_back_between_attempts_moves_no_second(run: FakeHistory, back: float) -> None:
    last = max(i for i, event in enumerate(run.events) if isinstance(event.what, Launch | Restart | Open))
    before, after = run.events[:last], run.events[last:]
    later = [event._replace(time=event.time - back) for event in after]
    result = cost_breakdown([*before, *later])
    assert_adds_up(result)
    straight = cost_breakdown(run.events)
    assert (result.trained, result.rolled_back, result.committed) == (
        (straight.trained, straight.rolled_back, straight.committed)
    )
    for cause in ("compute", "data", "rework", "write"):
        assert result.seconds[cause] == near(straight.seconds[cause])


def test_a_clock_that_was_put_back_an_hour_costs_only_the_gap_it_hid() -> None:
    run = killed_once()
    at = next(i for i, event in enumerate(run.events) if isinstance(event.what, Restart))
    moved = [event._replace(time=event.time - 3600) for event in run.events[at:]]
    result = cost_breakdown([*run.events[:at], *moved])
    assert result.clock_back == near(3600)
    assert result.seconds == {cause: near(seconds) for cause, seconds in cost_breakdown(run.events).seconds.items()}


def test_a_history_is_read_from_its_folder(tmp_path: Path) -> None:
    run = killed_once()
    tellers = {event.who for event in run.events}
    write_history(tmp_path / "history", {who: [event for event in run.events if event.who == who] for who in tellers})
    assert cost_breakdown(read_history(tmp_path).events) == cost_breakdown(run.events)


def test_of_each_slow_period_of_a_rank_only_the_last_report_counts() -> None:
    run = killed_once()
    reports = [
        Straggler(1, 2, 5, 40, 1.5, 0.2),
        Straggler(1, 2, 5, 80, 1.6, 0.5),
        Straggler(1, 3, 9, 60, 2.0, 0.1),
        Straggler(1, None, 9, 60, 2.0, 0.1, 3),
    ]
    events = [Event(run.events[-1].time, "supervisor", report) for report in reports]
    assert cost_breakdown([*run.events, *events]).stragglers == (reports[1], reports[2], reports[3])
