"""Boundaries are passed one after the other, and whoever waits for the training knows where it comes to them."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from holdfast.distributed.ranks import NEVER, BoundaryGate
from holdfast.faults.schedule import Failure
from holdfast.runs.config import RunConfig
from holdfast.train.inject import Injection
from holdfast.train.observe.observer import SavingAt
from holdfast.train.state.save import CheckpointSaver


def test_a_boundary_is_not_passed_while_a_thread_waits_there() -> None:
    turn = BoundaryGate()
    assert turn.passes(4)
    assert turn.wait("somebody") == 5
    assert turn.wait("another") == 5
    assert not turn.passes(5)
    turn.leave("somebody")
    assert not turn.passes(5)
    turn.leave("another")
    assert turn.passes(5)
    assert turn.wait("somebody") == 6


def test_training_stops_at_the_boundary_that_a_waiting_thread_was_given() -> None:
    for trial in range(50):
        turn, reached = BoundaryGate(), list[int]()

        def train(turn: BoundaryGate = turn, reached: list[int] = reached) -> None:
            step = 0
            while turn.passes(step):
                step += 1
            reached.append(step)

        training = threading.Thread(target=train)
        training.start()
        threading.Event().wait(trial * 4e-6)
        said = turn.wait("somebody")
        training.join(30)
        assert reached == [said]


@given(saved=st.none() | st.integers(0, 50), every=st.integers(1, 20), step=st.integers(0, 60))
def test_a_save_is_due_in_every_interval_once(saved: int | None, every: int, step: int) -> None:
    saving = CheckpointSaver.__new__(CheckpointSaver)
    saving.saved, saving.config = saved, RunConfig(script="train.py", save_every=every)
    assert (step >= saving.next) == (saved is None or step // every > saved // every)


@given(saved=st.none() | st.integers(0, 20), at=st.sets(st.integers(0, 20), max_size=4), step=st.integers(0, 25))
def test_a_rehearsal_saves_before_the_given_steps(saved: int | None, at: set[int], step: int) -> None:
    saving = SavingAt.__new__(SavingAt)
    saving.saved, saving.at = saved, tuple(at)
    assert (step >= saving.next) == (saved is None or any(saved < each <= step for each in at))


@given(steps=st.lists(st.integers(0, 20), max_size=4), step=st.integers(0, 25))
def test_the_next_failure_is_the_first_from_here_on(steps: list[int], step: int) -> None:
    injection = Injection(tuple(Failure(step=each, kind="kill", targets=(0,)) for each in steps), 0, 1, (), None)
    later = [each for each in steps if each >= step]
    assert injection.next(step) == (min(later) if later else NEVER)
