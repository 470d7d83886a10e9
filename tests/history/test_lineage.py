"""Lineage: what of a run counts, whoever asks and in which order ranks tell of it."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import Attempt, Commit, Launch, Plan, Recover, Regroup, Restart, Seconds, Step, What
from holdfast.history.lineage import EVERY_STEP, Lineage
from holdfast.sampler.digest import Samples


def told(*several: What) -> Lineage:
    lineage = Lineage()
    for what in several:
        lineage.add(what)
    return lineage


def recover(attempt: int, restored: int | None) -> Recover:
    return Recover(attempt, restored, 0, restored or 0, "keyed", 0.5)


def commit(attempt: int, step: int) -> Commit:
    return Commit(attempt, step, 4096)


def step(attempt: int, number: int) -> Step:
    return Step(attempt, 1, 0, 0, number, number, Samples(), Seconds(0.0, 1.0, 0.0))


def test_a_recover_takes_back_what_was_trained_and_committed_beyond_it() -> None:
    lineage = told(recover(1, None), commit(1, 0), *(step(1, n) for n in range(30)), commit(1, 10), commit(1, 20))
    assert (lineage.reached, lineage.committed, sorted(lineage.commits)) == (30, 20, [0, 10, 20])
    lineage.add(recover(2, 10))
    assert (lineage.reached, lineage.committed, sorted(lineage.commits)) == (10, 10, [0, 10])
    lineage.add(recover(3, None))
    assert (lineage.reached, lineage.committed, lineage.commits) == (0, 0, {})


def test_the_steps_of_an_attempt_stand_below_the_lowest_that_a_later_one_went_back_to() -> None:
    lineage = told(recover(1, None), recover(2, 20), recover(3, 40), recover(5, 30))
    assert [lineage.limit(attempt) for attempt in (1, 2, 3, 4, 5)] == [20, 30, 30, 30, EVERY_STEP]


def test_the_attempt_that_trained_a_step_is_the_last_that_began_at_or_before_it() -> None:
    lineage = told(recover(1, None), recover(2, 20), recover(3, 40), recover(5, 30))
    assert [lineage.trainer(number) for number in (0, 19, 20, 29, 30, 99)] == [1, 1, 2, 2, 5, 5]
    assert Lineage().trainer(0) is None


def test_a_fresh_start_leaves_no_commit_not_even_of_the_first_state() -> None:
    lineage = told(recover(1, None), commit(1, 0), recover(2, 0))
    assert list(lineage.commits) == [0]
    lineage.add(recover(3, None))
    assert list(lineage.commits) == []


def test_ranks_that_tell_the_same_change_nothing() -> None:
    once = told(recover(1, None), commit(1, 10), recover(2, 10))
    often = told(recover(1, None), recover(1, None), commit(1, 10), recover(2, 10), recover(2, 10), recover(2, 10))
    assert once == often


def test_a_member_that_joins_an_attempt_in_its_middle_takes_nothing_back() -> None:
    lineage = told(recover(1, None), *(step(1, n) for n in range(30)), commit(1, 10), recover(1, 30), step(1, 30))
    assert (lineage.reached, lineage.committed, lineage.restored, lineage.limit(1)) == (31, 10, None, EVERY_STEP)


def test_a_regroup_sets_the_number_of_workers() -> None:
    assert told(Launch(1, 4), Regroup(1, 1, 7, "forward", (0, 1, 3), (2,))).workers == 3


def test_the_supervisor_and_the_plan_are_followed() -> None:
    plan = Plan(1, 167, 16, 3, 0, 50, "blocking", "0f")
    lineage = told(Launch(1, 4), Attempt(1, 4, 0, 7), plan, Restart(2, 3), Attempt(2, 3, 0, 8))
    assert (lineage.attempt, lineage.workers, lineage.restarts, lineage.plan) == (2, 3, 1, plan)


@given(st.lists(st.none() | st.integers(0, 30), max_size=8))
def test_limits_are_what_they_are_by_definition(backs: list[int | None]) -> None:
    lineage = told(*(recover(attempt, back) for attempt, back in enumerate(backs, 1)))
    for attempt in range(len(backs) + 2):
        later = [back or 0 for number, back in enumerate(backs, 1) if number > attempt]
        assert lineage.limit(attempt) == min(later, default=EVERY_STEP)
