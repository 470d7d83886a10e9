"""Audit: verdicts from a history alone, each check on histories that pass, fail, and tell nothing."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_runs import changed, digest, is_a
from fake_two_ranks import by
from holdfast import finding
from holdfast.audit.verdicts import CHECKS, Finding, audit, audit_run, worst
from holdfast.events import (
    KINDS,
    Attempt,
    Commit,
    Detect,
    Done,
    Event,
    Judged,
    Launch,
    Malformed,
    Open,
    Other,
    Plan,
    Recover,
    Restart,
    Seconds,
    Step,
    Strike,
    from_json,
    to_json,
)
from holdfast.finding import Verdict
from holdfast.history.log import HistoryWriter, read_history
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position, SamplePlan

LENGTH = 10  # windows in an epoch of the histories below
PLAN = SamplePlan(samples=167, batch=16, epochs=3, seed=11)
WITHOUT_WITNESSES = [check for check in CHECKS if check != "no_corruption_remains"]
EVERY = 4  # steps between the commits of a life
assert PLAN.steps_per_epoch == LENGTH


def life(*attempts: tuple[int, int], plan: SamplePlan = PLAN) -> list[Event]:
    """A run, attempt by attempt: how many ranks, and before which step they are killed, `plan.steps` being the end.

    When they are killed, rank 0 has reported one step more than the others. What a step leaves behind follows from
    the numbers of ranks that trained it and all before it.
    """
    history: list[Event] = []
    saved: tuple[int, ...] | None = None
    saver = attempts[0][0]
    for attempt, (world, end) in enumerate(attempts, 1):
        history += begun(attempt, world, saved, plan, saver=saver)
        past = saved or ()
        for number in range(len(past), end):
            if number % EVERY == 0 and (number > len(saved or ()) or saved is None):
                history += committed(attempt, past)
                saved, saver = past, world
            past = (*past, world)
            history += trained(number, attempt, world, plan=plan, past=past)
        if end < plan.steps:
            history += trained(end, attempt, world, plan=plan, past=(*past, world))[:1]
        else:
            history += committed(attempt, past)
            history += [each for rank in range(world) for each in by(f"rank-{rank}", Done(attempt, end))]
    return history


def begun(
    attempt: int, world: int, saved: tuple[int, ...] | None, plan: SamplePlan = PLAN, saver: int | None = None
) -> list[Event]:
    """What ranks say before they train: the snapshot with this past came back, or none."""
    start = len(saved or ())
    saver = saver or (saved[-1] if saved else world)
    rng = "restored" if saved is not None and saver == world else "keyed"
    state = None if saved is None else digest("committed", saved)
    back = Recover(attempt, None if saved is None else start, *plan.position(start), rng, 0.5, state=state)
    how = Plan(attempt, *plan.to_json().values(), EVERY, "blocking", "0f", data="d0")
    return [
        each
        for rank in range(world)
        for each in by(f"rank-{rank}", Open(2), Attempt(attempt, world, rank, 1), how, back)
    ]


def committed(attempt: int, past: tuple[int, ...]) -> list[Event]:
    return by("rank-0", Commit(attempt, len(past), 4096, 0.5, state=digest("committed", past)))


def trained(
    number: int,
    attempt: int,
    world: int,
    plan: SamplePlan = PLAN,
    at: Position | None = None,
    past: tuple[int, ...] | None = None,
) -> list[Event]:
    place = at or plan.position(number)
    state = digest("state", past or (number, attempt))
    return [
        Event(
            0.0,
            f"rank-{rank}",
            Step(
                *(attempt, world, rank, *place, number, share(plan, place, rank, world), Seconds(0.0, 1.0, 0.0)),
                state=state + digest("own", state, rank),
                reduced=1,
                stepped=1,
                loss=number / 2,
            ),
        )
        for rank in range(world)
    ]


@cache  # lives of many ranks are made again and again
def share(plan: SamplePlan, at: Position, rank: int, world: int) -> Samples:
    return Samples.of(plan.share(at, rank, world))


WORLDS = (4, 3, 3, 4)  # of the attempts of this one
KILLED = life((4, 13), (3, 17), (3, 17), (4, 30))  # the third attempt commits nothing


def kept(number: int, who: str | None = None) -> Callable[[Event], bool]:
    """Whether an event is of the kept report of this step in `KILLED`."""
    return is_a(Step, who, step=number, attempt=1 if number < 12 else 2 if number < 16 else 4)


def without(history: Iterable[Event], *which: Callable[[Event], bool]) -> list[Event]:
    events = list(history)
    left = [each for each in events if not any(is_meant(each) for is_meant in which)]
    assert len(left) < len(events)
    return left


def inserted(history: Sequence[Event], before: Callable[[Event], bool], *others: Event) -> list[Event]:
    place = next(i for i, each in enumerate(history) if before(each))
    return [*history[:place], *others, *history[place:]]


def because(history: Sequence[Event]) -> dict[str, str]:
    """Why each check fails that does; at least one does."""
    findings = audit(history)
    assert worst(findings) == "fail", findings
    return {finding.check: finding.because for finding in findings if finding.verdict == "fail"}


def found(check: str, history: Sequence[Event]) -> tuple[Verdict, str]:
    finding = next(finding for finding in audit(history) if finding.check == check)
    return finding.verdict, finding.because


def not_passed(history: Sequence[Event]) -> dict[str, tuple[Verdict, str]]:
    return {each.check: (each.verdict, each.because) for each in audit(history) if each.verdict != "pass"}


def test_a_run_that_was_killed_three_times_passes_every_check() -> None:
    findings = audit(KILLED)
    assert [finding.check for finding in findings] == WITHOUT_WITNESSES
    assert worst(findings) == "pass", findings
    left = "7 samples of each epoch do not fill a batch and are left out of that epoch"
    assert {finding.check: finding.because for finding in findings} == {
        "history_is_readable": f"{len(KILLED)} events of 4 writers",
        "every_rank_has_a_history": "the histories of 4 ranks",
        "every_start_is_an_attempt": "14 starts of a rank in 4 attempts",
        "one_plan": f"4 attempts by one plan: 3 epochs of 10 steps of 16 samples; {left}",
        "reached_the_end": "all ranks were done at step 30 in attempt 4",
        "restores_only_committed": "10 restores, 9 committed steps",
        "restored_states_agree": "10 of 10 restores continued with what was committed",
        "generators_restored": "3 of 10 restores with the generators as saved, 7 keyed for another number of ranks",
        "lost_workers_are_declared": "no worker was lost or joined while the others continued",
        "every_step_follows_the_last": "30 steps from epoch 0 cursor 0 to epoch 2 cursor 9",
        "all_ranks_report_every_step": "30 steps reported by all ranks of their world",
        "every_sample_trained_once": f"30 steps of 16 samples: none repeated, missing or extra; {left}",
        "every_step_was_trained": "116 shares of steps trained: gradients reduced, optimizers stepped, "
        "or states changed",
        "repeated_steps_agree": "2 of 2 repeated steps came out the same; attempt 3 continued from step 16; "
        "4 steps trained again by another number of ranks",
    }


@pytest.mark.parametrize("world", [1, 2, 16])
def test_a_run_without_failures_passes_every_check(world: int) -> None:
    findings = audit(life((world, 30)))
    assert worst(findings) == "pass", findings


def test_an_unfinished_run_is_unknown_and_its_progress_is_named() -> None:
    findings = audit(life((4, 13), (4, 18)))
    assert {finding.check: finding.because for finding in findings if finding.verdict != "pass"} == {
        "reached_the_end": "the run did not reach its end: 19 steps of 30 trained, 16 of them committed"
    }
    assert worst(findings) == "unknown"
    samples = next(finding for finding in findings if finding.check == "every_sample_trained_once")
    assert samples.because.endswith("left out of that epoch; 1 step not reported by all ranks or not committed yet")


@pytest.mark.parametrize("lived", [0, 1, 2])
def test_a_run_that_never_reached_its_loop_has_one_finding(lived: int) -> None:
    crash = Detect(1, 0, 0, "error", "")
    told = by("supervisor", Open(2), Launch(1, 1), crash, Restart(2, 1), crash._replace(attempt=2))
    ranks = [each for number in (1, 2)[:lived] for each in by("rank-0", Open(2), Attempt(number, 1, 0, 7))]
    because = "no rank reached its training loop in 2 attempts: nothing was trained yet"
    assert audit([*told, *ranks]) == (Finding("training_has_begun", "unknown", because),)


def test_an_error_in_a_run_that_never_reached_its_loop_is_reported_too() -> None:
    wrong, unknown = audit(by("rank-0", Open(2), Attempt(1, 1, 5, 7)))
    assert (wrong.check, wrong.verdict) == ("every_start_is_an_attempt", "fail")
    assert (unknown.check, unknown.verdict) == ("training_has_begun", "unknown")


def test_an_empty_history_passes_nothing() -> None:
    assert {finding.verdict for finding in audit([])} == {"unknown"}


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "unknown"], "unknown"),
        (["unknown", "fail", "pass"], "fail"),
        ([], "unknown"),
    ],
)
def test_the_worst_verdict_wins(verdicts: list[Verdict], expected: Verdict) -> None:
    assert worst(Finding("some check", each, "") for each in verdicts) == expected


def write(folder: Path, history: Iterable[Event]) -> None:
    for who in sorted({each.who for each in history}):
        writer = HistoryWriter(folder, who)
        writer._lines.clear()  # the histories here tell of their openings themselves
        for each in history:
            if each.who == who:
                writer.append(each.what)
        writer.close()


def test_what_was_written_to_disk_is_audited_as_it_happened(tmp_path: Path) -> None:
    write(tmp_path / "history", KILLED)
    assert audit_run(tmp_path) == audit(read_history(tmp_path).events) == audit(KILLED)


def test_torn_lines_are_reported_and_break_nothing(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    with (tmp_path / "rank-1.jsonl").open("ab") as file:
        lines = (tmp_path / "rank-1.jsonl").read_bytes().count(b"\n")
        file.write(b'{"event": "st')
    readable, *findings = audit_run(tmp_path)
    assert worst([readable, *findings]) == "pass"
    assert f"killed writers left 1 torn line: rank-1.jsonl line {lines + 1}, 13 bytes" in readable.because


def test_a_damaged_line_fails_and_the_other_lines_are_checked(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    whole = (tmp_path / "rank-1.jsonl").read_bytes()
    (tmp_path / "rank-1.jsonl").write_bytes(whole.replace(b'"attempt"', b'"att', 1))
    findings = audit_run(tmp_path)
    assert [finding.check for finding in findings] == WITHOUT_WITNESSES
    assert findings[0].verdict == "fail"
    assert findings[0].because.startswith(
        "1 line cannot be right: a damaged event of rank-1 (rank-1.jsonl, line 2): it is not JSON from character"
    )
    assert findings[0].because.endswith("restore the file from a copy")
    assert next(finding.verdict for finding in findings if finding.check == "one_plan") == "pass"


def test_a_line_longer_than_any_event_fails_without_reading_it_whole(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    os.truncate(tmp_path / "rank-1.jsonl", 6 << 30)  # sparse: it holds zeros
    assert "it is longer than any event" in audit_run(tmp_path)[0].because


def test_a_line_that_does_not_say_what_it_must_is_named_by_file_and_number(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    whole = (tmp_path / "rank-1.jsonl").read_bytes()
    (tmp_path / "rank-1.jsonl").write_bytes(whole.replace(b'"cursor": 0', b'"cursor": null', 1))
    assert audit_run(tmp_path)[0].because == (
        "1 line cannot be right: a recover event of rank-1 (rank-1.jsonl, line 4): its cursor is wrong (null is not a "
        "whole number from 0 to 2^63 - 1)"
    )


def test_a_line_in_the_file_of_another_writer_fails(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    (tmp_path / "rank-0.jsonl").rename(tmp_path / "rank-9.jsonl")
    readable = audit_run(tmp_path)[0]
    assert readable.verdict == "fail"
    assert "rank-9.jsonl has a line of rank-0" in readable.because


def test_an_impossible_world_size_fails() -> None:
    why = because(changed(KILLED, kept(14), world=10**12))
    assert (
        "rank-0 wrote a step event of step 14 for attempt 2, rank 0 of 1000000000000"
        in why["every_start_is_an_attempt"]
    )
    everywhere = changed(changed(KILLED, is_a(Step, attempt=2), world=10**12), is_a(Attempt, attempt=2), world=10**12)
    assert not_passed(everywhere)["every_rank_has_a_history"][0] == "unknown"


class TestHistoryIsReadable:
    check = "history_is_readable"

    @pytest.mark.parametrize(("said", "why"), [({"cursor": None}, "its cursor is wrong"), ({}, "cursor is missing")])
    def test_a_recover_without_a_cursor_fails_and_is_named(self, said: dict[str, Any], why: str) -> None:
        """Steps of a dead attempt must not count because nobody can say where the next went on."""
        place = next(i for i, each in enumerate(KILLED) if is_a(Recover, "rank-1", attempt=2)(each))
        fields = {name: value for name, value in to_json(KILLED[place].what).items() if name != "cursor"}
        wrong = KILLED[place]._replace(what=from_json("recover", {**fields, **said}))
        assert isinstance(wrong.what, Malformed)
        verdict, reason = found(self.check, [*KILLED[:place], wrong, *KILLED[place + 1 :]])
        assert verdict == "fail"
        assert reason.startswith(f"1 line cannot be right: a recover event of rank-1: {why}")

    def test_unknown_kinds_do_not_fail(self) -> None:
        assert (
            worst(audit([*KILLED, *by("rank-0", Other("eclipse", {})), *by("observatory", Other("eclipse", {}))]))
            == "pass"
        )


class TestEveryRankHasAHistory:
    check = "every_rank_has_a_history"

    def test_histories_of_other_nodes_that_are_not_here_leave_it_unknown_and_are_named(self) -> None:
        here = [each for each in life((4, 13), (4, 30)) if each.who not in ("rank-2", "rank-3")]
        found = not_passed(here)
        assert {verdict for verdict, _ in found.values()} == {"unknown"}
        assert found[self.check][1] == (
            "there is no history of rank-2, rank-3 of the 4 ranks of attempt 1: bring its file back into "
            "history/ or, if it ran on another node, name the folder of that node with --node-folder"
        )

    def test_a_rank_that_died_before_it_could_write_and_never_trained_is_not_missed(self) -> None:
        early = by("rank-0", Open(2), Attempt(1, 5, 0, 1))
        later = [
            each._replace(what=each.what._replace(attempt=2)) if hasattr(each.what, "attempt") else each
            for each in life((4, 30))
        ]
        assert worst(audit([*early, *later])) == "pass"


class TestEveryStartIsAnAttempt:
    check = "every_start_is_an_attempt"

    def fails(self, history: Sequence[Event], why: str) -> None:
        verdict, reason = found(self.check, history)
        assert (verdict, reason) == ("fail", why)

    def test_a_second_session_with_the_same_attempt_fails(self) -> None:
        """Without a recover its steps would be counted beside those of the first."""
        again = [each for each in life((2, 13), (2, 30)) if not is_a(Recover, attempt=2)(each)]
        again = changed(again, lambda each: getattr(each.what, "attempt", None) == 2, attempt=1)
        self.fails(again, "rank-0 wrote a step event in attempt 1 before its recover event")
        honest = changed(life((2, 13), (2, 30)), lambda each: getattr(each.what, "attempt", None) == 2, attempt=1)
        self.fails(honest, "rank-0 started attempt 1 after attempt 1")

    @pytest.mark.parametrize(("kind", "what"), [(Attempt, "attempt"), (Plan, "plan"), (Recover, "recover")])
    def test_a_session_that_trains_before_its_first_events_fails(self, kind: type[Any], what: str) -> None:
        history = without(life((1, 30)), is_a(kind), is_a(Commit))
        told = "plan" if kind is Attempt else "recover" if kind is Plan else "step"
        if kind is not Attempt:
            self.fails(history, f"rank-0 wrote a {told} event in attempt 1 before its {what} event")
        assert found(self.check, history)[0] == "fail"

    def test_a_session_without_an_open_event_fails(self) -> None:
        self.fails(without(life((1, 30)), is_a(Open)), "rank-0 has no open event before its first event")

    def test_a_rank_of_another_number_fails(self) -> None:
        alien = changed(KILLED, kept(14, "rank-1"), rank=2)
        self.fails(
            alien,
            "rank-1 wrote a step event of step 14 for attempt 2, rank 2 of 3, in a session of attempt 2, rank 1 of 3",
        )

    def test_a_rank_that_is_not_in_the_world_of_its_attempt_fails(self) -> None:
        alien = [each._replace(who="rank-7") for each in begun(4, 4, None)[:1]] + by("rank-7", Attempt(4, 4, 7, 1))
        self.fails([*KILLED, *alien], "rank-7 took part in attempt 4, which had 4 ranks")

    @pytest.mark.parametrize("who", ["rank-01", "rank-x", "somebody"])
    def test_a_done_event_of_an_unknown_writer_fails(self, who: str) -> None:
        history = [*KILLED, *by(who, Done(4, 30))]
        why = f"1 line cannot be right: {who} is not a rank or supervisor, but wrote a done event"
        assert found("history_is_readable", history) == ("fail", why)

    def test_a_done_of_a_rank_that_does_not_exist_fails(self) -> None:
        assert found(self.check, [*KILLED, *by("rank-9", Done(4, 30))])[0] == "fail"

    def test_a_commit_by_another_rank_fails(self) -> None:
        told = by("rank-2", Commit(4, 28, 4096, 0.5))
        self.fails(inserted(KILLED, is_a(Done, "rank-2"), *told), "rank-2 wrote a commit event, but only rank-0 saves")

    def test_a_supervisor_that_trains_and_a_rank_that_judges_fail(self) -> None:
        why = "1 line cannot be right: supervisor wrote a done event, which only a rank writes"
        assert found("history_is_readable", [*KILLED, *by("supervisor", Open(2), Done(4, 30))]) == ("fail", why)
        assert found(self.check, inserted(KILLED, is_a(Done), *by("rank-0", Judged("completed", 4, ""))))[0] == "fail"

    def test_what_was_written_after_the_end_fails(self) -> None:
        late = changed(KILLED, is_a(Done, "rank-0"), step=30)
        self.fails(
            [*late, *trained(30, 4, 4, at=Position(2, 9))[:1]],
            "rank-0 wrote a step event after the end of its attempt 4",
        )

    def test_a_done_before_the_last_step_fails(self) -> None:
        early = changed(KILLED, is_a(Done, "rank-3"), step=29)
        self.fails(early, "rank-3 was done at step 29 in attempt 4, but had trained 30 steps")

    def test_ranks_that_began_in_worlds_of_another_size_fail(self) -> None:
        history = changed(
            KILLED, lambda e: is_a(Attempt, "rank-1", attempt=4)(e) or is_a(Step, "rank-1", attempt=4)(e), world=5
        )
        self.fails(history, "attempt 4 had a world size of 4 for rank-0 and 5 for rank-1")

    @pytest.mark.parametrize("who", ["injected-2", "injected-storage", "injected-storage-2"])
    def test_injected_failures_have_files_of_their_own(self, who: str) -> None:
        assert worst(audit([*KILLED, *by(who, Open(2), Strike(1, 13, "kill", 2))])) == "pass"


class TestPlantedDefects:
    """Each defect is planted in a run that passes; the verdict names the window and what happened to it."""

    def test_a_window_dropped(self) -> None:
        why = because(without(KILLED, kept(14)))
        assert why == {
            "every_step_follows_the_last": "rank-0 in attempt 2 went from epoch 1 cursor 3 (step 13) to epoch 1 cursor 5 (step 15)",
            "every_sample_trained_once": "1 step missing: epoch 1 cursor 4 (step 14)",
        }

    def test_the_last_windows_dropped(self) -> None:
        why = because([each for each in KILLED if not kept(28)(each) and not kept(29)(each)])
        missing = "2 steps missing: epoch 2 cursor 8 (step 28) to epoch 2 cursor 9 (step 29)"
        assert why == {
            "every_start_is_an_attempt": "rank-0 was done at step 30 in attempt 4, but had trained 28 steps",
            "every_sample_trained_once": missing,
            "restores_only_committed": "the commit of step 30 in attempt 4 is of a step that was never reached: "
            "rank-0 trained 28 steps in attempt 4",
        }

    def test_a_window_trained_twice_in_one_attempt(self) -> None:
        again = [each for each in KILLED for _ in range(2 if kept(14)(each) else 1)]
        why = because(again)
        at = "epoch 1 cursor 4 (step 14)"
        assert why["every_step_follows_the_last"] == f"rank-0 in attempt 2 went from {at} to {at}"
        assert why["every_sample_trained_once"] == (f"1 step duplicated: {at} by rank-0, rank-1, rank-2 in attempt 2")

    def test_a_window_trained_again_after_a_restart(self) -> None:
        why = because([*KILLED[:-5], *trained(14, 4, 4), *KILLED[-5:]])
        assert why["every_step_follows_the_last"].endswith(
            "from epoch 2 cursor 9 (step 29) to epoch 1 cursor 4 (step 14)"
        )
        assert why["every_sample_trained_once"] == ("1 step duplicated: epoch 1 cursor 4 (step 14) in attempts 2 and 4")

    def test_a_window_trained_in_the_place_of_the_next(self) -> None:
        history = KILLED
        for rank in range(3):
            same = share(PLAN, Position(1, 3), rank, 3)
            history = changed(history, kept(14, f"rank-{rank}"), samples=same)
        assert because(history) == {
            "every_sample_trained_once": "1 step with other samples: "
            "epoch 1 cursor 4 (step 14): epoch 1 cursor 3 was trained instead"
        }

    def test_windows_swapped_between_epochs(self) -> None:
        history = KILLED
        for rank in range(4):
            history = changed(history, kept(5, f"rank-{rank}"), samples=share(PLAN, Position(2, 5), rank, 4))
            history = changed(history, kept(25, f"rank-{rank}"), samples=share(PLAN, Position(0, 5), rank, 4))
        assert because(history) == {
            "every_sample_trained_once": "2 steps with other samples: "
            "epoch 0 cursor 5 (step 5): epoch 2 cursor 5 was trained instead, "
            "epoch 2 cursor 5 (step 25): epoch 0 cursor 5 was trained instead"
        }

    def test_windows_swapped_between_epochs_by_one_rank(self) -> None:
        wrong = share(PLAN, Position(1, 3), 2, 4)
        why = because(changed(KILLED, kept(23, "rank-2"), samples=wrong))
        assert why == {
            "every_sample_trained_once": "1 step with other samples: "
            "epoch 2 cursor 3 (step 23): rank-2 trained the share of epoch 1 cursor 3 instead"
        }

    def test_a_window_of_an_epoch_that_has_not_come_yet(self) -> None:
        history = life((4, 13))
        for rank in range(4):
            early = share(PLAN, Position(2, 7), rank, 4)
            history = changed(history, kept(7, f"rank-{rank}"), samples=early)
        why = because(history)["every_sample_trained_once"]
        assert "epoch 0 cursor 7 (step 7): epoch 2 cursor 7 was trained instead" in why

    def test_the_labels_of_windows_swapped_between_epochs(self) -> None:
        history = changed(KILLED, kept(25), epoch=0)
        why = because(changed(history, kept(5), epoch=2))
        assert why["every_step_follows_the_last"] == (
            "rank-0 in attempt 1 went from epoch 0 cursor 4 (step 4) to epoch 2 cursor 5 (step 5)"
        )

    @pytest.mark.parametrize("other", [3, 166])
    def test_one_id_changed(self, other: int) -> None:
        ids = PLAN.share(Position(1, 4), 1, 3).copy()
        lost, ids[2] = int(ids[2]), other
        assert lost != other
        why = because(changed(KILLED, kept(14, "rank-1"), samples=Samples.of(ids)))
        assert why == {
            "every_sample_trained_once": "1 step with other samples: "
            f"epoch 1 cursor 4 (step 14): rank-1 trained sample {other} instead of sample {lost}"
        }

    def test_several_ids_changed(self) -> None:
        why = because(changed(KILLED, kept(14, "rank-1"), samples=Samples.of(range(5))))
        assert why["every_sample_trained_once"].endswith("(step 14): rank-1 trained other samples instead")

    def test_a_cursor_advanced_twice(self) -> None:
        """From step 24 on the sampler is one window ahead of the steps, and trains what it says."""
        ahead = [each for each in KILLED if not any(kept(number)(each) for number in range(24, 30))]
        end = len(ahead) - 5
        late = [each for number in range(24, 29) for each in trained(number, 4, 4, at=PLAN.position(number + 1))]
        why = because([*ahead[:end], *late, *ahead[end:]])
        assert why["every_step_follows_the_last"] == (
            "rank-0 in attempt 4 went from epoch 2 cursor 3 (step 23) to epoch 2 cursor 5 (step 24)"
        )
        assert why["every_sample_trained_once"].startswith(
            "1 step missing: epoch 2 cursor 9 (step 29); 5 steps with other samples: "
            "epoch 2 cursor 4 (step 24): epoch 2 cursor 5 was trained instead"
        )

    def test_a_cursor_advanced_twice_by_one_rank(self) -> None:
        wrong = Position(2, 5)
        ahead = changed(KILLED, kept(24, "rank-2"), cursor=5, samples=share(PLAN, wrong, 2, 4))
        why = because(ahead)
        assert "rank-2 in attempt 4 went from epoch 2 cursor 3" in why["every_step_follows_the_last"]
        assert why["every_sample_trained_once"].endswith("rank-2 trained the share of epoch 2 cursor 5 instead")

    def test_a_rank_that_trained_the_share_of_another(self) -> None:
        why = because(changed(KILLED, kept(24, "rank-2"), samples=share(PLAN, Position(2, 4), 0, 4)))
        assert why["every_sample_trained_once"].endswith("(step 24): rank-2 trained the share of rank-0")

    @pytest.mark.parametrize(
        ("left", "said"),
        [
            (slice(1, None), "trained 3 of its 4 samples, 1 missing (sample {first})"),
            (slice(2, None), "trained 2 of its 4 samples, 2 missing"),
            ([0, 0, 1, 2, 3], "trained 5 samples instead of 4, 1 extra (sample {first})"),
            ([0, 0, 1, 1, 2, 3], "trained 6 samples instead of 4, 2 extra"),
        ],
    )
    def test_samples_missing_or_extra(self, left: slice | list[int], said: str) -> None:
        ids = PLAN.share(Position(2, 4), 2, 4)
        why = because(changed(KILLED, kept(24, "rank-2"), samples=Samples.of(ids[left])))
        assert why["every_sample_trained_once"].endswith(f"(step 24): rank-2 {said.format(first=ids[0])}")

    def test_a_window_past_the_end(self) -> None:
        why = because([*KILLED[:-5], *trained(30, 4, 4, plan=replace(PLAN, epochs=4)), *KILLED[-5:]])
        assert why["every_sample_trained_once"] == "1 step extra: epoch 3 cursor 0 (step 30) is not in the plan"

    def test_a_rank_that_never_reported_a_committed_window(self) -> None:
        why = because([each for each in KILLED if not kept(14, "rank-2")(each)])
        assert (
            why["all_ranks_report_every_step"]
            == "rank-2 never reported epoch 1 cursor 4 (step 14), which was committed"
        )
        assert why["every_sample_trained_once"].endswith("epoch 1 cursor 4 (step 14): rank-2 never reported it")

    def test_a_rank_that_does_not_belong(self) -> None:
        alien = [each._replace(who="rank-7") for each in KILLED if kept(14, "rank-1")(each)]
        why = because([*KILLED, *alien])
        assert why["every_start_is_an_attempt"] == "rank-7 has no open event before its first event"
        assert why["every_sample_trained_once"].endswith("trained by a rank that is not of its world")

    def test_many_defects_are_counted_and_a_few_named(self) -> None:
        other = replace(PLAN, seed=12)
        why = because(changed(life((4, 30), plan=other), is_a(Plan), seed=11))
        words = why["every_sample_trained_once"]
        assert words.startswith("30 steps with other samples: epoch 0 cursor 0 (step 0): rank-0 trained other samples")
        assert words.count("epoch 0") == finding.SHOWN
        assert words.endswith(", and more")

    @given(st.integers(0, 29), st.sampled_from(["dropped", "doubled", "changed"]), st.data())
    def test_a_defect_anywhere_fails_and_its_window_is_named(self, number: int, how: str, data: st.DataObject) -> None:
        if how == "dropped":
            history = [each for each in KILLED if not kept(number)(each)]
        elif how == "doubled":
            history = [each for each in KILLED for _ in range(2 if kept(number)(each) else 1)]
        else:
            whose = data.draw(st.sampled_from(["rank-0", "rank-1", "rank-2"]))
            ids = data.draw(st.lists(st.integers(0, 166), max_size=8, unique=True))
            history = changed(KILLED, kept(number, whose), samples=Samples.of(ids))
            if history == KILLED:
                return
        assert f"{PLAN.position(number)} (step {number})" in because(history)["every_sample_trained_once"]


class TestRestoresOnlyCommitted:
    check = "restores_only_committed"

    def test_a_step_that_was_never_committed_fails_and_is_named(self) -> None:
        verdict, reason = found(self.check, without(KILLED, is_a(Commit, step=12)))
        assert (verdict, reason) == ("fail", "rank-0 restored step 12 in attempt 2, not committed by then")

    def test_a_snapshot_of_a_branch_that_was_abandoned_fails(self) -> None:
        """Attempt 2 went back behind the commit of step 12, which attempt 3 restores all the same."""
        history = [*life((2, 13)), *begun(2, 2, (2,) * 8), *begun(3, 2, (2,) * 12)]
        verdict, reason = found(self.check, history)
        assert verdict == "fail"
        assert reason == ("rank-0 restored step 12 in attempt 3, which a later restore had abandoned")

    def test_a_snapshot_of_an_abandoned_branch_that_is_found_again_was_never_reached(self) -> None:
        again = begun(3, 2, (2,) * 12)
        again[2:2] = by("rank-0", Commit(3, 12, 4096, found=True, state=digest("committed", (2,) * 12)))
        verdict, reason = found(self.check, [*life((2, 13)), *begun(2, 2, (2,) * 8), *again])
        assert verdict == "fail"
        assert "is of a step that was never reached: rank-0 trained 8 steps in attempt 2" in reason

    def test_a_commit_of_a_step_that_was_never_reached_fails(self) -> None:
        early = by("rank-0", Commit(1, 16, 4096, 0.5))
        verdict, reason = found(self.check, inserted(KILLED, is_a(Recover, "rank-0", attempt=2), *early))
        assert verdict == "fail"  # in a life that is no longer the first: it is of another attempt, too
        verdict, reason = found(self.check, inserted(life((4, 13)), is_a(Step, "rank-0", step=3), *early))
        assert reason == (
            "the commit of step 16 in attempt 1 is of a step that was never reached: rank-0 trained 14 steps in attempt 1"
        )

    def test_a_commit_counts_if_all_ranks_report_what_it_holds_by_the_end(self) -> None:
        """Rank 0 may tell of it before others have told of their steps: files know no order among each other."""
        early = without(KILLED, is_a(Commit, step=28))
        commit = next(each for each in KILLED if is_a(Commit, step=28)(each))
        assert worst(audit(inserted(early, is_a(Step, "rank-0", attempt=4), commit))) == "pass"

    def test_a_commit_that_rank_0_could_not_record_is_found_later(self) -> None:
        history = without(life((4, 13), (3, 30)), is_a(Commit, step=12))
        told = by("rank-0", Commit(2, 12, 4096, found=True, state=digest("committed", (4,) * 12)))
        assert worst(audit(inserted(history, is_a(Plan, "rank-0", attempt=2), *told))) == "pass"
        late = inserted(history, is_a(Step, "rank-0", attempt=2), *told)
        assert "found the snapshot of step 12 after it had restored one" in because(late)["every_start_is_an_attempt"]

    def test_ranks_that_restored_different_steps_fail(self) -> None:
        history = changed(KILLED, is_a(Recover, "rank-1", attempt=2), restored=8, cursor=8, epoch=0)
        verdict, reason = found(self.check, history)
        assert (verdict, reason) == (
            "fail",
            "rank-1 restored step 8 in attempt 2, but rank-0 restored step 12 in attempt 2",
        )

    @pytest.mark.parametrize(("restored", "planned"), [(12, "epoch 1 cursor 2"), (None, "epoch 0 cursor 0")])
    def test_training_that_continues_at_another_position_than_the_snapshot_fails(
        self, restored: int | None, planned: str
    ) -> None:
        wrong = changed(life((4, 13), (4, 30)), is_a(Recover, attempt=2), restored=restored, epoch=2, cursor=2)
        verdict, reason = found(self.check, wrong)
        assert verdict == "fail"
        assert reason.endswith(f"in attempt 2 and continued with epoch 2 cursor 2 instead of {planned}")

    def test_a_restore_of_a_step_past_the_plan_fails(self) -> None:
        assert (
            "not committed by then" in because([*KILLED, *begun(5, 4, (4,) * 40, replace(PLAN, epochs=5))])[self.check]
        )

    def test_without_a_commit_it_is_unknown(self) -> None:
        assert found(self.check, without(life((2, 3)), is_a(Commit))) == ("unknown", "nothing was committed")


class TestRestoredStatesAgree:
    check = "restored_states_agree"

    def test_fresh_weights_after_a_restore_fail(self) -> None:
        """A model that was replicated and not protected goes on with other weights than were committed."""
        verdict, reason = found(self.check, changed(KILLED, is_a(Recover, "rank-2", attempt=4), state="fresh"))
        assert verdict == "fail"
        assert reason == "rank-2 restored step 16 in attempt 4, but continued with another state than was committed"

    def test_a_commit_of_another_state_fails(self) -> None:
        assert found(self.check, changed(KILLED, is_a(Commit, step=12), state="another"))[0] == "fail"

    def test_a_missing_digest_is_unknown_and_named(self) -> None:
        assert found(self.check, changed(KILLED, is_a(Recover, "rank-1", attempt=3), state=None)) == (
            "unknown",
            "rank-1 restored step 16 in attempt 3 without a digest of what it had in memory then",
        )
        assert found(self.check, changed(KILLED, is_a(Commit, step=16), state=None)) == (
            "unknown",
            "the commit of step 16 in attempt 2 has no digest of its state",
        )

    def test_a_fresh_start_has_nothing_to_compare(self) -> None:
        assert found(self.check, life((2, 30))) == ("pass", "nothing was restored from a snapshot")


class TestEveryStepFollowsTheLast:
    check = "every_step_follows_the_last"

    def fails(self, history: Sequence[Event], why: str) -> None:
        verdict, reason = found(self.check, history)
        assert verdict == "fail", reason
        assert why in reason

    def test_a_gap_after_the_declared_position_fails(self) -> None:
        history = without(life((2, 13), (2, 30)), is_a(Step, attempt=2, step=12))
        self.fails(history, "rank-0 in attempt 2 began with epoch 1 cursor 3 (step 13) instead of step 12")

    def test_a_cursor_that_does_not_advance_fails(self) -> None:
        twice = [each for each in life((1, 30)) for _ in range(2 if is_a(Step, step=1)(each) else 1)]
        self.fails(twice, "went from epoch 0 cursor 1 (step 1) to epoch 0 cursor 1 (step 1)")

    def test_a_step_of_another_position_fails(self) -> None:
        self.fails(
            changed(KILLED, kept(5), epoch=2), "went from epoch 0 cursor 4 (step 4) to epoch 2 cursor 5 (step 5)"
        )

    def test_an_attempt_that_is_not_declared_rolled_back_fails(self) -> None:
        history = changed(life((2, 13), (2, 30)), is_a(Recover, attempt=2), restored=13, cursor=3)
        self.fails(history, "rank-0 in attempt 2 began with epoch 1 cursor 2 (step 12) instead of step 13")

    def test_gaps_in_an_earlier_attempt_fail(self) -> None:
        history = without(life((2, 13), (2, 30)), is_a(Step, attempt=1, step=11))
        self.fails(history, "went from epoch 1 cursor 0 (step 10) to epoch 1 cursor 2 (step 12)")
        cut = without(life((2, 13), (2, 30)), *(is_a(Step, attempt=1, step=step) for step in (10, 11, 12, 13)))
        self.fails(cut, "the run went from epoch 0 cursor 9 (step 9) to epoch 1 cursor 2 (step 12)")

    def test_without_a_kept_step_it_is_unknown(self) -> None:
        assert found(self.check, [*life((1, 1)), *begun(2, 1, ())])[0] == "unknown"

    @given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 25)), max_size=5), st.integers(1, 16))
    def test_a_run_killed_anywhere_any_number_of_times_passes(self, kills: list[tuple[int, int]], world: int) -> None:
        reached, attempts = 0, []
        for ranks, further in kills:
            end = min(reached // EVERY * EVERY + further, PLAN.steps - 1)
            attempts.append((ranks, end))
            reached = max(reached, end)
        findings = audit(life(*attempts, (world, PLAN.steps)))
        assert {each for each in findings if each.verdict != "pass"} == set()


class TestAllRanksReportEveryStep:
    check = "all_ranks_report_every_step"

    def test_it_is_unknown_as_long_as_ranks_are_missing(self) -> None:
        history = without(life((2, 3)), lambda each: each.who == "rank-1" and isinstance(each.what, Step))
        assert found(self.check, history)[0] == "unknown"

    def test_a_rank_missing_from_a_committed_step_fails(self) -> None:
        assert found(self.check, without(KILLED, kept(14, "rank-2"))) == (
            "fail",
            "rank-2 never reported epoch 1 cursor 4 (step 14), which was committed",
        )


class TestOnePlan:
    check = "one_plan"

    def test_what_differs_is_named(self) -> None:
        verdict, reason = found(self.check, changed(KILLED, is_a(Plan, "rank-2", attempt=3), batch=32, config="1e"))
        assert verdict == "fail"
        assert reason == (
            "the plans of rank-0 in attempt 1 and rank-2 in attempt 3 differ in batch (16, then 32), config (0f, then 1e)"
        )

    def test_a_data_set_that_differs_between_ranks_fails_and_the_likely_cause_is_named(self) -> None:
        verdict, reason = found(self.check, changed(KILLED, is_a(Plan, "rank-1", attempt=1), data="d1"))
        assert verdict == "fail"
        assert reason == (
            "the data sets of rank-0 in attempt 1 and rank-1 in attempt 1 hold other samples: "
            "a split or shuffle before attach() without a seed?"
        )
        assert found(self.check, changed(KILLED, is_a(Plan, attempt=2), data="d2"))[0] == "fail"

    def test_a_data_set_that_only_some_tell_of_leaves_it_unknown(self) -> None:
        assert found(self.check, changed(KILLED, is_a(Plan, "rank-1", attempt=2), data=None)) == (
            "unknown",
            "rank-1 has no digest of its data in attempt 2, but others have",
        )

    def test_how_often_to_save_may_change(self) -> None:
        history = changed(KILLED, is_a(Plan, attempt=2), save_every=50, writer="overlapped")
        assert found(self.check, history)[0] == "pass"

    def test_a_plan_with_a_batch_too_large_for_memory_is_unknown(self) -> None:
        history = changed(KILLED, is_a(Plan), batch=2**40, samples=2**44)
        assert found("every_sample_trained_once", history)[0] != "pass"

    def test_a_plan_that_cannot_be_trained_is_unknown(self) -> None:
        verdict, reason = found(self.check, changed(KILLED, is_a(Plan), batch=0))
        assert verdict == "unknown"
        assert "global_batch must be at least 1 (got 0)" in reason

    def test_without_a_plan_it_is_unknown(self) -> None:
        assert found(self.check, without(KILLED, is_a(Plan))) == (
            "unknown",
            "no plan event says which samples to train",
        )

    def test_samples_that_an_epoch_leaves_out_are_counted(self) -> None:
        history = life((2, 30), plan=replace(PLAN, samples=161))
        for check in (self.check, "every_sample_trained_once"):
            left = "; 1 sample of each epoch does not fill a batch and is left out of that epoch"
            assert found(check, history)[1].endswith(left)

    def test_nothing_is_said_of_left_out_samples_if_there_are_none(self) -> None:
        history = life((2, 30), plan=replace(PLAN, samples=160))
        assert found(self.check, history)[1] == "1 attempt by one plan: 3 epochs of 10 steps of 16 samples"
        assert found("every_sample_trained_once", history)[1].endswith("none repeated, missing or extra")

    def test_a_run_that_ends_inside_an_epoch_is_described_by_its_steps(self) -> None:
        history = changed(life((2, 27)), is_a(Plan), limit=28)
        text = "1 attempt by one plan: 28 of the 30 steps of 3 epochs, with 16 samples a step;"
        assert found(self.check, history)[1].startswith(text)


class TestReachedTheEnd:
    check = "reached_the_end"

    def test_a_last_state_that_was_not_committed_fails(self) -> None:
        assert found(self.check, without(KILLED, is_a(Commit, step=30))) == (
            "fail",
            "all ranks were done in attempt 4, with 30 steps of 30 trained, 28 of them committed",
        )

    def test_it_fails_also_where_a_later_attempt_made_up_for_it(self) -> None:
        past = (*(4,) * 12, *(3,) * 4, *(4,) * 12)
        again = begun(5, 4, past)
        for number in (28, 29):
            past = (*past, 4)
            again += trained(number, 5, 4, past=past)
        again += [*committed(5, past), *(each for rank in range(4) for each in by(f"rank-{rank}", Done(5, 30)))]
        assert found(self.check, [*KILLED, *again])[0] == "pass"
        assert found(self.check, [*without(KILLED, is_a(Commit, step=30)), *again]) == (
            "fail",
            "attempt 4 ended at step 30, which was never committed",
        )

    def test_a_rank_without_a_done_event_leaves_the_end_unknown(self) -> None:
        assert found(self.check, without(KILLED, is_a(Done, "rank-3"))) == (
            "unknown",
            "all 30 steps were trained and committed, but not every rank was done: rank-3 was not",
        )

    def test_a_run_that_is_started_again_when_all_is_done_passes(self) -> None:
        past = (*(4,) * 12, *(3,) * 4, *(4,) * 14)
        again = [*begun(5, 4, past), *by("rank-0", Done(5, 30))]
        assert not_passed([*KILLED, *again]) == {}

    def test_a_run_whose_last_state_was_lost_afterwards_is_unknown(self) -> None:
        past = (*(4,) * 12, *(3,) * 4, *(4,) * 12)
        verdict, reason = found(self.check, [*KILLED, *begun(5, 4, past)])
        assert (verdict, reason.endswith("28 steps of 30 trained, 28 of them committed")) == ("unknown", True)


class TestEveryStepWasTrained:
    check = "every_step_was_trained"

    def test_a_loop_whose_body_does_nothing_fails(self) -> None:
        history = changed(life((2, 30)), is_a(Step), reduced=0, stepped=0, state="s" * 32)
        verdict, reason = found(self.check, history)
        assert verdict == "fail"
        assert reason == (
            "epoch 0 cursor 1 (step 1) was handed out to rank-0 in attempt 1 but not trained: no backward pass, no optimizer "
            "step, and the state did not change (29 steps in all)"
        )

    def test_one_window_that_was_only_handed_out_fails_also_as_the_first_of_an_attempt(self) -> None:
        for step, attempt in ((20, 4), (16, 4), (12, 2)):
            before = next(each.what for each in KILLED if kept(step - 1)(each))
            assert isinstance(before, Step)
            idle = changed(KILLED, kept(step), reduced=0, stepped=0, state=before.state)
            verdict, reason = found(self.check, idle)
            assert verdict == "fail"
            assert f"(step {step}) was handed out to rank-0 in attempt {attempt}" in reason

    def test_a_state_that_changes_is_trained_whatever_did_it(self) -> None:
        assert found(self.check, changed(KILLED, kept(20), reduced=0, stepped=0))[0] == "pass"

    @pytest.mark.parametrize("effort", [{"reduced": 1}, {"reduced": 0, "held": 1}])
    def test_gradients_that_never_go_anywhere_fail(self, effort: dict[str, int]) -> None:
        history = changed(life((2, 30)), is_a(Step), stepped=0, state="s" * 32, **effort)
        why = "in 30 steps no optimizer stepped, and the state did not change"
        assert found(self.check, history) == ("fail", why)

    def test_gradients_that_are_held_back_are_trained(self) -> None:
        before = next(each.what for each in KILLED if kept(19)(each))
        assert isinstance(before, Step)
        assert (
            found(self.check, changed(KILLED, kept(20), reduced=0, stepped=0, held=1, state=before.state))[0] == "pass"
        )

    def test_a_sum_that_one_rank_alone_took_part_in_fails(self) -> None:
        assert found(self.check, changed(KILLED, kept(20, "rank-2"), reduced=0)) == (
            "fail",
            "rank-0 and rank-2 reduced 1 and 0 backward passes in step 20 of attempt 4",
        )


class TestRepeatedStepsAgree:
    check = "repeated_steps_agree"

    def test_steps_that_came_out_the_same_are_counted(self) -> None:
        assert found(self.check, life((3, 11), (3, 30)))[1] == (
            "4 of 4 repeated steps came out the same; attempt 2 continued from step 8"
        )
        assert found(self.check, life((3, 30))) == ("pass", "no step was trained again")

    @pytest.mark.parametrize(("name", "value"), [("state", "x" * 32), ("loss", 7.0)])
    def test_the_first_differing_step_is_named_with_both_attempts(self, name: str, value: object) -> None:
        history, ranks = life((3, 11), (3, 30)), "rank-0" if name == "loss" else "rank-0, rank-1, rank-2"
        for step in (9, 10):
            history = changed(history, is_a(Step, "rank-0", attempt=2, step=step), **{name: value})
        if name == "state":
            for who in ("rank-1", "rank-2"):  # or else they would not agree among each other
                history = changed(history, is_a(Step, who, attempt=2, step=9), state="x" * 32)
                history = changed(history, is_a(Step, who, attempt=2, step=10), state="x" * 32)
        assert found(self.check, history) == (
            "fail",
            f"2 of 4 repeated steps came out otherwise, on {ranks}; first, epoch 0 cursor 9 (step 9) came out with another "
            f"{name} in attempt 2 than in 1; attempt 2 continued from step 8",
        )

    def test_what_is_a_ranks_own_may_differ_between_ranks_and_not_between_attempts(self) -> None:
        history = life((3, 11), (3, 30))
        first = next(each.what for each in history if is_a(Step, "rank-1", attempt=2, step=8)(each))
        assert isinstance(first, Step)
        assert first.state
        other = changed(history, is_a(Step, "rank-1", attempt=2, step=8), state=first.state[:16] + "0" * 16)
        assert found(self.check, other)[1] == (
            "1 of 4 repeated steps came out otherwise, on rank-1; first, epoch 0 cursor 8 (step 8) came out with another "
            "state of the buffers, such as BatchNorm's averages, but with the same parameters, in attempt 2 than in 1, but "
            "rank-0 came out the same; attempt 2 continued from step 8"
        )

    def test_ranks_whose_states_differ_after_a_step_fail_and_are_named(self) -> None:
        assert found(self.check, changed(KILLED, kept(22, "rank-2"), state="x" * 32)) == (
            "fail",
            "rank-2 had another state than the other ranks after epoch 2 cursor 2 (step 22) of attempt 4",
        )

    def test_ranks_are_compared_after_steps_that_the_first_of_them_did_not_live_to_report(self) -> None:
        history = without(life((3, 11), (2, 30)), *(is_a(Step, "rank-0", attempt=1, step=step) for step in (9, 10)))
        history = changed(history, is_a(Step, "rank-2", attempt=1, step=9), state="x" * 32)
        assert (
            "had another state than the other ranks after epoch 0 cursor 9 (step 9) of attempt 1"
            in (found(self.check, history)[1])
        )

    def test_steps_of_another_number_of_ranks_are_not_compared_nor_what_follows_from_them(self) -> None:
        """Three ranks trained steps 8 to 12: what four train from there on is not what four had trained before."""
        past = (*(4,) * 8, *(3,) * 4)
        again = [*life((4, 15)), *begun(2, 3, (4,) * 8)]
        for number in range(8, 12):
            again += trained(number, 2, 3, past=past[: number + 1])
        again += [*committed(2, past), *begun(3, 4, past)]
        for number in range(12, 15):
            again += trained(number, 3, 4, past=(*past, *(4,) * (number - 11)))
        assert found(self.check, again) == (
            "pass",
            "no step was trained again by as many ranks; 7 steps trained again by another number of ranks",
        )

    def test_steps_trained_again_by_the_first_number_of_ranks_are_compared_over_what_lies_between(self) -> None:
        history = life((4, 11), (3, 10), (4, 30))  # attempt 3 goes back to step 8 as attempt 2 did
        assert found(self.check, history)[1] == (
            "4 of 4 repeated steps came out the same; attempt 3 continued from step 8; "
            "3 steps trained again by another number of ranks"
        )

    def test_without_fingerprints_it_is_unknown(self) -> None:
        history = changed(life((3, 11), (3, 30)), is_a(Step), state=None)
        assert found(self.check, history) == ("unknown", "4 of 4 repeated steps without a fingerprint")


class TestGeneratorsRestored:
    check = "generators_restored"

    @pytest.mark.parametrize("rng", ["keyed", "none"])
    def test_generators_that_did_not_come_back_in_the_same_world_fail(self, rng: str) -> None:
        history = changed(life((4, 13), (4, 30)), is_a(Recover, "rank-1", attempt=2), rng=rng)
        assert found(self.check, history) == (
            "fail",
            f"rank-1 restored step 12 in attempt 2 with its random generators {rng} instead of restored, with the same world size 4",
        )

    @pytest.mark.parametrize("rng", ["restored", "none"])
    def test_generators_that_cannot_have_come_back_in_another_world_fail(self, rng: str) -> None:
        history = changed(life((4, 13), (3, 30)), is_a(Recover, "rank-1", attempt=2), rng=rng)
        assert found(self.check, history)[0] == "fail"

    def test_what_counts_is_the_world_that_saved_and_not_the_last_attempt(self) -> None:
        history = life((4, 13), (3, 13), (4, 30))  # the second attempt commits nothing
        assert found(self.check, history)[0] == "pass"
        assert found(self.check, changed(history, is_a(Recover, attempt=3), rng="keyed"))[0] == "fail"

    def test_the_world_that_saved_is_known_though_its_commit_event_was_lost(self) -> None:
        history = without(life((4, 13), (3, 30)), is_a(Commit, step=12))
        told = by("rank-0", Commit(2, 12, 4096, found=True, state=digest("committed", (4,) * 12)))
        history = inserted(history, is_a(Plan, "rank-0", attempt=2), *told)
        assert worst(audit(history)) == "pass"
        assert found(self.check, changed(history, is_a(Recover, attempt=2), rng="none"))[0] == "fail"

    def test_a_run_that_began_again_from_nothing_has_nothing_to_restore(self) -> None:
        history = [
            *without(life((4, 3)), is_a(Commit)),
            *changed(life((4, 30)), lambda e: hasattr(e.what, "attempt"), attempt=2),
        ]
        assert not_passed(history) == {}

    def test_without_a_kept_step_it_is_unknown(self) -> None:
        assert found(self.check, begun(1, 1, None))[0] == "unknown"


class TestFromOutside:
    """What a forger found that passed, or that took for ever."""

    def test_a_restored_fingerprint_must_be_that_of_the_step_before(self) -> None:
        (before,) = {each.what.state for each in KILLED if kept(11, "rank-0")(each) and isinstance(each.what, Step)}
        assert before is not None
        true = changed(KILLED, is_a(Recover, attempt=2), fingerprint=before)
        assert worst(audit(true)) == "pass"
        forged = changed(KILLED, is_a(Recover, "rank-1", attempt=2), fingerprint=digest("forged") * 2)
        assert found("restored_states_agree", forged) == (
            "fail",
            "rank-1 restored step 12 in attempt 2, but its parameters are not those after step 11",
        )

    @pytest.mark.parametrize(
        ("kind", "field"), [(Step, "state"), (Commit, "state"), (Recover, "state"), (Plan, "data")]
    )
    def test_an_empty_digest_is_malformed(self, kind: type[Any], field: str) -> None:
        (word,) = (word for word, each in KINDS.items() if each is kind)
        said = to_json(next(each.what for each in KILLED if is_a(kind, attempt=2)(each)))
        assert isinstance(from_json(word, {**said, field: ""}), Malformed)

    def test_an_optimizer_that_stepped_on_one_rank_alone_fails(self) -> None:
        assert found("every_step_was_trained", changed(KILLED, kept(20, "rank-2"), stepped=0)) == (
            "fail",
            "only one of rank-0 and rank-2 had an optimizer step in step 20 of attempt 4",
        )

    def test_ranks_that_kept_their_gradients_to_themselves_fail(self) -> None:
        assert found("every_step_was_trained", changed(KILLED, is_a(Step), reduced=0, held=1)) == (
            "fail",
            "every rank kept its gradients to itself in every step: none were all-reduced",
        )

    def test_attempts_beyond_any_count_take_no_longer(self) -> None:
        far = changed(KILLED, lambda each: getattr(each.what, "attempt", 0) == 4, attempt=1 << 62)
        death = Detect(1, 2, 2, "signal", "", exit=-9, step=12)
        told = by("supervisor", Open(2), Launch(1, 4), death, Judged("completed", 1, ""))
        assert found("lost_workers_are_declared", [*far, *told])[0] == "pass"
