"""Audit: verdicts from a history alone, each check on histories that pass, fail, and tell nothing."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit import CHECKS, Finding, Verdict, audit, worst
from holdfast.history import JSON, Event, HistoryWriter, read_history

LENGTH = 10  # windows in an epoch of the histories below


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


def test_a_run_that_recovered_passes_every_check() -> None:
    findings = audit(RECOVERED)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert worst(findings) == "pass", findings


def test_a_run_without_failures_passes_every_check() -> None:
    assert worst(audit([*steps(range(25)), commit(20)])) == "pass"


def test_a_run_of_one_rank_passes_every_check() -> None:
    assert worst(audit([*steps(range(25), world=1), commit(20)])) == "pass"


def test_an_empty_history_is_unknown_to_every_check() -> None:
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


def test_what_was_written_to_disk_is_audited_as_it_happened(tmp_path: Path) -> None:
    for who in ("rank-0", "rank-1"):
        with HistoryWriter(tmp_path, who) as history:
            for each in RECOVERED:
                if each.who == who:
                    history.append(each.event, **each.fields)
    assert worst(audit(read_history(tmp_path).events)) == "pass"


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

    def test_without_a_commit_it_is_unknown(self) -> None:
        assert verdict(self.check, steps(range(5))) == ("unknown", "nothing was committed")


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
