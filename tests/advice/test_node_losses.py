"""The loss of a node costs a second restart when the node returns, and without the node of rank 0 nothing continues live."""

from fractions import Fraction

import pytest

from fake_histories import calm, replayed, sharded
from holdfast.advice.advice import advise
from holdfast.advice.estimate import FALLS_BACK, MEASURED
from holdfast.advice.large_job import job_of, simulate_large_job
from holdfast.advice.prices import outlooks, prices, replay_time
from holdfast.advice.question import Question, in_words
from holdfast.advice.run_costs import run_costs

HOUR = 3600.0
COSTS = run_costs(calm().events)  # of 4 workers


def trains(recovery: str, question: Question, mtbf: float = HOUR) -> float:
    return outlooks(COSTS, question, mtbf, prices(COSTS, question))[recovery].effective


def test_a_node_that_returns_restarts_all_workers_once_more() -> None:
    workers, nodes = Question(restart=60.0), Question(restart=60.0, nodes=2)
    assert trains("restart", nodes) == trains("restart", workers, HOUR / 2)
    assert trains("restart", Question(restart=60.0, nodes=2, lost=Fraction(1, 4))) == trains("restart", workers)
    assert trains("restart", Question(restart=60.0, nodes=1)) == trains("restart", workers)


def test_the_simulation_counts_the_returns_too() -> None:
    question = Question(workers=32, nodes=4, restart=120.0, stall=1.0, backend="gloo")
    expected = outlooks(COSTS, question, HOUR, prices(COSTS, question))
    found = simulate_large_job(COSTS, question, HOUR).shares
    for name in ("restart", "replay"):
        assert expected[name].effective == pytest.approx(found[name].value, abs=0.01)


def test_the_cost_of_a_return_is_printed_with_what_is_not_counted() -> None:
    advice = advise(calm().events, Question(mtbf=HOUR, nodes=2, restart=60.0))
    price = prices(COSTS, Question(nodes=2, restart=60.0), advice.save_every)["restart"].seconds
    (line,) = [line for line in advice.figures if line.startswith("When the lost node returns")]
    assert f": {in_words(price.value)}, which is included." in line
    assert any("--lost-after" in line for line in advice.unknown)
    alone = advise(calm().events, Question(mtbf=HOUR, restart=60.0))
    assert not any("node" in line for line in alone.figures)


def test_the_loss_of_the_node_of_rank_0_is_a_restart_under_every_recovery() -> None:
    nodes, workers = Question(restart=60.0, nodes=4), Question(restart=60.0, lost=Fraction(1, 8))
    for name, part in FALLS_BACK.items():
        if name in prices(COSTS, nodes):
            assert trains(name, nodes) < trains(name, workers)
            simulated = job_of(COSTS, nodes, HOUR, prices(COSTS, nodes)[name], every=10)
            assert simulated.goes_back == pytest.approx((1 + 1 - (1 - part) * 3 / 4) / 2)
    advice = advise(calm().events, Question(mtbf=600.0, nodes=4, restart=300.0))
    assert advice.recovery != "restart"
    assert "The loss of the node of rank 0 is a restart." in advice.figures[1]


def test_exact_never_recommends_a_recovery_that_loses_samples() -> None:
    question = Question(mtbf=120.0, restart=60.0)
    assert advise(calm().events, question).recovery in ("forward", "skip")
    exact = advise(calm().events, Question(mtbf=120.0, restart=60.0, exact=True))
    assert exact.recovery in ("restart", "replay")


def test_a_replay_of_a_small_state_says_nothing_about_a_large_one() -> None:
    small = run_costs(sharded(replayed(3.3).events))
    assert replay_time(small, Question(workers=8)).value >= 3.3
    large = Question(workers=8, parameters=7e9)
    for history in (replayed(3.3).events, replayed(0.1).events):
        question = Question(workers=8, parameters=7e9, restart=180.0)
        assert replay_time(run_costs(sharded(history)), question).value == 180.0
    received = 12 * 7e9 / 8 / 1.25e9
    assert received < replay_time(small, large).value < received + 10
    assert replay_time(small, Question(parameters=7e9, replay=90.0)).value == 90.0
    same = Question(parameters=small.parameters)
    assert replay_time(small, same).basis == MEASURED


def test_the_advice_says_that_the_state_of_the_run_is_smaller() -> None:
    asked = {"workers": 8, "parameters": 7e9, "restart": 180.0, "backend": "gloo"}
    lines = advise(sharded(replayed(3.3).events), Question(**asked)).unknown  # type: ignore[arg-type]
    (line,) = [line for line in lines if "replacement" in line]
    assert line.startswith("The time of a replacement: that of --restart, because the state of this run (4 kB)")
    given = advise(sharded(replayed(3.3).events), Question(**asked, replay=9.0)).unknown  # type: ignore[arg-type]
    assert not any("replacement" in line for line in given)


def test_steps_over_gloo_are_an_assumption() -> None:
    lines = advise(calm().events, Question(backend="gloo")).unknown
    assert any(line.startswith("A step over gloo takes the time of a step.") for line in lines)
