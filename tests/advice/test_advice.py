"""The advice is right where the answer is known: intervals, save intervals, prices of a failure, and what is chosen."""

import contextlib
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fake_runs
from daly import expected_run_time
from fake_histories import FakeHistory, calm, detected, replayed, sharded
from holdfast.advice.advice import advise, choose, failure_rate
from holdfast.advice.estimate import (
    BENCHMARK,
    GIVEN,
    INFERRED,
    MEASURED,
    PUBLISHED,
    Estimate,
    mean_of,
    next_of,
    student,
)
from holdfast.advice.prices import Outlook, lost_part, prices, replay_time, restart_time
from holdfast.advice.question import Question, fraction_of, in_words, seconds_of
from holdfast.advice.run_costs import RunCosts, convergence, run_costs
from holdfast.advice.saving import SaveCosts, SaveInterval, best_interval, daly_interval, slowdown
from holdfast.errors import BadInput
from holdfast.events import Commit, Regroup, Seconds
from seeds import seeds

HOUR = 3600.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("30m", 1800), ("4h", 14400), ("2d", 172800), ("1h30m", 5400), (" 2.5H ", 9000), ("35ms", 0.035)],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert seconds_of(text, "--mtbf") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["4", "4x", "h", "-4h", "4h ago", "0s", "4h 30m", "1e999d", "4 h", "٣h"])
def test_what_is_no_duration_is_refused_in_one_line_that_shows_how(text: str) -> None:
    with pytest.raises(BadInput, match="--mtbf") as refusal:
        seconds_of(text, "--mtbf")
    assert "\n" not in str(refusal.value)


def test_parts_are_fractions_above_0_and_at_most_1() -> None:
    assert fraction_of("1/8", "--workers-lost") == Fraction(1, 8) == fraction_of("0.125", "--workers-lost")
    for text in ("0", "9/8", "1/0", "an eighth"):
        with pytest.raises(BadInput, match="--workers-lost"):
            fraction_of(text, "--workers-lost")


def test_durations_are_said_in_the_unit_that_people_would_choose() -> None:
    assert [in_words(seconds) for seconds in (0.0071, 0.3, 42, 600, 4 * HOUR, 54 * 24 * HOUR)] == [
        "7.1 ms",
        "0.3 s",
        "42 s",
        "10 min",
        "4 h",
        "54 d",
    ]


def test_the_next_of_some_lies_in_its_interval_nine_times_of_ten_or_a_little_more() -> None:
    rng = np.random.default_rng(0)
    hits = [next_of(drawn[:-1]).holds(drawn[-1]) for drawn in np.exp(0.4 * rng.standard_normal((2000, 6)))]
    assert 0.87 <= np.mean(hits) <= 0.97


def test_of_a_single_one_it_is_known_that_such_things_scatter() -> None:
    alone = next_of([1.0])
    assert alone.value == pytest.approx(1.0)
    assert alone.low < 0.5 < 2.0 < alone.high
    assert next_of([1.0] * 50).high < alone.high


def test_students_quantile_is_the_one_of_the_tables() -> None:
    assert [student(freedom) for freedom in (4, 10, 100)] == [
        pytest.approx(expected, rel=0.01) for expected in (2.132, 1.812, 1.660)
    ]


def test_a_sum_of_estimates_has_the_basis_of_its_larger_part() -> None:
    total = Estimate(1.0, 0.5, 2.0, MEASURED) + Estimate(3.0, 3.0, 3.0, BENCHMARK)
    assert (total.value, total.low, total.high, total.basis) == (4.0, 3.5, 5.0, BENCHMARK)


@pytest.mark.parametrize("basis", [GIVEN, MEASURED])
def test_a_sum_is_given_or_measured_only_if_both_parts_are(basis: str) -> None:
    larger, smaller = Estimate.exact(3.0, basis), Estimate.exact(1.0, PUBLISHED)
    assert (larger + smaller).basis == INFERRED
    assert (larger + larger).basis == basis


def test_many_repeated_steps_are_counted_in_full() -> None:
    found = advise(calm().events, Question(workers=8, backend="nccl", mtbf=1e9, restart=10.0, stall=60.0))
    steps = found.prices["restart"].iterations.value
    assert steps > 10_000
    assert f"the {steps:,.0f} steps" in str(found)


@given(
    stall=st.floats(1e-3, 60),
    mtbf=st.floats(60, 1e7),
    restart=st.floats(0, 600),
    durable=st.floats(0, 60),
    step=st.floats(1e-3, 10),
)
def test_more_failures_are_a_reason_to_save_no_less_often(
    stall: float, mtbf: float, restart: float, durable: float, step: float
) -> None:
    saving = SaveCosts(step=step, stall=stall, mtbf=mtbf, restart=restart, durable=durable)
    often, seldom = best_interval(saving), best_interval(replace(saving, mtbf=3 * mtbf))
    assert often.best <= seldom.best
    assert often.effective <= seldom.effective + 1e-12
    assert often.low <= often.best <= often.high


@given(mtbf=st.floats(60, 1e7), step=st.floats(1e-3, 10), restart=st.floats(0, 600))
def test_what_costs_nothing_is_done_after_every_step(mtbf: float, step: float, restart: float) -> None:
    assert best_interval(SaveCosts(step=step, stall=0.0, mtbf=mtbf, restart=restart)).best == 1


@given(stall=st.floats(0.01, 60), mtbf=st.floats(600, 1e6), step=st.floats(0.01, 1))
def test_a_dearer_save_is_made_less_often(stall: float, mtbf: float, step: float) -> None:
    saving = SaveCosts(step=step, stall=stall, mtbf=mtbf)
    assert best_interval(saving).best <= best_interval(replace(saving, stall=2 * stall)).best


@given(stall=st.floats(0.1, 60), mtbf=st.floats(600, 1e6), restart=st.floats(0, 600), every=st.integers(1, 10_000))
def test_where_saves_are_durable_at_once_the_time_is_dalys(
    stall: float, mtbf: float, restart: float, every: int
) -> None:
    assume(every < 20 * mtbf)
    ours = slowdown(every, SaveCosts(step=1.0, stall=stall, mtbf=mtbf, restart=restart))
    dalys = expected_run_time(float(every), solve=1.0, dump=stall, mtbf=mtbf, restart=restart)
    assert float(ours) == pytest.approx(float(dalys), rel=1e-9)


def test_the_best_interval_is_dalys_and_no_other_step_is_better() -> None:
    saving = SaveCosts(step=0.5, stall=5.0, mtbf=4 * HOUR, restart=60.0)
    found = best_interval(saving)
    assert found.best == pytest.approx(daly_interval(5.0, 4 * HOUR) / 0.5, rel=0.01)
    assert found.daly == round(daly_interval(5.0, 4 * HOUR) / 0.5)
    least = float(slowdown(found.best, saving))
    assert (slowdown(np.arange(1, 5000), saving) >= least - 1e-12).all()
    assert float(slowdown(found.high, saving)) <= 1.01 * least


def test_the_expected_time_with_slow_writes_is_that_of_simulated_failures() -> None:
    """Training goes on while a save is written, and can go back to it only then."""
    rng, work, stall, durable, restart, mtbf = np.random.default_rng(1), 5.0, 1.0, 2.5, 2.0, 12.0
    clock = safe = 0.0
    since = 0.0  # uptime since the state that is safe
    for _ in range(60_000):
        gap = rng.exponential(mtbf)
        clock += gap
        since += max(0.0, gap - (restart if clock > gap else 0.0))
        saves = max(0, math.floor((since - durable) / (work + stall)))
        safe += saves * work
        since = 0.0
    model = slowdown(5, SaveCosts(step=1.0, stall=stall, mtbf=mtbf, restart=restart, durable=durable))
    assert clock / safe == pytest.approx(float(model), rel=0.02)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SaveCosts(step=0.0, stall=1.0, mtbf=1.0),
        lambda: SaveCosts(step=1.0, stall=-1.0, mtbf=1.0),
        lambda: slowdown(0, SaveCosts(step=1.0, stall=1.0, mtbf=1.0)),
        lambda: Question(workers=0),
        lambda: Question(mtbf=1.0, mtbf_per_worker=1.0),
        lambda: Question(mtbf=1.0, mtbf_per_node=1.0, nodes=2),
        lambda: Question(mtbf_per_node=1.0),
        lambda: Question(nodes=0),
        lambda: Question(nodes=3, workers=2),
        lambda: Question(backend="mpi"),
    ],
)
def test_impossible_questions_are_refused_in_one_line(call: Callable[[], object]) -> None:
    with pytest.raises(BadInput) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_the_rate_and_the_limit_of_a_noisy_curve_are_found() -> None:
    c, steps = 0.998, np.arange(900)
    losses = 2.0 + 3.0 * c ** (2 * steps) + 0.05 * np.random.default_rng(0).standard_normal(900)
    found = convergence(losses)
    assert found is not None
    assert found.rate.holds(c)
    assert found.limit == pytest.approx(2.0, abs=0.05)
    assert found.left.value == pytest.approx(3.0 * c**1800, abs=0.05)


@pytest.mark.parametrize("losses", [[1.0] * 10, list(np.linspace(1, 2, 90)), [1.0] * 90, [math.nan] * 90])
def test_losses_that_do_not_converge_tell_nothing(losses: list[float]) -> None:
    assert convergence(losses) is None


def test_the_costs_of_a_run_are_read_from_its_history() -> None:
    costs = run_costs(calm().events)
    assert (costs.workers, costs.batch, costs.writer, costs.save_every) == (4, 64, "blocking", 10)
    assert costs.step.value == pytest.approx(0.5)
    assert costs.start is not None
    assert costs.start.value == pytest.approx(2.25)  # with the save of the first state
    assert costs.stall is not None
    assert costs.stall.value == pytest.approx(0.25)
    assert costs.stalls["blocking"].value == pytest.approx(0.25)
    assert (costs.restart, costs.live, costs.struck, costs.failed, costs.losses) == (None, {}, 0, 0, None)


def test_what_a_save_slows_down_is_a_part_of_its_cost() -> None:
    """Training waits for an eighth of a second; the two steps in which the save is written take a quarter longer."""
    run = FakeHistory()
    run.launches(1.0)
    for number in range(40):
        if number % 10 == 0:
            run.saves(snapshot=0.125)
        run.trains(0.0, 0.75 if number % 10 < 2 else 0.5)
        if number % 10 == 1:
            run.rank_0(Commit(1, number - 1, 4000, 1.25))
    costs = run_costs(run.events)
    assert costs.stall is not None
    assert costs.stall.value == pytest.approx(0.125 + 2 * 0.25)
    assert costs.stalls["blocking"].value == pytest.approx(0.125)


def test_steps_that_happen_to_be_quicker_beside_a_save_do_not_make_its_wait_cheaper() -> None:
    run = FakeHistory()
    run.launches(1.0)
    for number in range(40):
        if number % 10 == 0:
            run.saves(snapshot=0.125)
            run.rank_0(Commit(1, number, 4000, 1.0))
        run.trains(0.0, 0.25 if number % 10 < 2 else 0.5)
    costs = run_costs(run.events)
    assert costs.stall is not None
    assert costs.stall.value == pytest.approx(0.125)


@pytest.mark.parametrize("seed", seeds(25))
def test_whatever_a_run_went_through_it_gives_an_advice_or_says_that_it_trained_too_little(seed: int) -> None:
    run = fake_runs.random_run(random.Random(seed))
    if len(run.standing) < 15:
        with contextlib.suppress(BadInput):
            advise(run.events)
        return
    found = advise(run.events)
    assert found.recovery in found.prices
    assert found.save_every >= 1
    for price in found.prices.values():
        assert price.seconds.low <= price.seconds.value <= price.seconds.high
    json.dumps(found.to_json(), allow_nan=False)


def test_a_run_that_trained_nothing_gives_no_advice() -> None:
    run = FakeHistory()
    run.launches()
    run.trains()
    with pytest.raises(BadInput, match="train for longer"):
        advise(run.events)


def test_a_restart_that_was_never_seen_is_inferred_from_the_start_and_said_to_be() -> None:
    found = advise(calm().events, Question(mtbf=4 * HOUR))
    again = restart_time(found.costs, Question())
    assert again.holds(2.25)
    assert again.high > 2 * again.value
    assert any("The time of a restart" in line for line in found.unknown)
    assert any("The time of forward and skip" in line for line in found.unknown)
    assert any("How fast training converges" in line for line in found.reasons)
    assert found.prices["forward"].seconds.basis == BENCHMARK


def test_a_restart_that_was_seen_is_taken_instead() -> None:
    run = calm()
    run.dies(0.5, injected="kill")
    run.restarts(3.0)
    for _ in range(4):
        run.trains(0.0, 0.5)
    costs = run_costs(run.events)
    assert costs.restart is not None
    assert costs.restart.value == pytest.approx(3.75)
    assert restart_time(costs, Question()).basis == MEASURED
    assert restart_time(costs, Question(restart=600.0)) == Estimate.exact(600.0, GIVEN)
    assert (costs.struck, costs.failed) == (1, 0)


def test_a_live_recovery_that_was_seen_is_what_training_stood_still_for() -> None:
    run = calm()
    run.strikes("kill", 2)
    run.supervisor(detected(1, 2, "signal"))
    run.passes("recovery", 0.75)
    run.rank_0(Regroup(1, 1, 40, "forward", (0, 1, 3), (2,), (5, 7), seconds=0.75))
    run.passes("compute", 0.5)
    run.reports(40, Seconds(0.0, 1.25, 0.0))
    costs = run_costs(run.events)
    assert costs.recovery == "forward"
    assert costs.live["forward"].value == pytest.approx(0.75)
    assert prices(costs, Question())["forward"].stands.basis == MEASURED


def test_advice_for_live_recovery_says_what_to_choose_over_nccl() -> None:
    question = Question(workers=8, step=5.0, mtbf=HOUR, restart=300.0, stall=1.0)
    for events, over_nccl in ((calm().events, "untested"), (sharded(calm().events), "restarts after every loss")):
        advice = advise(events, question)
        assert advice.recovery != "restart"
        (line,) = [line for line in advice.unknown if "NCCL" in line]
        assert over_nccl in line
        assert f"--recovery restart --save-every {advice.outlooks['restart'].interval.best}" in line
        known = advise(events, replace(question, backend="gloo"))
        assert known.recovery == advice.recovery
        assert not [line for line in known.unknown if "NCCL" in line]
    alone = advise(calm().events, replace(question, lost=Fraction(1)))
    assert alone.recovery == "restart"
    assert not [line for line in alone.unknown if "NCCL" in line]


def test_a_stall_that_is_given_is_not_explained_by_that_of_the_run() -> None:
    assert "of which training waits" in str(advise(calm().events))
    assert "of which training waits" not in str(advise(calm().events, Question(stall=1.0)))


def test_live_recoveries_are_counted_under_their_own_strategies() -> None:
    run = calm()
    for number, (strategy, lost, seconds) in enumerate((("forward", 2, 0.75), ("replay", 3, 2.0)), start=1):
        run.strikes("kill", lost)
        run.supervisor(detected(1, lost, "signal"))
        run.passes("recovery", seconds)
        run.rank_0(Regroup(1, number, 39 + number, strategy, (0, 1), (lost,), seconds=seconds))
        run.passes("compute", 0.5)
        run.reports(39 + number, Seconds(0.0, 0.5 + seconds, 0.0))
    costs = run_costs(run.events)
    assert {name: pause.value for name, pause in costs.live.items()} == pytest.approx({"forward": 0.75, "replay": 2.0})


def costs_of(**changed: object) -> RunCosts:
    return replace(run_costs(calm().events), **changed)  # type: ignore[arg-type]


def test_iterations_are_those_since_a_save_none_the_lost_part_or_one() -> None:
    found = prices(costs_of(save_every=50), Question(lost=Fraction(1, 8)))
    assert found["restart"].iterations.value == pytest.approx(24.5, abs=1)
    assert (found["restart"].iterations.low, found["restart"].iterations.high) == (2, 48)
    assert found["replay"].iterations.high == 0
    assert found["forward"].iterations.value == pytest.approx(1 / 8)
    assert found["skip"].iterations.value == 1
    assert found["restart"].seconds.value > found["replay"].seconds.value


def test_a_step_that_is_dropped_counts_as_an_iteration_and_not_as_seconds_too() -> None:
    found = prices(costs_of(), Question())
    assert found["skip"].seconds == found["forward"].seconds


def test_a_replacement_may_start_sooner_than_all_workers_did_together() -> None:
    costs = costs_of()
    found = prices(costs, Question())
    assert costs.start is not None
    assert found["replay"].seconds.low < found["restart"].stands.low
    assert found["replay"].seconds.holds(costs.start.value / costs.workers)
    assert found["replay"].seconds.value < found["restart"].stands.value


def test_nobody_goes_on_alone_or_where_all_are_lost() -> None:
    assert list(prices(costs_of(workers=1), Question())) == ["restart"]
    assert list(prices(costs_of(), Question(lost=Fraction(1)))) == ["restart"]


def test_a_failure_takes_a_whole_node_if_the_number_of_nodes_is_given() -> None:
    assert lost_part(costs_of(), Question(workers=256)) == Fraction(1, 256)
    assert lost_part(costs_of(), Question(workers=256, nodes=32)) == Fraction(1, 32)
    assert lost_part(costs_of(), Question(workers=256, nodes=32, lost=Fraction(1, 16))) == Fraction(1, 16)


@pytest.mark.parametrize(("workers", "counted"), [(4, "4 workers"), (1, "1 worker")])
def test_more_nodes_than_the_workers_of_the_run_need_the_number_of_workers(workers: int, counted: str) -> None:
    history = calm(workers).events
    message = f"--nodes 32 is more than the {counted} of this run: give --workers for a larger job."
    with pytest.raises(BadInput, match=re.escape(message)):
        advise(history, Question(nodes=32))
    assert advise(history, Question(nodes=workers)).costs.workers == workers
    assert advise(history, Question(nodes=32, workers=64)).large is not None


def test_replay_takes_as_long_as_the_replays_of_the_run_else_as_the_given_restart_else_as_a_start() -> None:
    question = Question(restart=180.0)
    given = replay_time(costs_of(), question)
    assert (given.value, given.low, given.high, given.basis) == (180.0, 180.0, 180.0, GIVEN)
    seen = Estimate(1.5, 1.0, 2.0, MEASURED)
    assert replay_time(costs_of(live={"replay": seen}), question) == seen
    assert replay_time(costs_of(), Question()).basis == INFERRED


def test_a_given_value_is_said_to_be_given_and_no_measured_one_stands_beside_it() -> None:
    found = advise(calm().events, Question(mtbf=HOUR, restart=180.0, stall=1.0, step=3.0))
    priced = {line.split()[1]: line for line in (*found.figures, *found.reasons) if line.startswith("Under ")}
    assert "stops training for 3 min (given)" in priced["restart"]
    assert "stops training for 3 min (given)" in priced["replay"]
    assert any("A step takes 3 s (given). A save delays training by 1 s (given)" in line for line in found.figures)


def test_a_recovery_that_the_run_had_is_not_said_to_be_assumed() -> None:
    history = sharded(replayed().events)
    found = advise(history, Question(mtbf=HOUR))
    assert found.prices["replay"].stands.basis == MEASURED
    assert not any("The time of replay" in line for line in found.unknown)


@pytest.mark.parametrize(
    ("lost", "effect"),
    [(Fraction(1, 4), "under restart their number changes nothing"), (None, "")],
)
def test_the_effect_of_the_lost_workers_is_said_if_their_number_is_given(lost: Fraction | None, effect: str) -> None:
    found = advise(calm().events, Question(lost=lost, backend="nccl"))
    assert effect in found.figures[1]
    assert ("of the workers" in found.figures[1]) == bool(effect)


def test_a_run_of_a_sharded_model_is_advised_to_restart_replay_or_recover_partially() -> None:
    advice = advise(sharded(calm().events))
    assert list(advice.prices) == list(advice.outlooks) == ["restart", "replay", "partial"]
    assert "The model is sharded, so forward and skip are not possible" in str(advice)
    assert list(advise(sharded(calm().events), Question(lost=Fraction(3, 4))).prices) == ["restart"]


def test_the_size_of_a_sharded_model_follows_from_its_snapshots_or_is_asked_for() -> None:
    (size,) = {event.what.bytes for event in calm().events if isinstance(event.what, Commit)}
    advice = advise(sharded(calm().events))
    assert advice.shards is not None
    assert advice.shards.parameters == size / 12
    assert any("Give --parameters" in line for line in advice.unknown)
    unsaved = advise(sharded(calm().events, saved=False))
    assert unsaved.shards is None
    assert "give --parameters" in str(unsaved)


def test_a_copy_of_every_shard_costs_bandwidth_and_partial_recovery_steps() -> None:
    question = Question(
        parameters=7e9, workers=64, backend="gloo", step=5.0, bandwidth=25e9, mtbf=HOUR, restart=300.0, stall=1.0
    )
    advice = advise(sharded(calm().events), question)
    assert advice.shards is not None
    assert advice.shards.delay == pytest.approx(4 * 7e9 / 64 / 25e9)
    faster = advise(sharded(calm().events), replace(question, bandwidth=1e12))
    gained = faster.outlooks["replay"].effective / advice.outlooks["replay"].effective
    assert gained == pytest.approx(1 + advice.shards.delay / 5.0, rel=1e-3)
    assert faster.outlooks["partial"] == advice.outlooks["partial"]
    assert advice.recovery == "replay"
    slower = advise(sharded(calm().events), replace(question, bandwidth=1e9))
    assert slower.recovery == "partial"
    assert slower.large is not None
    assert slower.large.shares["partial"].value > slower.large.shares["replay"].value


def outlook(effective: float) -> Outlook:
    return Outlook("any", SaveInterval(1, 1, 1, 1, 1, effective), effective, effective)


@pytest.mark.parametrize(
    ("restart", "replay", "forward", "skip", "best"),
    [
        (0.990, 0.990, 0.990, 0.990, "restart"),
        (0.980, 0.985, 0.990, 0.990, "replay"),
        (0.900, 0.950, 0.980, 0.980, "forward"),
        (0.900, 0.900, 0.905, 0.950, "skip"),
        (0.9900, 0.9905, 0.995, 0.995, "restart"),
    ],
)
def test_the_simplest_that_is_exact_is_chosen_unless_another_gains_enough(
    restart: float, replay: float, forward: float, skip: float, best: str
) -> None:
    shares = {"restart": restart, "replay": replay, "forward": forward, "skip": skip}
    assert choose({name: outlook(share) for name, share in shares.items()}) == best


def test_where_failures_come_too_quickly_that_is_said() -> None:
    found = advise(calm().events, Question(mtbf=0.001))
    assert any("under every recovery" in line for line in found.reasons)


def test_failures_that_were_seen_are_a_rate_and_those_that_were_injected_are_not() -> None:
    assert failure_rate(costs_of(failed=10, wall=36_000.0), Question()).value == pytest.approx(HOUR)
    assert failure_rate(costs_of(struck=10, wall=36_000.0), Question()).basis == PUBLISHED
    assert failure_rate(costs_of(), Question(mtbf_per_worker=4 * HOUR)).value == pytest.approx(HOUR)
    assert failure_rate(costs_of(), Question(mtbf_per_node=4 * HOUR, nodes=8)).value == pytest.approx(HOUR / 2)
    assert failure_rate(costs_of(), Question(mtbf=7.0)) == Estimate.exact(7.0, GIVEN)


def test_a_node_that_comes_back_is_no_failure() -> None:
    run = calm()
    run.dies(0.5, how="return", rank=-1)
    run.restarts(3.0)
    for _ in range(4):
        run.trains(0.0, 0.5)
    assert (run_costs(run.events).struck, run_costs(run.events).failed) == (0, 0)


def test_published_rates_by_size_are_those_of_the_papers() -> None:
    def hours(workers: int) -> Estimate:
        return failure_rate(costs_of(), Question(workers=workers)).times(1 / HOUR)

    assert hours(16384).value == pytest.approx(1.8, abs=0.05)
    assert hours(16384).high == pytest.approx(54 * 24 / 419, rel=1e-6)
    assert hours(131_072).value * 60 == pytest.approx(14, abs=1)
    assert hours(1024).holds(7.9 * 1.0000001)


def test_an_advice_is_read_as_one_line_and_its_reasons() -> None:
    found = advise(calm().events, Question(mtbf=HOUR))
    assert str(found).splitlines()[0] == f"advice: --recovery {found.recovery} --save-every {found.save_every}"
    assert found.save_every == found.outlooks[found.recovery].interval.best
    assert mean_of([1.0]).basis == MEASURED
    assert found.to_json()["prices"]["restart"]["iterations"]["basis"] == INFERRED
