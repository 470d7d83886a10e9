"""A run restarts after failures until it makes no progress, and ends at an error that comes again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.supervise.error_record import RaisedException
from holdfast.supervise.failure_cause import FirstFailure, WorkerExit, first_failure
from holdfast.supervise.restart_policy import RestartPolicy


def lost(kind: str = "signal", message: str = "broke", step: int | None = 57, **about: Any) -> FirstFailure:
    return FirstFailure(kind=kind, rank=2, local_rank=2, exit=1, signal=None, message=message, step=step, **about)  # type: ignore[arg-type]


def words(policy: RestartPolicy, failures: list[tuple[FirstFailure, int | None]]) -> list[str | None]:
    """Return the verdict after each failure and newest snapshot."""
    return [end[0] if (end := policy.after(*failure)) else None for failure in failures]


@given(st.integers(0, 9), st.sampled_from(["exit", "signal", "hang", "peer", "storage"]))
def test_a_failure_is_tried_again_until_the_limit(limit: int, kind: str) -> None:
    assert words(RestartPolicy(limit, 50), [(lost(kind), 50)] * (limit + 1)) == [None] * limit + ["gave-up"]


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 4))
def test_progress_fills_the_restarts_up_again(further: list[bool], limit: int) -> None:
    policy, newest, used = RestartPolicy(limit, None), 0, 0
    for is_further in further:
        newest, used = (newest + 10, 0) if is_further else (newest, used)
        assert policy.left(newest) == limit - used
        why = policy.after(lost(), newest)
        assert (why is not None) == (used == limit)
        used += why is None
        if why:
            break


def test_an_error_counts_as_repeated_until_a_snapshot_has_passed_its_step() -> None:
    """The first attempt may end before its save is durable and the second after it; both reached the same step."""
    error = lost("error", "ValueError: bad sample", place="train.py:9", step=57)
    assert words(RestartPolicy(9, 0), [(error, 0), (error, 50)]) == [None, "script-error"]
    assert words(RestartPolicy(9, 0), [(error, 0), (error, 60), (error, 60)]) == [None, None, "script-error"]


def test_a_store_that_does_not_answer_is_neither_progress_nor_an_end() -> None:
    assert words(RestartPolicy(2, 50), [(lost(), None), (lost(), 50), (lost(), None)]) == [None, None, "gave-up"]


def test_an_error_that_comes_again_at_the_same_step_is_blamed_on_the_script() -> None:
    error = lost("error", "ValueError: bad sample <object at 0x7f01> in process 4711", place="train.py:9")
    again = lost("error", "ValueError: bad sample <object at 0x7f99> in process 4712", place="train.py:9")
    other = lost("error", "ValueError: bad weather", place="train.py:9")
    elsewhere = lost("error", error.message, place="train.py:10")
    later = lost("error", error.message, place="train.py:9", step=58)
    early = lost("error", error.message, place="train.py:9", step=None)
    for between in (other, elsewhere, later, early, lost("signal")):
        assert words(RestartPolicy(9, 0), [(error, 50), (between, 50), (again, 50)]) == [None, None, "script-error"]
    assert words(RestartPolicy(9, 0), [(early, None), (early, None)]) == [None, "script-error"]
    assert words(RestartPolicy(9, 0), [(early, None), (early, 50), (early, 50)]) == [
        None,
        None,
        "script-error",
    ]  # it got further
    policy = RestartPolicy(9, 0)
    policy.after(error, 50)
    why = policy.after(again, 50)
    assert why is not None
    assert "it came again at step 57" in why[1]


def test_an_exit_status_that_comes_again_at_the_same_step_is_blamed_on_the_script() -> None:
    three, four = (lost("error", f"exited with status {status}", place="train.py:9") for status in (3, 4))
    later = lost("error", three.message, place="train.py:9", step=58)
    assert words(RestartPolicy(9, 0), [(three, 50), (four, 50), (later, 50), (three, 50)]) == [
        None,
        None,
        None,
        "script-error",
    ]


def test_an_undefined_name_is_blamed_on_the_script_at_any_step() -> None:
    first, later = (lost("error", "NameError: name 'y' is not defined", place="train.py:9", step=s) for s in (30, 60))
    assert words(RestartPolicy(9, 0), [(first, 25), (later, 50)]) == [None, "script-error"]


def test_a_loader_process_that_is_killed_repeatedly_is_not_blamed_on_the_script() -> None:
    killed = lost("error", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", place="train.py:9")
    gone = lost("error", "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly", place="train.py:9")
    assert (
        words(RestartPolicy(2, 0), [(killed, 50)] * 3)
        == words(RestartPolicy(2, 0), [(gone, 50)] * 3)
        == [None, None, "gave-up"]
    )


@pytest.mark.parametrize(
    "message",
    [
        "OSError: [Errno 24] Too many open files: 'data.bin'",
        "RuntimeError: can't start new thread",
        "MemoryError: Unable to allocate 8.0 GiB",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_a_limit_of_the_machine_is_never_blamed_on_the_script(message: str) -> None:
    failure, policy = lost("error", message, place="train.py:9"), RestartPolicy(1, 0)
    assert policy.after(failure, 50) is None
    word, reason = policy.after(failure, 50) or ("", "")
    assert (word, "a limit of the machine, not an error of the script" in reason) == ("gave-up", True)


def test_a_restart_to_make_overwritten_initial_weights_again_is_not_counted() -> None:
    raised = RaisedException("no snapshot can be used", "", 1.0, origin="overwritten")
    overwritten = first_failure([WorkerExit(rank=1, local_rank=1, exit=1, raised=raised)])
    assert overwritten.kind == "storage"
    policy = RestartPolicy(1, 10)
    assert words(policy, [(lost("signal"), 10), (overwritten, None)]) == [None, None]
    assert policy.left(None) == 0
    assert words(policy, [(overwritten, None)]) == ["gave-up"]  # the same twice in a row counts


def test_a_refusal_by_holdfast_is_not_tried_again() -> None:
    assert words(RestartPolicy(9, 0), [(lost("error", origin="refused"), 50)]) == ["refused"]
