"""Lies about members that were lost: what survivors declare must fit with what everybody wrote, or it does not pass."""

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.audit.verdicts import Finding, audit, worst
from holdfast.events import Event, Open, Regroup, Step
from lived import PLAN
from survived import LOST_AT, WORLD, Survived, found


def recoveries(events: list[Event]) -> Finding:
    return found(audit(events), "live_recoveries")


def is_step(*steps: int, of: int | None = None) -> Callable[[str, Any], bool]:
    """Whether this is one of these steps, of this member or of all."""
    return lambda who, what: isinstance(what, Step) and what.step in steps and of in (None, int(who[5:]))


class TestAMemberThatNobodyHeardOf:
    """Who took part in a window has said before with what it began."""

    @staticmethod
    def without_last_life(run: Survived, member: int) -> list[Event]:
        events = run.files[f"rank-{member}"]
        opened = max(i for i, event in enumerate(events) if isinstance(event.what, Open))
        run.files[f"rank-{member}"] = events[:opened]
        return run.events

    @pytest.mark.parametrize("how", ["redone", "complete", "before"])
    def test_one_that_joined_and_was_lost_after_a_window_has_a_life(self, how: str) -> None:
        run = Survived(2).joins(2)
        run.trains(LOST_AT + 1, LOST_AT + 2)
        run.loses(LOST_AT + 2, [2], how=how).ends()
        assert worst(audit(run.events)) == "pass"
        said = recoveries(self.without_last_life(run, 2))
        assert (said.verdict, "member 2 took part" in said.because) == ("fail", True)

    def test_one_that_joined_and_never_said_with_what_did_not_take_part(self) -> None:
        run = Survived(2).joins(2)
        run.trains(LOST_AT + 1, LOST_AT + 2)
        run.loses(LOST_AT + 2, [2]).ends()
        events = run.files["rank-2"]
        joined = next(i for i, event in enumerate(events) if isinstance(event.what, Regroup))
        run.files["rank-2"] = events[: joined + 1]
        assert recoveries(run.events).verdict == "fail"

    def test_a_window_is_not_complete_with_one_that_never_began(self) -> None:
        run = Survived(2).joins(2).loses(LOST_AT + 1, [2], how="complete").ends()
        assert worst(audit(run.events)) == "pass"
        assert recoveries(self.without_last_life(run, 2)).verdict == "fail"

    @pytest.mark.parametrize("how", ["redone", "before"])
    def test_one_that_was_lost_before_its_first_window_was_over_may_have_written_nothing(self, how: str) -> None:
        run = Survived(2).joins(2).loses(LOST_AT + 1, [2], how=how).ends()
        assert worst(audit(run.events)) == "pass"
        assert worst(audit(self.without_last_life(run, 2))) == "pass"

    def test_where_nothing_is_summed_others_may_be_a_window_ahead_of_one_that_joins(self) -> None:
        run = Survived(2).joins(2)
        run.trains(LOST_AT + 1, LOST_AT + 2)
        run.loses(LOST_AT + 2, [2]).ends()
        self.without_last_life(run, 2)
        assert worst(audit(run.with_other(is_step(LOST_AT + 1), reduced=0, held=1))) == "pass"


class TestAShareDeclaredMissing:
    """What is declared missing has no part in what came out."""

    def test_a_share_that_its_member_reports_is_not_missing(self) -> None:
        run = Survived()
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

    def test_a_step_that_is_replayed_lacks_nothing(self) -> None:
        run = Survived(2, strategy="replay")
        said = recoveries(run.ends().events)
        assert (said.verdict, "replay" in said.because) == ("fail", True)
