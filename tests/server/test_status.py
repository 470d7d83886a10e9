"""For each process that `--inject` names and does not kill, `holdfast serve train` says why."""

from holdfast.events import Lost, Struck
from holdfast.faults.schedule import Failure
from holdfast.server.status import missed_kills

NODES = Failure(step=7, kind="node", targets=(0, 1), point="boundary")


def test_a_failure_that_killed_all_of_its_processes_is_not_named() -> None:
    assert [*missed_kills((NODES,), [Struck(7, "node", (0, 1))], iterations=9)] == []


def test_a_process_that_was_lost_before_is_named() -> None:
    history = [Lost(6, 0, "node", 1, "it did not answer within 1.25 s"), Struck(7, "node", (0,))]
    assert [*missed_kills((NODES,), history, iterations=9)] == [
        "node 1 was not killed at iteration 7: it was lost in iteration 6, and a node that replaces it has a new number"
    ]


def test_a_point_to_which_the_run_did_not_come_is_named() -> None:
    failure = Failure(step=7, kind="controller", targets=(0,), point="recovery")
    assert [*missed_kills((failure,), [], iterations=9)] == [
        "the controller was not killed at iteration 7: the run did not come to the point 'recovery' in this iteration"
    ]


def test_an_iteration_after_the_end_of_the_run_is_named() -> None:
    assert [*missed_kills((NODES,), [], iterations=7)] == [
        "no process was killed at iteration 7: the run had ended before"
    ]
