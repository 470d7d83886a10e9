"""Lies about members that were lost: what survivors declare must fit with what everybody wrote, or it does not pass."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import fake_live_runs
from fake_live_runs import LOST_AT, WORLD, FakeLiveRun, found, is_regroup
from fake_runs import PLAN, digest
from holdfast.audit.verdicts import Finding, audit, worst
from holdfast.events import Event, Regroup, Step


def recoveries(events: list[Event]) -> Finding:
    return found(audit(events), "lost_workers_are_declared")


def is_step(*steps: int, of: int | None = None) -> Callable[[str, Any], bool]:
    """Whether this is one of these steps, of this member or of all."""
    return lambda who, what: isinstance(what, Step) and what.step in steps and of in (None, int(who[5:]))


class TestAShareDeclaredMissing:
    """What is declared missing has no part in what came out."""

    def test_a_share_that_its_member_reports_is_not_missing(self) -> None:
        run = FakeLiveRun()
        left, at = (0, 1, 2), PLAN.position(LOST_AT + 1)
        missing = [int(each) for member in (2, 3) for each in PLAN.share(at, member, WORLD)]
        said = Regroup(1, 2, LOST_AT + 1, "forward", left, (2, 3), tuple(missing), 0, 3)
        run.begins(2, LOST_AT + 1, 2, said)
        for member in (0, 1):
            run.says(member, said)
        run.members = left
        run.trains(LOST_AT + 1, LOST_AT + 2)
        run.basis = left
        because = recoveries(run.ends().events)
        assert (because.verdict, "rank-2 reports step 7" in because.because) == ("fail", True)

    def test_a_lost_member_and_the_replay_of_its_step_have_one_state(self) -> None:
        """It had all its sums, and was lost in its save; another lacked one of them, and was lost too. Seen under strikes."""
        run, step = FakeLiveRun(), LOST_AT + 1
        mine = run.share(2, step, digest("shared", step) + digest(2, step))
        run.says(2, mine)
        said = Regroup(1, 2, step, "replay", run.members, (2,), (), 1, 2)
        run.begins(2, step, 2, said)
        for member in (0, 1, 3):
            run.says(member, said)
        assert worst(audit(run.ends().events)) == "pass"
        said = recoveries(run.with_other(lambda _, what: what is mine, state=digest("other") + digest(2, step)))
        assert (said.verdict, "with another state than its replay" in said.because) == ("fail", True)

    def test_a_step_that_is_replayed_lacks_nothing(self) -> None:
        run = FakeLiveRun(2, strategy="replay")
        said = recoveries(run.ends().events)
        assert (said.verdict, "replay" in said.because) == ("fail", True)


class TestAStepThatChangedNothing:
    """Where members were lost, a step without an optimizer step is declared skipped, or is one of many."""

    @pytest.mark.parametrize("kept", [3, 0])
    def test_a_skipped_step_cannot_pass_as_trained(self, kept: int) -> None:
        run = FakeLiveRun(2, strategy="skip").ends()
        assert worst(audit(run.events)) == "pass"
        forged = [self.passed_off(event, kept) if is_regroup(event.who, event.what) else event for event in run.events]
        if not kept:  # moved to the boundary after it
            forged = self.exchanged(forged)
        assert recoveries(forged).verdict == "unknown"
        assert "step 6" in recoveries(forged).because

    @staticmethod
    def passed_off(event: Event, kept: int) -> Event:
        step = LOST_AT if kept else LOST_AT + 1
        return event._replace(what=event.what._replace(step=step, missing=(), kept=kept, redone=0))  # type: ignore[call-arg]

    @staticmethod
    def exchanged(events: list[Event]) -> list[Event]:
        events = list(events)
        for i in range(len(events) - 2, -1, -1):
            if is_regroup(events[i].who, events[i].what):
                events[i], events[i + 1] = events[i + 1], events[i]
        return events

    @staticmethod
    def accumulated(run: FakeLiveRun, every: int, but: int | None = None) -> list[Event]:
        """The run as it would be if gradients of several windows waited for one step of the optimizer."""
        events = []
        for event in run.events:
            what = event.what
            if isinstance(what, Step):
                last = max((step for step in range(every - 1, what.step + 1, every) if step != but), default=-1)
                state = digest("shared", last) + what.state[16:] if what.state else None
                what = what._replace(stepped=int(last == what.step), state=state)
            events.append(event._replace(what=what))
        return events

    @pytest.mark.parametrize("every", [2, 3, 4, 5])
    @pytest.mark.parametrize("how", ["complete", "before", "redone"])
    def test_gradients_of_several_windows_may_wait_for_one_step(self, how: str, every: int) -> None:
        run = FakeLiveRun(2, how=how).ends()
        assert worst(audit(self.accumulated(run, every))) == "pass"

    def test_a_step_of_the_optimizer_that_was_left_out_is_seen_where_they_wait(self) -> None:
        run = FakeLiveRun(2, how="complete").ends()
        skipped = self.accumulated(run, 7, but=LOST_AT)
        assert worst(audit(self.accumulated(run, 7))) == "pass"
        assert recoveries(skipped).verdict == "unknown"

    def test_a_huge_step_number_is_handled(self) -> None:
        run = FakeLiveRun(2, how="complete").ends()
        forged = run.with_other(is_step(LOST_AT), stepped=0, state=digest("shared", LOST_AT - 1) + digest("own"))
        last = max(i for i, event in enumerate(forged) if is_step(PLAN.steps - 1)(event.who, event.what))
        forged[last] = forged[last]._replace(what=forged[last].what._replace(step=2**63 - 1))  # type: ignore[call-arg]
        assert worst(audit(forged)) == "fail"

    def test_a_skipped_step_has_no_optimizer_step(self) -> None:
        run = FakeLiveRun(2, strategy="skip").ends()
        said = recoveries(run.with_other(is_step(LOST_AT), stepped=1))
        assert (said.verdict, "the optimizer of rank-0 stepped" in said.because) == ("fail", True)

    @pytest.mark.parametrize("step", [LOST_AT - 1, LOST_AT])
    def test_a_skipped_step_without_fingerprints_is_unknown(self, step: int) -> None:
        run = FakeLiveRun(2, strategy="skip").ends()
        said = recoveries(run.with_other(is_step(step), state=None))
        assert (said.verdict, "skipped" in said.because) == ("unknown", True)

    def test_more_backward_passes_than_usual_excuse_nothing(self) -> None:
        run = FakeLiveRun(2, strategy="skip").ends()
        moved = digest("shared", LOST_AT) + digest("own")
        assert recoveries(run.with_other(is_step(LOST_AT), reduced=2, state=moved)).verdict == "fail"


class TestMissingFingerprints:
    """A rank that records its state after some steps records it after all."""

    @pytest.mark.parametrize("of", [2, 3])
    def test_a_state_left_out_is_unknown_and_named(self, of: int) -> None:
        run = FakeLiveRun(0).ends()
        said = found(audit(run.with_other(is_step(3, of=of), state=None)), "repeated_steps_agree")
        assert said.verdict == "unknown"
        assert (
            said.because
            == f"rank-{of} has no fingerprint of its state after step 3 of attempt 1, but its other steps have"
        )

    def test_a_missing_fingerprint_is_named_even_if_a_later_session_has_all(self) -> None:
        run = FakeLiveRun(2).joins(2).ends()
        said = found(audit(run.with_other(is_step(3, of=2), state=None)), "repeated_steps_agree")
        assert (said.verdict, "step 3 of attempt 1" in said.because) == ("unknown", True)

    def test_a_rank_without_fingerprints_is_unknown_if_others_have_them(self) -> None:
        run = FakeLiveRun(0).ends()
        none = run.with_other(is_step(*range(PLAN.steps), of=2), state=None)
        said = found(audit(none), "repeated_steps_agree")
        assert (said.verdict, "rank-2" in said.because) == ("unknown", True)

    @pytest.mark.parametrize("strategy", ["forward", "replay"])
    def test_without_fingerprints_an_attempt_that_lost_members_is_unknown(self, strategy: str) -> None:
        run = FakeLiveRun(2, strategy=strategy, how="complete").ends()
        said = found(audit(run.with_other(is_step(*range(PLAN.steps)), state=None)), "repeated_steps_agree")
        assert (said.verdict, said.because) == (
            "unknown",
            "no step of attempt 1 has a fingerprint of its state, and members were lost or joined in it",
        )


class TestUnreportedShares:
    """Shares that their members could not report any more are counted."""

    @pytest.mark.parametrize(("since", "number"), [(LOST_AT, 0), (LOST_AT - 1, 1)])
    def test_unreported_shares_are_counted(self, since: int, number: int) -> None:
        run = FakeLiveRun(2).ends()
        cut = run.without(lambda who, what: who == "rank-2" and isinstance(what, Step) and what.step >= since)
        said = recoveries(cut).because
        assert ("1 share reported by the other ranks only" in said) is bool(number)

    def test_of_a_window_that_was_complete_two_may_be_lacking(self) -> None:
        run = FakeLiveRun(2, how="complete").ends()
        assert "1 share reported by the other ranks only" in recoveries(run.events).because
        cut = run.without(is_step(LOST_AT - 1, of=2))
        assert "2 shares reported by the other ranks only" in recoveries(cut).because


@pytest.mark.slow  # seconds
def test_many_changes_of_members_in_one_step_are_checked_quickly() -> None:
    run = FakeLiveRun(2, how="before")
    left, everybody = run.members, tuple(range(WORLD))
    for number in range(2, 3000, 2):  # one joins, and is lost before it trains
        joined = Regroup(1, number, LOST_AT + 1, "forward", everybody)
        run.begins(2, LOST_AT + 1, 2, joined)
        for member in left:
            run.says(member, joined)
            run.says(member, Regroup(1, number + 1, LOST_AT + 1, "forward", left, (2,)))
    events = run.ends().events
    began = time.process_time()
    assert worst(audit(events)) == "pass"
    assert time.process_time() - began < 10  # with a second look at all for each it takes minutes


@pytest.mark.slow  # seconds
def test_hundreds_of_losses_in_one_run_are_checked_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = 300
    monkeypatch.setattr(fake_live_runs, "PLAN", replace(PLAN, epochs=losses // 5 + 2))
    run = FakeLiveRun(2, how="before").joins(2)
    for _ in range(losses):
        run.trains(run.reached, run.reached + 1)
        run.loses(run.reached, [2], how="before").joins(2)
    events = run.ends().events
    began = time.process_time()
    assert worst(audit(events)) == "pass"
    assert time.process_time() - began < 8  # it takes 1 s, and 11 s if a past is hashed again for every session
