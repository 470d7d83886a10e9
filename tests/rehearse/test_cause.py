"""A rehearsal's judgement: where two histories part, and why, from what the workers saw alone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Corrupt
from holdfast.events import Detect, Restart
from holdfast.rehearse.case import Cause, DivergenceCase
from holdfast.rehearse.cause import of_a_killed_run, of_forgotten, of_unkilled_runs
from holdfast.rehearse.compare import (
    Divergence,
    divergence,
    first_steps,
    left_behind,
    live_divergence,
    unmatched,
    unstable,
)
from holdfast.rehearse.report import Rehearsed, lines, restarts_of_live_recovery
from holdfast.train.observe import observations
from holdfast.train.observe.observations import Ending, Observed, UnprotectedValue, Window, line, parse


def window(step: int, state: str = "", *, attempt: int = 1, rank: int = 0, **more: Any) -> Window:
    """A window of a training that goes as it should, unless more is said of it."""
    before, after = f"tensor w{step}", state or f"tensor w{step + 1}"
    usual: dict[str, Any] = {
        "epoch": 0,
        "ids": f"ids {step}",
        "batch": f"data {step}",
        "drawn": {"torch": f"key {step}"},
        "begun": {"model/w": before, "scheduler/lr": "0.1"},
        "midway": {"model/w": before, "scheduler/lr": "0.1"},
        "after": {"model/w": after, "scheduler/lr": "0.1"},
        "held": {},
        "kept": {},
        "backwards": 1,
        "stepped": 1,
    }
    return Window(rank=rank, attempt=attempt, step=step, **{**usual, **more})


REFERENCE = [window(step) for step in range(6)]


def held(kind: str, mark: str, type: str = "Thing") -> UnprotectedValue:
    return UnprotectedValue(kind=kind, type=type, mark=mark)


def holding(path: str, kind: str, marks: list[str]) -> list[Window]:
    """The reference, with something held that is so at the beginning of each window, and as the next one says at its end."""
    return [
        replace(each, held={path: held(kind, now)}, kept={path: held(kind, then)})
        for each, now, then in zip(REFERENCE, marks, [*marks[1:], "last"], strict=True)
    ]


def resumed(step: int, **more: Any) -> Window:
    """The first window after a kill, which came out otherwise."""
    return window(step, "tensor other", attempt=2, **more)


def judged(reference: list[Observed], run: list[Observed], ignored: frozenset[str] = frozenset()) -> Cause:
    found = divergence(reference, run)
    assert found is not None
    return of_a_killed_run(DivergenceCase(divergence=found, reference=reference, run=run, unstable=ignored))


# Where it is killed


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 4), st.integers(0, 8), st.integers(0, 99))
def test_kills_are_inside_the_training_and_at_most_one_per_step(
    steps: int, per_epoch: int, ranks: int, at_random: int, seed: int
) -> None:
    found = observations.kills(steps, per_epoch, ranks=ranks, at_random=at_random, seed=seed)
    assert found == observations.kills(steps, per_epoch, ranks=ranks, at_random=at_random, seed=seed)
    assert [each.step for each in found] == sorted({each.step for each in found})
    assert all(0 < each.step < steps and 0 <= each.saved <= each.step and 0 <= each.rank < ranks for each in found)
    assert bool(found) == (steps > 1)
    assert all(each.rank == 0 for each in found if each.saved == each.step)  # or the save might never be committed
    if per_epoch < steps:
        assert any(each.step == each.saved == per_epoch for each in found)


def test_a_rehearsal_covers_two_ends_of_epochs_if_they_are_near() -> None:
    assert observations.length(None, 220, 22) == 55
    assert observations.length(None, 5, 22) == 5
    assert observations.length(None, 10_000, 1000) == observations.LONGEST
    assert observations.length(2500, 10_000, 1000) == 2500


# What was seen


def test_observations_survive_json() -> None:
    seen = window(3, held={"rng": held("generator", "a")}, midway=None)
    assert parse(line(seen)) == seen
    ending = Ending(rank=1, attempt=2, backwards=1, stepped=0)
    assert parse(line(ending)) == ending


@pytest.mark.parametrize("text", ["", "{}", "7", '{"what": "Window"}', '{"what": "Ending", "rank": 1}'])
def test_lines_that_are_not_observations_are_refused(text: str) -> None:
    with pytest.raises(Corrupt):
        parse(text)


# Where two runs part


def test_a_run_that_is_trained_again_from_a_save_is_the_same() -> None:
    run = [*REFERENCE[:4], *(window(step, attempt=2) for step in range(2, 6))]
    assert divergence(REFERENCE, run) is None
    assert unmatched(REFERENCE, run) == []
    assert first_steps(run) == (0, 2)
    assert unmatched(REFERENCE, run[:4]) == [4, 5]


def test_the_first_different_window_is_found_with_its_kill() -> None:
    run = [*REFERENCE[:4], window(2, attempt=2), resumed(3), resumed(4)]
    found = divergence(REFERENCE, run)
    assert found is not None
    assert (found.run.step, found.began, found.before) == (3, 2, 4)
    assert found.paths == ["model/w"]


def test_in_a_live_run_the_replacement_that_differs_is_named_before_the_survivors() -> None:
    reference = [*REFERENCE, *(window(step, rank=1) for step in range(6))]
    survivor = [*REFERENCE[:3], *(window(step, "tensor other") for step in range(3, 6))]
    run = [*survivor, *(window(step, rank=1) for step in range(3)), resumed(3, rank=1)]
    found = live_divergence(reference, run, [1, 3, 5])
    assert found is not None
    assert (found.run.step, found.run.rank, found.run.attempt) == (3, 1, 2)
    assert (found.began, found.before) == (3, 3)
    assert live_divergence(reference, reference, [3]) is None


def test_tensors_are_named_before_plain_values() -> None:
    other = resumed(3, after={"model/w": "tensor other", "scheduler/lr": "0.2"})
    assert Divergence(reference=REFERENCE[3], run=other, began=3).paths == ["model/w", "scheduler/lr"]


# Why


def test_a_batch_trained_after_the_next_was_requested_was_fetched_ahead() -> None:
    late = Ending(rank=0, attempt=1, backwards=1, stepped=1)
    reference = [window(0, "tensor w0", backwards=0, stepped=0, midway=None), *REFERENCE[1:], late]
    found = judged(reference, [*reference[:3], resumed(3, backwards=0, stepped=0, midway=None)])
    assert found.word == "fetched ahead"
    assert any("step 3" in each for each in found.evidence)
    assert any("after the last step" in each for each in found.evidence)


def test_a_script_that_accumulates_gradients_by_hand_fetches_nothing_ahead() -> None:
    reference = [replace(each, stepped=each.step % 2) for each in REFERENCE]
    assert judged(reference, [*reference[:3], resumed(3)]).word == "unknown"


def test_state_that_differs_from_the_save_before_training_was_not_put_back() -> None:
    found = judged(REFERENCE, [resumed(3, begun={"model/w": "tensor w3", "scheduler/lr": "0.3"})])
    assert found.word == "not put back"
    assert found.why.startswith("scheduler/lr was not as saved when step 3 began")


def of_two_ranks(path: str) -> tuple[list[Observed], list[Observed]]:
    """A reference in which `path` differs between ranks, and a run in which rank 1 got rank 0's value after a kill."""
    zero, one = ({"model/w": "tensor w3", path: f"tensor of rank {rank}"} for rank in range(2))
    return (
        [window(3, begun=zero), window(3, rank=1, begun=one)],
        [resumed(3, begun=zero), resumed(3, rank=1, begun=zero)],
    )


def test_a_value_of_an_own_object_that_came_back_as_that_of_rank_0_is_named() -> None:
    found = judged(*of_two_ranks("stats/mean"))
    assert found.word == "differs between ranks"
    assert found.why == (
        "stats/mean differs between ranks, and of modules and own objects only rank 0's values are saved: rank 1 "
        "continued with those of rank 0"
    )
    assert found.instead == "write values = {'mean': ...}, protect(..., values=values), and use values['mean']"


def test_statistics_that_ddp_sends_from_rank_0_in_every_forward_are_not_the_cause() -> None:
    assert judged(*of_two_ranks("model/1.running_mean")).word == "unknown"


def test_a_value_of_another_rank_that_is_restored_as_saved_was_put_back() -> None:
    reference, _ = of_two_ranks("stats/mean")
    run = [reference[0], resumed(3, rank=1, begun=reference[1].begun)]  # type: ignore[union-attr]
    assert judged(reference, run).word == "unknown"


@pytest.mark.parametrize(
    ("path", "kind", "type", "advice"),
    [
        ("mean in main()", "tensor", "Tensor", "write values = {'mean': ...}"),
        ("self.stats[0].seen in main()", "value", "int", "write values = {'seen': ...}"),
        ("momentum[0] in main()", "tensor", "DTensor", "keep it in something with state_dict and load_state_dict"),
    ],
)
def test_a_tensor_or_number_belongs_into_a_protected_dict(path: str, kind: str, type: str, advice: str) -> None:
    own = [replace(each, held={path: held(kind, str(each.step), type)}) for each in REFERENCE]
    wrong = {path: held(kind, "0", type)}
    assert judged(own, [resumed(3, held=wrong, kept=wrong)]).instead.startswith(advice)


def test_a_generator_that_started_over_and_is_drawn_from_is_the_cause() -> None:
    reference = holding("noise in main()", "generator", list("abcdef"))
    run = [*reference[:3], resumed(3, held={"noise in main()": held("generator", "a")})]
    assert judged(reference, run).word == "a generator of its own"
    assert judged(reference, run).why.startswith("noise in main() is a Thing")


def test_a_generator_that_is_not_drawn_from_in_that_step_is_not_the_cause() -> None:
    reference = holding("shuffle", "generator", list("abbbbb"))
    reference[5] = replace(reference[5], kept=reference[5].held)
    run = [*reference[:3], resumed(3, held={"shuffle": held("generator", "a")})]
    assert judged(reference, run).word == "unknown"


@pytest.mark.parametrize("kind", ["scheduler", "optimizer", "buffer", "tensor", "value"])
def test_an_unprotected_value_that_started_over_is_named(kind: str) -> None:
    reference = holding("it", kind, list("012345"))
    found = judged(reference, [resumed(3, held={"it": held(kind, "0")}, kept={"it": held(kind, "1")})])
    assert (found.word, found.instead != "") == ("not protected", True)
    assert found.why.startswith("it, ")
    assert "when step 3 began it was 0, and 3 in the reference" in found.evidence


def test_a_value_that_agrees_again_at_the_end_of_the_step_is_not_the_cause() -> None:
    reference = holding("x", "tensor", list("012345"))
    run = [resumed(3, held={"x": held("tensor", "0")}, kept=reference[3].kept)]
    assert judged(reference, run).word == "unknown"


def test_a_value_that_differs_from_run_to_run_is_not_the_cause() -> None:
    reference = holding("time", "value", list("012345"))
    again = holding("time", "value", list("abcdef"))
    moved = frozenset(unstable(reference, again))
    assert moved == {"time"}
    run = [resumed(3, held={"time": held("value", "9")}, kept={"time": held("value", "9")})]
    assert judged(reference, run).word == "not protected"
    assert judged(reference, run, moved).word == "unknown"


def test_work_between_a_batch_and_its_gradient_that_is_not_repeated_came_after_the_boundary() -> None:
    late = {"model/w": "tensor w3", "scheduler/lr": "0.05"}
    reference = [*REFERENCE[:3], replace(REFERENCE[3], midway=late), *REFERENCE[4:]]
    found = judged(reference, [resumed(3)])
    assert found.word == "work after the boundary"
    assert "it changes scheduler/lr" in found.why


def test_a_value_set_in_every_step_is_a_consequence_of_another_lost_value() -> None:
    """A learning rate that is computed from a count of steps."""
    rates = [{"model/w": f"tensor w{step}", "scheduler/lr": f"1/{step}"} for step in range(6)]
    counted = holding("it in main()", "value", list("012345"))
    reference = [replace(each, midway=rate) for each, rate in zip(counted, rates, strict=True)]
    run = [resumed(3, held={"it in main()": held("value", "0")}, kept={"it in main()": held("value", "1")})]
    assert judged(reference, run).why.startswith("it in main(), a Thing, is not protected")


def test_different_data_for_the_same_samples_comes_from_the_dataset() -> None:
    counted = holding("it in main()", "value", list("012345"))
    lost = {"held": {"it in main()": held("value", "0")}, "kept": {"it in main()": held("value", "1")}}
    assert judged(counted, [resumed(3, batch="other", **lost)]).word == "other data"
    inside = holding("dataset.calls", "value", list("012345"))
    lost = {"held": {"dataset.calls": held("value", "0")}, "kept": {"dataset.calls": held("value", "1")}}
    assert judged(inside, [resumed(3, batch="other", **lost)]).why.startswith("dataset.calls")


@pytest.mark.parametrize(
    ("seen", "word", "says"),
    [
        ({}, "not deterministic", "a kernel that is not deterministic"),
        ({"batch": "other"}, "other data", "gave other data for the same samples in step 3"),
        ({"drawn": {"torch": "other"}}, "other data", "gave other data"),
        ({"begun": {"model/w": "tensor v"}}, "not deterministic", "is not the same when training begins"),
        ({"held": {"rng": held("generator", "b")}}, "a generator of its own", "seeded differently in every run"),
    ],
)
def test_the_cause_of_two_runs_that_differ_without_a_kill_is_named(seen: dict[str, Any], word: str, says: str) -> None:
    reference = holding("rng", "generator", list("abcdef"))
    other = replace(reference[3], **{"after": {"model/w": "tensor other"}, **seen})
    again = [*reference[:3], other]
    found = divergence(reference, again)
    assert found is not None
    cause = of_unkilled_runs(DivergenceCase(divergence=found, reference=reference, run=again))
    assert cause.word == word
    assert says in cause.why


def test_a_value_that_did_not_come_back_is_noted_even_without_an_effect() -> None:
    reference = holding("best", "value", list("012345"))
    kept = {"best": held("value", "9")}
    run = [*reference[:3], window(3, attempt=2, held={"best": held("value", "inf")}, kept=kept)]
    assert list(left_behind(reference, run, ())) == ["best"]
    assert left_behind(reference, run, {"best"}) == {}


# What is said


def test_the_answer_comes_first() -> None:
    kill = observations.Kill(step=4, saved=4, rank=0, why="the end of an epoch")
    notes = {"untested": "values that differ between ranks", "unseen": "no epoch ended in these steps"}
    right = Rehearsed(run="killed", steps=6, kills=(kill,), began=(3,), **notes)  # type: ignore[arg-type]
    said = list(lines(right))
    assert said[0].startswith("resumes exactly: 6 steps")
    assert said[1] == "  killed before step 4 (the end of an epoch), continued from step 3"
    assert said[-2:] == ["note: values that differ between ranks", "note: no epoch ended in these steps"]


def test_a_difference_is_printed_with_its_kill_and_cause() -> None:
    run = [*REFERENCE[:3], resumed(2, after={"model/w": "tensor x", "scheduler/lr": "0.2"})]
    found = divergence(REFERENCE, run)
    said = list(lines(Rehearsed(run="killed", divergence=found, cause=judged(REFERENCE, run))))
    assert said[0] == "does not resume exactly: killed before step 3, it continued from step 2 and differs since step 2"
    assert said[1:3] == ["  model: tensor w differs", "  scheduler: lr is 0.2, and 0.1 in the reference"]
    assert said[3].startswith("likely cause: no cause was found")
    assert said[-1].startswith("instead: ")


# Lost without an effect on the protected state


def test_a_tensor_that_is_computed_from_its_lost_value_decides() -> None:
    reference = holding("centre", "tensor", [f"tensor float32[6] {step}" for step in range(6)])
    wrong = {"centre": held("tensor", "tensor float32[6] x")}
    run = [*reference[:3], window(3, attempt=2, held=wrong, kept={"centre": held("tensor", "tensor float32[6] y")})]
    forgotten = left_behind(reference, run, ())
    found = of_forgotten(forgotten, reference, run)
    assert found is not None
    assert found.word == "not protected"
    assert found.why.startswith("centre, a Thing, is not protected")


@pytest.mark.parametrize("mark", ["tensor float32[] ", "tensor float32[1] ", "tensor numpy float64[] ", ""])
def test_a_single_number_that_was_lost_is_only_noted(mark: str) -> None:
    kind = "tensor" if mark else "value"
    reference = holding("total", kind, [f"{mark}{step}" for step in range(6)])
    kept = {"total": held(kind, f"{mark}1")}
    run = [*reference[:3], window(3, attempt=2, held={"total": held(kind, f"{mark}0")}, kept=kept)]
    forgotten = left_behind(reference, run, ())
    assert list(forgotten) == ["total"]
    assert of_forgotten(forgotten, reference, run) is None


def test_a_lost_tensor_that_nothing_reads_is_only_noted() -> None:
    reference = holding("last", "tensor", ["tensor float32[6] 0"] * 6)
    reference[5] = replace(reference[5], kept=reference[5].held)
    wrong = {"last": held("tensor", "tensor float32[6] x")}
    run = [*reference[:3], window(3, attempt=2, held=wrong, kept=wrong)]
    assert of_forgotten(left_behind(reference, run, ()), reference, run) is None


# A counter of the loop


def counted(epochs: int, *, restarts: bool) -> list[Window]:
    """A run of six steps in whose loop `enumerate` counts, from 0 in every epoch or from 0 once."""
    size = 6 // epochs
    return [
        replace(
            each, epoch=each.step // size, kept={"i": held("value", str(each.step % size if restarts else each.step))}
        )
        for each in REFERENCE
    ]


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (counted(2, restarts=True), "write enumerate(epoch, epoch.initial), or use batch.step"),
        (counted(2, restarts=False), "write enumerate(batches, batches.initial), or use batch.step"),
        (
            counted(1, restarts=False),
            "write enumerate(epoch, epoch.initial), or enumerate(batches, batches.initial) in",
        ),
    ],
)
def test_a_counter_that_starts_again_after_a_kill_is_named_with_the_loop_to_write(
    reference: list[Window], says: str
) -> None:
    other = resumed(1, kept={"i": held("value", "0")})
    found = judged(reference, [*reference[:2], other])
    assert found.word == "loop counter"
    assert says in found.instead
    assert "at the end of step 1, i is 0, and 1 in the reference" in found.evidence


def test_a_divergence_of_buffers_alone_is_noticed() -> None:
    after = {"model/w": "tensor w2", "scheduler/lr": "0.1", "model/1.running_mean": "tensor a"}
    reference = [replace(each, after=after) for each in counted(1, restarts=False)]
    other = window(1, attempt=2, kept={"i": held("value", "0")}, after={**after, "model/1.running_mean": "tensor b"})
    found = judged(reference, [*reference[:2], other])
    assert any(line.startswith("only buffers differ (model/1.running_mean)") for line in found.evidence)


def test_a_lost_value_is_named_before_a_counter_of_the_loop() -> None:
    reference = [
        replace(
            each,
            held={"it": held("value", str(each.step))},
            kept={**each.kept, "it": held("value", str(each.step + 1))},
        )
        for each in counted(1, restarts=False)
    ]
    values = {"it": held("value", "0")}
    other = resumed(1, held=values, kept={"i": held("value", "0"), "it": held("value", "1")})
    found = judged(reference, [*reference[:2], other])
    assert found.why.startswith("it, a Thing, is not protected")
    assert "at the end of step 1, i is 0, and 1 in the reference" in found.evidence


def test_kills_that_ended_in_a_restart_under_live_recovery_are_noted_with_the_reason() -> None:
    killed = Detect(1, 1, 1, "signal", "was killed by SIGKILL")
    gave_up = Detect(1, 1, 1, "peer", "cannot continue: a worker was lost: the run restarts from its newest snapshot.")
    assert restarts_of_live_recovery([killed], 3) == ""
    note = restarts_of_live_recovery([killed, gave_up, Restart(2, 2), killed], 3)
    assert note == "1 of 3 kills ended in a restart, not in live recovery: a worker was lost"
    assert f"note: {note}" in [*lines(Rehearsed(run="killed", restarted=note))]
