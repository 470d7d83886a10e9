"""The speed of the shared storage decides when a save is durable, how long a restart reads, and the shortest interval."""

from dataclasses import replace

import pytest

from fake_histories import calm
from holdfast.advice.advice import advise
from holdfast.advice.estimate import GIVEN, INFERRED, MEASURED, Estimate
from holdfast.advice.prices import restart_time, save_delay
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts, run_costs
from holdfast.advice.shared_storage import durable_time, reading_time
from holdfast.errors import BadInput
from holdfast.events import Commit

COSTS = run_costs(calm().events)  # of 4 workers
SHARDED = replace(COSTS, sharded=True)


def test_a_save_is_durable_after_its_bytes_over_the_speed() -> None:
    assert durable_time(COSTS, Question(parameters=7e9, storage=5e9)) == Estimate.exact(12 * 7e9 / 5e9, GIVEN)
    assert COSTS.state_bytes is not None
    assert durable_time(COSTS, Question(storage=1000.0)) == Estimate.exact(COSTS.state_bytes / 1000, GIVEN)
    assert durable_time(COSTS, Question(parameters=7e9)) == COSTS.durable


def test_each_worker_reads_its_part_of_a_sharded_model_and_the_whole_of_a_replicated_one() -> None:
    question = Question(workers=256, parameters=7e9, storage=5e9)
    assert reading_time(SHARDED, question).value == pytest.approx(16.8)
    assert reading_time(COSTS, question).value == pytest.approx(256 * 16.8)


def test_a_restart_contains_the_time_to_read_unless_it_is_given() -> None:
    question, seen = Question(parameters=7e9, storage=5e9), Estimate(4.0, 2.0, 8.0, MEASURED)
    found = restart_time(replace(SHARDED, restart=seen), question)
    assert found.value == pytest.approx(4.0 + 16.8)
    assert found.basis == INFERRED
    assert restart_time(SHARDED, question).value > 16.8 + 2
    assert restart_time(SHARDED, replace(question, restart=5.0)) == Estimate.exact(5.0, GIVEN)


def test_a_given_restart_that_is_too_short_to_read_a_snapshot_is_named() -> None:
    question = Question(parameters=7e9, storage=5e9, workers=4, restart=60.0)
    assert any("although reading a snapshot alone takes 67 s at 5 GB/s" in line for line in advised(question))
    assert not any("although" in line for line in advised(replace(question, restart=68.0)))


def advised(question: Question) -> tuple[str, ...]:
    return advise(calm().events, question).unknown


def test_no_save_begins_before_the_last_one_is_durable() -> None:
    question = Question(mtbf=600.0, parameters=7e9, storage=1e9, step=1.0, stall=0.001, restart=400.0)
    assert advise(calm().events, question).save_every >= 84
    assert advise(calm().events, replace(question, storage=1e12)).save_every < 84


def test_training_waits_for_the_storage_under_the_blocking_writer() -> None:
    question = Question(parameters=7e9, storage=5e9)
    blocking, overlapped = (run_of(writer) for writer in ("blocking", "overlapped"))
    durable = durable_time(COSTS, question)
    assert save_delay(replace(blocking, durable=durable), question) == durable
    assert save_delay(replace(overlapped, durable=durable), question) == COSTS.stall


def run_of(writer: str) -> RunCosts:
    return replace(COSTS, writer=writer)


def test_a_run_that_saved_nothing_needs_the_number_of_parameters() -> None:
    history = [event for event in calm().events if not isinstance(event.what, Commit)]
    with pytest.raises(BadInput, match="give --parameters"):
        advise(history, Question(storage=5e9))
