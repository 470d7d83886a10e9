"""Audit: verdicts from a history alone, each check on histories that pass, fail, and tell nothing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from holdfast.audit.checks import Verdict
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit import defects
from holdfast.audit.verdicts import CHECKS, Finding, audit, audit_run, worst
from holdfast.errors import Corrupt
from holdfast.geometry import Geometry, Position
from holdfast.history import JSON, Event, HistoryWriter, read_history
from holdfast.samples import Samples

LENGTH = 10  # windows in an epoch of the histories below
PLAN = Geometry(samples=167, batch=16, epochs=3, seed=11)
EVERY = 4  # steps between the commits of a life
assert PLAN.steps_per_epoch == LENGTH


def event(kind: str, who: str = "rank-0", **fields: JSON) -> Event:
    return Event(kind, 0.0, who, fields)


def steps(
    numbers: Iterable[int], attempt: int = 1, world: int = 2, who: str | None = None, **fields: JSON
) -> list[Event]:
    ranks = [who] if who else [f"rank-{rank}" for rank in range(world)]
    return [
        event(
            "step",
            rank,
            **{
                "attempt": attempt,
                "step": number,
                "epoch": number // LENGTH,
                "cursor": number % LENGTH,
                "world": world,
                **fields,
            },
        )
        for number in numbers
        for rank in ranks
    ]


def recover(number: int, attempt: int = 2, who: str = "rank-0") -> Event:
    return event("recover", who, attempt=attempt, restored=number, epoch=number // LENGTH, cursor=number % LENGTH)


def commit(number: int, attempt: int = 1) -> Event:
    return event("commit", attempt=attempt, step=number)


def numbered_anew(history: list[Event]) -> list[Event]:
    """The same windows, with step numbers that leave no gap."""
    order = {number: place for place, number in enumerate(dict.fromkeys(e.fields["step"] for e in history))}
    return [Event(e.event, e.time, e.who, {**e.fields, "step": order[e.fields["step"]]}) for e in history]


def verdict(check: str, history: list[Event]) -> tuple[Verdict, str]:
    finding = next(finding for finding in audit(history) if finding.check == check)
    return finding.verdict, finding.because


RECOVERED = [*steps(range(25)), commit(20), *steps(range(25, 28)), recover(20), *steps(range(20, 40), attempt=2)]


def life(*attempts: tuple[int, int], plan: Geometry = PLAN) -> list[Event]:
    """A run, attempt by attempt: how many ranks, and before which step they are killed, `plan.steps` being the end.

    When they are killed, rank 0 has reported one step more than the others.
    """
    history: list[Event] = []
    start, saved_by = 0, 0
    for attempt, (world, end) in enumerate(attempts, 1):
        history += begun(attempt, world, start, "restored" if saved_by == world else "keyed", plan)
        for number in range(start, end):
            if number % EVERY == 0 and (number > start or number == 0):
                history.append(commit(number, attempt))
                start, saved_by = number, world
            history += trained(number, attempt, world, plan=plan)
        if end < plan.steps:
            history += trained(end, attempt, world, plan=plan)[:1]
        else:
            history.append(commit(end, attempt))
            history += [event("done", f"rank-{rank}", attempt=attempt, step=end) for rank in range(world)]
    return history


def begun(attempt: int, world: int, start: int, rng: str, plan: Geometry) -> list[Event]:
    at = plan.position(start)
    back: dict[str, JSON] = {"restored": start, "epoch": at.epoch, "cursor": at.cursor, "rng": rng}
    events: list[Event] = []
    for rank in range(world):
        events.append(event("attempt", f"rank-{rank}", attempt=attempt, world=world, rank=rank, pid=1))
        if rank == 0:
            how = {"save_every": EVERY, "writer": "blocking", "config": "0f"}
            events.append(event("plan", attempt=attempt, **plan.to_json(), **how))
        if attempt > 1:
            events.append(event("recover", f"rank-{rank}", attempt=attempt, **back, passed_over=[], seconds=0.5))
    return events


def trained(number: int, attempt: int, world: int, plan: Geometry = PLAN, at: Position | None = None) -> list[Event]:
    at = at or plan.position(number)
    about: dict[str, JSON] = {
        "attempt": attempt,
        "world": world,
        "epoch": at.epoch,
        "cursor": at.cursor,
        "step": number,
    }
    return [
        event("step", f"rank-{rank}", **about, rank=rank, samples=share(plan, at, rank, world)) for rank in range(world)
    ]


@cache  # lives of many ranks are made again and again
def share(plan: Geometry, at: Position, rank: int, world: int) -> dict[str, JSON]:
    return digest(plan.share(at, rank, world))


def digest(ids: Sequence[int] | np.ndarray) -> dict[str, JSON]:
    return {**Samples.of(ids).to_json()}


KILLED = life((4, 13), (3, 17), (3, 17), (4, 30))  # the third attempt commits nothing


def changed(history: Iterable[Event], which: Callable[[Event], bool], **fields: JSON) -> list[Event]:
    """The history with these fields in the events that are meant; at least one is."""
    events = list(history)
    assert any(map(which, events))
    return [replace(each, fields={**each.fields, **fields}) if which(each) else each for each in events]


def kept(number: int, who: str | None = None) -> Callable[[Event], bool]:
    """Whether an event is of the kept report of this step in `KILLED`."""
    attempt = 1 if number < 12 else 2 if number < 16 else 4
    return lambda each: (
        each.event == "step"
        and (each.fields["step"], each.fields["attempt"]) == (number, attempt)
        and (who is None or each.who == who)
    )


def because(history: Sequence[Event]) -> dict[str, str]:
    """Why each check fails that does; at least one does."""
    findings = audit(history)
    assert worst(findings) == "fail", findings
    return {finding.check: finding.because for finding in findings if finding.verdict == "fail"}


def test_a_run_that_was_killed_three_times_passes_every_check() -> None:
    findings = audit(KILLED)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert worst(findings) == "pass", findings
    assert {finding.check: finding.because for finding in findings} == {
        "one_plan": "4 attempts by one plan: 3 epochs of 10 windows of 16 samples",
        "reached_the_end": "all ranks were done at step 30 in attempt 4",
        "restores_only_committed": "10 restores, 9 committed steps",
        "every_cursor_advances_once": "30 windows from epoch 0 cursor 0 to epoch 2 cursor 9",
        "shares_agree": "30 steps reported by all ranks of their world",
        "every_sample_trained_once": "30 windows of 16 samples: duplicates = missing = extra = 0",
        "generators_restored": "3 restored, 7 keyed for another number of ranks",
    }


@pytest.mark.parametrize("world", [1, 2, 16])
def test_a_run_without_failures_passes_every_check(world: int) -> None:
    findings = audit(life((world, 30)))
    assert worst(findings) == "pass", findings


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 25)), max_size=6), st.integers(1, 16))
def test_a_run_killed_anywhere_any_number_of_times_passes(kills: list[tuple[int, int]], world: int) -> None:
    reached, attempts = 0, []
    for ranks, further in kills:
        end = min(reached // EVERY * EVERY + further, PLAN.steps - 1)
        attempts.append((ranks, end))
        reached = max(reached, end)
    findings = audit(life(*attempts, (world, PLAN.steps)))
    assert worst(findings) == "pass", findings


def test_a_run_that_is_going_on_is_unknown_and_says_how_far_it_got() -> None:
    findings = audit(life((4, 13), (4, 18)))
    assert {finding.check: finding.because for finding in findings if finding.verdict != "pass"} == {
        "reached_the_end": "the run did not reach its end: 19 steps of 30 trained, 16 of them committed"
    }
    assert worst(findings) == "unknown"
    samples = next(finding for finding in findings if finding.check == "every_sample_trained_once")
    assert samples.because.endswith("extra = 0; 1 window not reported by all ranks or committed yet")


def test_an_empty_history_is_unknown_to_every_check() -> None:
    assert {finding.verdict for finding in audit([])} == {"unknown"}


def test_a_history_without_a_plan_is_unknown_to_the_checks_that_need_one() -> None:
    findings = audit([each for each in KILLED if each.event != "plan"])
    unknown = {finding.check for finding in findings if finding.verdict == "unknown"}
    assert unknown == {"one_plan", "reached_the_end", "every_sample_trained_once"}
    assert worst(findings) == "unknown"


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
    writers = {who: HistoryWriter(folder, who) for who in sorted({each.who for each in history})}
    for each in history:
        writers[each.who].append(each.event, **each.fields)
    for writer in writers.values():
        writer.close()


def test_what_was_written_to_disk_is_audited_as_it_happened(tmp_path: Path) -> None:
    write(tmp_path / "history", KILLED)
    readable, *findings = audit_run(tmp_path)
    assert tuple(findings) == audit(read_history(tmp_path).events)
    assert worst([readable, *findings]) == "pass", findings
    assert readable == Finding("history_is_readable", "pass", f"{len(KILLED) + 4} events of 4 writers")


def test_torn_lines_are_said_and_break_nothing(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    with (tmp_path / "rank-1.jsonl").open("ab") as file:
        lines = (tmp_path / "rank-1.jsonl").read_bytes().count(b"\n")
        file.write(b'{"event": "st')
    readable, *findings = audit_run(tmp_path)
    assert worst([readable, *findings]) == "pass"
    assert f"killed writers left 1 torn line: rank-1.jsonl line {lines + 1}, 13 bytes" in readable.because


def test_a_history_that_was_changed_is_no_verdict_but_an_error(tmp_path: Path) -> None:
    write(tmp_path, KILLED)
    whole = (tmp_path / "rank-1.jsonl").read_bytes()
    (tmp_path / "rank-1.jsonl").write_bytes(whole.replace(b'"step"', b'"st', 1))
    with pytest.raises(Corrupt, match="rank-1"):
        audit_run(tmp_path)


def test_a_world_that_cannot_be_is_no_trouble() -> None:
    found = because(changed(KILLED, kept(14), world=10**12))
    assert (
        found["shares_agree"] == "rank-3, rank-4, rank-5 never reported epoch 1 cursor 4 (step 14), which was committed"
    )


class TestPlantedDefects:
    """Each defect is planted in a run that passes; the verdict names the window and what happened to it."""

    def test_a_window_dropped(self) -> None:
        found = because([each for each in KILLED if not kept(14)(each)])
        assert found == {
            "every_cursor_advances_once": "rank-0 in attempt 2 went from epoch 1 cursor 3 (step 13) to epoch 1 cursor 5 (step 15)",
            "every_sample_trained_once": "1 window missing: epoch 1 cursor 4 (step 14)",
        }

    def test_the_last_windows_dropped(self) -> None:
        found = because([each for each in KILLED if not kept(28)(each) and not kept(29)(each)])
        missing = "2 windows missing: epoch 2 cursor 8 (step 28) to epoch 2 cursor 9 (step 29)"
        assert found == {"every_sample_trained_once": missing}

    def test_a_window_trained_twice_in_one_attempt(self) -> None:
        again = [each for each in KILLED for _ in range(2 if kept(14)(each) else 1)]
        found = because(again)
        at = "epoch 1 cursor 4 (step 14)"
        assert found["every_cursor_advances_once"] == f"rank-0 in attempt 2 went from {at} to {at}"
        assert found["every_sample_trained_once"] == (
            f"1 window duplicated: {at} by rank-0, rank-1, rank-2 in attempt 2"
        )

    def test_a_window_trained_again_after_a_restart(self) -> None:
        found = because([*KILLED[:-5], *trained(14, 4, 4), *KILLED[-5:]])
        assert "epoch 1 cursor 4 in attempt 2 and rank-0 in attempt 4" in found["every_cursor_advances_once"]
        assert found["every_sample_trained_once"] == (
            "1 window duplicated: epoch 1 cursor 4 (step 14) in attempts 2 and 4"
        )

    def test_a_window_trained_in_the_place_of_the_next(self) -> None:
        history = KILLED
        for rank in range(3):
            same = share(PLAN, Position(1, 3), rank, 3)
            history = changed(history, kept(14, f"rank-{rank}"), samples=same)
        assert because(history) == {
            "every_sample_trained_once": "1 window with other samples: "
            "epoch 1 cursor 4 (step 14): epoch 1 cursor 3 was trained instead"
        }

    def test_windows_swapped_between_epochs(self) -> None:
        history = KILLED
        for rank in range(4):
            history = changed(history, kept(5, f"rank-{rank}"), samples=share(PLAN, Position(2, 5), rank, 4))
            history = changed(history, kept(25, f"rank-{rank}"), samples=share(PLAN, Position(0, 5), rank, 4))
        assert because(history) == {
            "every_sample_trained_once": "2 windows with other samples: "
            "epoch 0 cursor 5 (step 5): epoch 2 cursor 5 was trained instead, "
            "epoch 2 cursor 5 (step 25): epoch 0 cursor 5 was trained instead"
        }

    def test_windows_swapped_between_epochs_by_one_rank(self) -> None:
        wrong = share(PLAN, Position(1, 3), 2, 4)
        found = because(changed(KILLED, kept(23, "rank-2"), samples=wrong))
        assert found == {
            "every_sample_trained_once": "1 window with other samples: "
            "epoch 2 cursor 3 (step 23): rank-2 trained the share of epoch 1 cursor 3 instead"
        }

    def test_a_window_of_an_epoch_that_has_not_come_yet(self) -> None:
        history = life((4, 13))
        for rank in range(4):
            early = share(PLAN, Position(2, 7), rank, 4)
            history = changed(history, kept(7, f"rank-{rank}"), samples=early)
        found = because(history)["every_sample_trained_once"]
        assert "epoch 0 cursor 7 (step 7): epoch 2 cursor 7 was trained instead" in found

    def test_the_labels_of_windows_swapped_between_epochs(self) -> None:
        history = changed(KILLED, kept(25), epoch=0)
        found = because(changed(history, kept(5), epoch=2))
        assert found["every_cursor_advances_once"] == (
            "rank-0 in attempt 1 went from epoch 0 cursor 4 (step 4) to epoch 0 cursor 6 (step 6)"
        )
        assert found["every_sample_trained_once"] == (
            "1 window missing: epoch 2 cursor 5 (step 25); "
            "1 window with other samples: epoch 0 cursor 5 (step 5): epoch 2 cursor 5 was trained instead"
        )

    @pytest.mark.parametrize("other", [3, 166])
    def test_one_id_changed(self, other: int) -> None:
        ids = PLAN.share(Position(1, 4), 1, 3).copy()
        lost, ids[2] = int(ids[2]), other
        assert lost != other
        found = because(changed(KILLED, kept(14, "rank-1"), samples=digest(ids)))
        assert found == {
            "every_sample_trained_once": "1 window with other samples: "
            f"epoch 1 cursor 4 (step 14): rank-1 trained sample {other} instead of sample {lost}"
        }

    def test_several_ids_changed(self) -> None:
        found = because(changed(KILLED, kept(14, "rank-1"), samples=digest(range(5))))
        assert found["every_sample_trained_once"].endswith("(step 14): rank-1 trained other samples instead")

    def test_a_cursor_advanced_twice(self) -> None:
        """From step 24 on the sampler is one window ahead of the steps, and trains what it says."""
        ahead = [each for each in KILLED if not any(kept(number)(each) for number in range(24, 30))]
        end = len(ahead) - 5
        late = [each for number in range(24, 29) for each in trained(number, 4, 4, at=PLAN.position(number + 1))]
        found = because([*ahead[:end], *late, *ahead[end:]])
        assert found["every_cursor_advances_once"] == (
            "rank-0 in attempt 4 went from epoch 2 cursor 3 (step 23) to epoch 2 cursor 5 (step 24)"
        )
        assert found["every_sample_trained_once"] == "1 window missing: epoch 2 cursor 4 (step 24)"

    def test_a_cursor_advanced_twice_by_one_rank(self) -> None:
        wrong = Position(2, 5)
        ahead = changed(KILLED, kept(24, "rank-2"), cursor=5, samples=share(PLAN, wrong, 2, 4))
        found = because(ahead)
        assert "rank-2 in attempt 4 went from epoch 2 cursor 3" in found["every_cursor_advances_once"]
        assert "epoch 2 cursor 5 of world 4 to rank-2" in found["shares_agree"]
        assert "epoch 2 cursor 4 (step 24): rank-2 never reported it" in found["every_sample_trained_once"]

    def test_a_rank_that_trained_the_share_of_another(self) -> None:
        found = because(changed(KILLED, kept(24, "rank-2"), samples=share(PLAN, Position(2, 4), 0, 4)))
        assert found["every_sample_trained_once"].endswith("(step 24): rank-2 trained the share of rank-0")

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
        found = because(changed(KILLED, kept(24, "rank-2"), samples=digest(ids[left])))
        assert found["every_sample_trained_once"].endswith(f"(step 24): rank-2 {said.format(first=ids[0])}")

    def test_a_window_past_the_end(self) -> None:
        found = because([*KILLED[:-5], *trained(30, 4, 4, plan=replace(PLAN, epochs=4)), *KILLED[-5:]])
        assert found["every_sample_trained_once"] == "1 window extra: epoch 3 cursor 0 is not in the plan"

    def test_a_rank_that_never_reported_a_committed_window(self) -> None:
        found = because([each for each in KILLED if not kept(14, "rank-2")(each)])
        assert found["shares_agree"] == "rank-2 never reported epoch 1 cursor 4 (step 14), which was committed"
        assert found["every_sample_trained_once"].endswith("epoch 1 cursor 4 (step 14): rank-2 never reported it")

    def test_a_rank_that_does_not_belong(self) -> None:
        alien = [replace(each, who="rank-7") for each in KILLED if kept(14, "rank-1")(each)]
        found = because([*KILLED, *alien])
        stranger = "rank-7 reports epoch 1 cursor 4 (step 14) of attempt 2, whose world has 3 ranks"
        assert found["shares_agree"] == stranger
        assert found["every_sample_trained_once"].endswith("epoch 1 cursor 4 (step 14): its shares do not add up to it")

    def test_many_defects_are_counted_and_a_few_told(self) -> None:
        other = replace(PLAN, seed=12)
        found = because(changed(life((4, 30), plan=other), lambda each: each.event == "plan", seed=11))
        words = found["every_sample_trained_once"]
        assert words.startswith(
            "30 windows with other samples: epoch 0 cursor 0 (step 0): rank-0 trained other samples"
        )
        assert words.count("epoch 0") == defects.SHOWN
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
            history = changed(KILLED, kept(number, whose), samples=digest(ids))
            if history == KILLED:
                return
        assert f"{PLAN.position(number)} (step {number})" in because(history)["every_sample_trained_once"]


def test_an_event_that_lacks_what_a_check_reads_makes_it_unknown() -> None:
    found, because = verdict("shares_agree", [event("step", "rank-3", epoch=0, cursor="x", step=1, world=1)])
    assert found == "unknown"
    assert because == "a step event of rank-3 has no whole number 'cursor'"


class TestRestoresOnlyCommitted:
    check = "restores_only_committed"

    def test_a_restore_of_a_committed_step_passes(self) -> None:
        assert verdict(self.check, [commit(20), commit(30), recover(20)])[0] == "pass"

    def test_a_step_that_was_never_committed_fails_and_is_named(self) -> None:
        found, because = verdict(self.check, [commit(20), recover(30)])
        assert found == "fail"
        assert "rank-0 restored step 30 in attempt 2" in because

    def test_a_step_committed_only_after_its_restore_fails(self) -> None:
        assert verdict(self.check, [recover(20), commit(20, attempt=2)])[0] == "fail"

    def test_a_commit_of_an_earlier_attempt_counts_though_another_machines_clock_puts_it_later(self) -> None:
        assert verdict(self.check, [recover(20), commit(20, attempt=1)])[0] == "pass"

    def test_a_recovery_that_restores_nothing_needs_no_commit(self) -> None:
        assert verdict(self.check, [commit(20), event("recover", recovery="forward", dropped=[3])])[0] == "pass"

    @pytest.mark.parametrize("kind", ["commit", "recover"])
    def test_an_event_that_cannot_be_read_makes_it_unknown(self, kind: str) -> None:
        wrong = event(kind, "rank-1", attempt=2, step="x", restored="x")
        assert verdict(self.check, [commit(20), recover(20), wrong])[0] == "unknown"

    def test_without_a_commit_it_is_unknown(self) -> None:
        assert verdict(self.check, steps(range(5))) == ("unknown", "nothing was committed")

    def test_a_commit_found_by_the_restore_counts_for_ranks_whose_clock_is_ahead(self) -> None:
        found = event("commit", attempt=2, step=20, found=True)
        assert verdict(self.check, [recover(20, who="rank-1"), found, recover(20)])[0] == "pass"

    def test_a_commit_found_later_does_not_count(self) -> None:
        assert verdict(self.check, [recover(20), event("commit", attempt=3, step=20, found=True)])[0] == "fail"

    def test_ranks_that_restored_different_steps_fail(self) -> None:
        found, because = verdict(self.check, [commit(20), commit(24), recover(24), recover(20, who="rank-1")])
        assert found == "fail"
        assert because == "rank-1 restored step 20 in attempt 2, and rank-0 restored step 24 in attempt 2"

    def test_an_attempt_that_began_anew_under_the_same_number_is_no_disagreement(self) -> None:
        history = [commit(20), commit(24), recover(20, who="rank-1"), recover(24), recover(24, who="rank-1")]
        assert verdict(self.check, history)[0] == "pass"

    @pytest.mark.parametrize(("restored", "planned"), [(20, "epoch 2 cursor 0"), (None, "epoch 0 cursor 0")])
    def test_training_that_goes_on_elsewhere_than_the_snapshot_ends_fails(
        self, restored: int | None, planned: str
    ) -> None:
        wrong = event("recover", attempt=2, restored=restored, epoch=2, cursor=2)
        found, because = verdict(self.check, [event("plan", **PLAN.to_json()), commit(20), wrong])
        assert found == "fail"
        assert because.endswith(f"in attempt 2 and went on with epoch 2 cursor 2, not {planned}")

    def test_a_restore_of_a_step_past_the_plan_fails(self) -> None:
        found, because = verdict(self.check, [event("plan", **PLAN.to_json()), commit(40), recover(40)])
        assert found == "fail"
        assert because.endswith("went on with epoch 4 cursor 0, not within the plan")


class TestEveryCursorAdvancesOnce:
    check = "every_cursor_advances_once"

    def fails(self, history: list[Event], because: str) -> None:
        found, reason = verdict(self.check, history)
        assert found == "fail", reason
        assert because in reason

    def test_epochs_that_follow_each_other_pass(self) -> None:
        found, because = verdict(self.check, steps(range(35)))
        assert (found, because) == ("pass", "35 windows from epoch 0 cursor 0 to epoch 3 cursor 4")

    def test_steps_declared_rolled_back_pass(self) -> None:
        assert verdict(self.check, RECOVERED)[0] == "pass"

    def test_a_recover_speaks_for_ranks_that_did_not_come_back(self) -> None:
        history = [*steps(range(28), world=4), recover(20), *steps(range(20, 40), attempt=2, world=3)]
        assert verdict(self.check, history)[0] == "pass"

    def test_a_rank_may_come_back_later(self) -> None:
        history = [
            *steps(range(12), world=2),
            recover(10),
            *steps(range(10, 22), attempt=2, world=1),
            recover(20, attempt=3),
            *steps(range(20, 30), attempt=3, world=2),
        ]
        assert verdict(self.check, history)[0] == "pass"

    def test_a_rank_that_goes_back_in_its_own_history_needs_no_attempt(self) -> None:
        without_attempts = [
            Event(e.event, e.time, e.who, {name: value for name, value in e.fields.items() if name != "attempt"})
            for e in [*steps(range(8), world=1), recover(5), *steps(range(5, 12), world=1)]
        ]
        assert verdict(self.check, without_attempts)[0] == "pass"

    def test_undeclared_repetition_fails(self) -> None:
        history = [*steps(range(8)), *steps(range(6, 12), attempt=2)]
        self.fails(history, "rank-0 trained epoch 0 cursor 6 in attempt 1 and rank-0 in attempt 2")

    def test_repetition_before_the_declared_position_fails(self) -> None:
        self.fails([*steps(range(8)), recover(7), *steps(range(6, 12), attempt=2)], "epoch 0 cursor 6")

    def test_a_gap_after_the_declared_position_fails(self) -> None:
        history = [*steps(range(8)), recover(5), *steps(range(6, 12), attempt=2)]
        self.fails(history, "the run went from epoch 0 cursor 4 (step 4) to epoch 0 cursor 6 (step 6)")

    def test_a_cursor_that_advances_twice_fails(self) -> None:
        history = [*steps([*range(5), *range(6, 9)], who="rank-0"), *steps(range(9), who="rank-1")]
        self.fails(history, "rank-0 in attempt 1 went from epoch 0 cursor 4 (step 4) to epoch 0 cursor 6 (step 6)")

    def test_a_cursor_that_does_not_advance_fails(self) -> None:
        self.fails(steps([0, 1, 1, 2]), "went from epoch 0 cursor 1 (step 1) to epoch 0 cursor 1 (step 1)")

    def test_a_last_window_left_out_of_one_epoch_fails(self) -> None:
        self.fails(
            numbered_anew(steps([*range(19), *range(20, 31)])), "from epoch 1 cursor 8 (step 18) to epoch 2 cursor 0"
        )

    def test_a_step_number_left_out_fails_even_at_the_end_of_the_first_epoch(self) -> None:
        self.fails(steps([*range(9), *range(10, 15)]), "from epoch 0 cursor 8 (step 8) to epoch 1 cursor 0 (step 10)")

    def test_an_epoch_left_out_fails(self) -> None:
        self.fails(steps([*range(10), *range(20, 31)]), "from epoch 0 cursor 9 (step 9) to epoch 2 cursor 0 (step 20)")

    def test_a_first_window_left_out_fails(self) -> None:
        self.fails(steps(range(1, 5)), "the run starts at epoch 0 cursor 1")

    def test_without_a_kept_step_it_is_unknown(self) -> None:
        assert verdict(self.check, [*steps(range(3)), recover(0)])[0] == "unknown"

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=5), st.integers(1, 3))
    def test_any_declared_rollbacks_pass_and_any_kept_window_left_out_fails(
        self, failures: list[tuple[int, int]], world: int
    ) -> None:
        history: list[Event] = []
        at = 0
        for attempt, (back, forth) in enumerate([(0, 5), *failures], 1):
            start = max(0, at - back)
            at = start + forth
            history += [recover(start, attempt), *steps(range(start, at), attempt, world)]
        assert verdict(self.check, history)[0] == "pass"
        assert verdict("shares_agree", history)[0] == "pass"
        dropped = [e for e in history if not (e.event == "step" and e.fields["step"] == at - 2)]
        assert verdict(self.check, dropped)[0] == ("fail" if at >= 2 else "pass")


class TestSharesAgree:
    check = "shares_agree"

    def test_ranks_that_agree_pass(self) -> None:
        assert verdict(self.check, steps(range(5))) == ("pass", "5 steps reported by all ranks of their world")

    @pytest.mark.parametrize("field", ["epoch", "cursor", "world"])
    def test_a_rank_that_means_another_window_or_world_fails_and_is_named(self, field: str) -> None:
        history = [*steps([3], who="rank-0"), *steps([3], who="rank-1", **{field: 7})]
        found, because = verdict(self.check, history)
        assert found == "fail"
        assert "rank-1" in because
        assert f"{field} 7" in because

    def test_another_attempt_may_have_another_world(self) -> None:
        history = [*steps(range(5), world=4), recover(3), *steps(range(3, 8), attempt=2, world=3)]
        assert verdict(self.check, history)[0] == "pass"

    def test_it_is_unknown_as_long_as_ranks_are_missing(self) -> None:
        assert verdict(self.check, steps(range(5), world=2, who="rank-0"))[0] == "unknown"

    def test_a_rank_missing_from_a_committed_step_fails(self) -> None:
        history = [*steps(range(5), world=3)[:-1], commit(5)]
        assert verdict(self.check, history) == (
            "fail",
            "rank-2 never reported epoch 0 cursor 4 (step 4), which was committed",
        )

    def test_a_rank_missing_from_a_step_whose_commit_was_rolled_back_is_no_failure(self) -> None:
        history = [*steps(range(8), world=2)[:-1], commit(8), recover(4), *steps(range(4, 6), attempt=2)[:-1]]
        assert verdict(self.check, history)[0] == "pass"


class TestOnePlan:
    check = "one_plan"

    def plan(self, attempt: int = 1, **fields: JSON) -> Event:
        return event("plan", attempt=attempt, **{**PLAN.to_json(), "config": "0f", "save_every": 4, **fields})

    def test_what_differs_is_named(self) -> None:
        found, because = verdict(self.check, [self.plan(), self.plan(2), self.plan(3, batch=32, config="1e")])
        assert found == "fail"
        assert because == "attempts 1 and 3 differ in batch (16, then 32), config (0f, then 1e)"

    def test_how_often_to_save_may_change(self) -> None:
        assert verdict(self.check, [self.plan(), self.plan(2, save_every=50, writer="overlapped")])[0] == "pass"

    def test_a_plan_that_cannot_be_trained_is_unknown(self) -> None:
        found, because = verdict(self.check, [self.plan(batch=0)])
        assert found == "unknown"
        assert "a global batch of 0 samples" in because

    def test_without_a_plan_it_is_unknown(self) -> None:
        assert verdict(self.check, steps(range(3))) == ("unknown", "no plan event says which windows to expect")


class TestReachedTheEnd:
    check = "reached_the_end"

    def test_a_rank_that_stopped_early_fails(self) -> None:
        found = verdict(self.check, changed(KILLED, lambda e: e.event == "done" and e.who == "rank-3", step=29))
        assert found == ("fail", "rank-3 was done at step 29 of 30 in attempt 4")

    def test_a_last_state_that_was_not_committed_fails(self) -> None:
        found = verdict(self.check, [e for e in KILLED if not (e.event == "commit" and e.fields["step"] == 30)])
        assert found == ("fail", "all ranks were done in attempt 4, with 30 steps of 30 trained, 28 of them committed")

    def test_a_rank_that_never_said_so_leaves_it_unknown(self) -> None:
        found = verdict(self.check, KILLED[:-1])
        assert found == ("unknown", "the run did not reach its end: 30 steps of 30 trained, 30 of them committed")

    def test_a_run_that_is_started_again_when_all_is_done_passes(self) -> None:
        again = [*begun(5, 4, 30, "restored", PLAN), event("done", attempt=5, step=30)]
        assert worst(audit([*KILLED, *again])) == "pass"

    def test_a_run_whose_last_state_was_lost_afterwards_is_unknown(self) -> None:
        found, because = verdict(self.check, [*KILLED, *begun(5, 4, 28, "restored", PLAN)])
        assert (found, because.endswith("28 steps of 30 trained, 28 of them committed")) == ("unknown", True)


class TestGeneratorsRestored:
    check = "generators_restored"

    def recovered(self, rng: str | None, who: str = "rank-1", **fields: JSON) -> list[Event]:
        """A run of four ranks that was killed once, where one of them says this of its generators."""
        history = life((4, 13), (4, 30))
        return changed(history, lambda e: e.event == "recover" and e.who == who, rng=rng, **fields)

    @pytest.mark.parametrize("rng", ["keyed", "none"])
    def test_generators_that_did_not_come_back_in_the_same_world_fail(self, rng: str) -> None:
        found, because = verdict(self.check, self.recovered(rng))
        assert found == "fail"
        assert because == (
            f"rank-1 restored step 12 in attempt 2 with its generators {rng}, not restored, in the same world of 4"
        )

    def test_generators_that_did_not_come_back_in_another_world_fail(self) -> None:
        history = changed(life((4, 13), (3, 30)), lambda e: e.event == "recover" and e.who == "rank-1", rng="none")
        assert verdict(self.check, history)[0] == "fail"

    def test_what_counts_is_the_world_that_saved_and_not_the_last_attempt(self) -> None:
        history = life((4, 13), (3, 13), (4, 30))  # the second attempt commits nothing
        assert verdict(self.check, history)[0] == "pass"
        wrong = changed(history, lambda e: e.event == "recover" and e.fields["attempt"] == 3, rng="keyed")
        assert verdict(self.check, wrong)[0] == "fail"

    def test_the_world_that_saved_is_known_though_its_commit_event_was_lost(self) -> None:
        history = [e for e in life((4, 13), (3, 30)) if not (e.event == "commit" and e.fields["step"] == 12)]
        place = next(i for i, e in enumerate(history) if e.event == "recover")
        found = event("commit", attempt=2, step=12, found=True)
        history.insert(place, found)
        assert worst(audit(history)) == "pass"
        assert verdict(self.check, changed(history, lambda e: e.event == "recover", rng="none"))[0] == "fail"

    def test_a_rank_that_does_not_say_leaves_it_unknown(self) -> None:
        assert verdict(self.check, self.recovered(None))[0] == "unknown"

    def test_a_rank_that_went_on_without_saying_what_came_back_fails(self) -> None:
        history = [e for e in life((4, 13), (4, 30)) if not (e.event == "recover" and e.who == "rank-2")]
        found, because = verdict(self.check, history)
        assert found == "fail"
        assert because == "rank-2 trained epoch 1 cursor 2 (step 12) in attempt 2 and never said what came back"

    def test_a_run_that_began_again_from_nothing_has_nothing_to_restore(self) -> None:
        history = [e for e in life((4, 3), (4, 30)) if e.event != "commit" or e.fields["step"] != 0]
        history = changed(history, lambda e: e.event == "recover", restored=None, rng="keyed")
        assert worst(audit(history)) == "pass"

    def test_a_history_that_does_not_tell_who_saved_is_unknown(self) -> None:
        history = [e for e in self.recovered("keyed") if e.event != "commit"]
        assert verdict(self.check, history)[0] == "unknown"

    def test_without_a_kept_step_it_is_unknown(self) -> None:
        assert verdict(self.check, [commit(0)])[0] == "unknown"
