"""How repeated steps are compared if a rank does not record its arguments, or has buffers of its own."""

from collections.abc import Sequence

import pytest

from fake_runs import changed, digest, is_a
from fake_two_ranks import TwoRankRun
from holdfast.events import Plan, Recover, Step


class TestUnknownArguments:
    """Repeated steps come out the same, unless both attempts are known to have had other arguments."""

    def run(self, attempt: int, *ranks: int) -> TwoRankRun:
        """Steps 10 and 11 come out differently in attempt 2, and `ranks` do not record their arguments in `attempt`."""
        run = TwoRankRun().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
        again = changed(
            run.events,
            is_a(Step, attempt=2),
            state=digest("otherwise") + digest("own"),
        )
        names = [f"rank-{rank}" for rank in ranks]
        run.events = changed(
            again,
            lambda each: isinstance(each.what, Plan) and each.what.attempt == attempt and each.who in names,
            command=None,
        )
        return run

    @pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
    @pytest.mark.parametrize("attempt", [1, 2])
    def test_are_taken_for_the_same(self, attempt: int, ranks: Sequence[int]) -> None:
        verdict, because = self.run(attempt, *ranks).found("repeated_steps_agree")
        assert (verdict, "(step 10) came out with another state in attempt 2 than in 1" in because) == ("fail", True)

    def test_of_both_attempts_are_the_same(self) -> None:
        run = TwoRankRun().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
        run.events = changed(run.events, is_a(Plan), command=None)
        assert run.found("repeated_steps_agree") == (
            "pass",
            "2 of 2 repeated steps came out the same; attempt 2 continued from step 10",
        )

    def test_arguments_that_differ_excuse_a_difference(self) -> None:
        run = TwoRankRun().trains(1, None, 12, ("--lr", "1")).saves(1, 10).trains(2, 10, 17, ("--lr", "2")).stops(2, 17)
        verdict, because = run.found("repeated_steps_agree")
        assert (verdict, "or with other arguments" in because) == ("pass", True)


def test_a_difference_of_a_sharded_model_is_not_said_to_be_one_of_its_buffers() -> None:
    run = TestBuffersOfRank1().run(digest("own", 0, 9), [11, 12])
    run.events = changed(run.events, is_a(Plan), sharded=True)
    verdict, because = run.found("repeated_steps_agree")
    assert (verdict, "(step 11) came out with another state in attempt 2 than in 1" in because) == ("fail", True)


class TestBuffersOfRank1:
    """A snapshot holds rank 0's buffers. Rank 1 had others, such as an average of its own BatchNorm statistics."""

    def run(self, restored: str, changed_steps: Sequence[int], rank: int = 1) -> TwoRankRun:
        """Both ranks restore buffers with the digest `restored`, and `changed_steps` of `rank` end with other buffers."""
        run = TwoRankRun().trains(1, None, 13).saves(1, 10).trains(2, 10, 17).stops(2, 17)
        fingerprint = digest("shared", 9) + restored
        run.events = changed(
            run.events,
            is_a(Recover, attempt=2),
            fingerprint=fingerprint,
        )
        for step in changed_steps:
            run.events = changed(
                run.events,
                lambda each, step=step: (
                    isinstance(each.what, Step)
                    and (each.who, each.what[0], each.what.step) == (f"rank-{rank}", 2, step)
                ),
                state=digest("shared", step) + digest("other buffers", step),
            )
        return run

    def test_may_differ_after_it_restored_those_of_rank_0(self) -> None:
        run = self.run(digest("own", 0, 9), [10, 11, 12])
        assert run.found("repeated_steps_agree") == (
            "pass",
            "3 of 3 repeated steps came out the same; attempt 2 continued from step 10; rank-1 had buffers of its own and continued with rank-0's, which "
            "were saved",
        )
        assert run.verdict() == "pass"

    @pytest.mark.parametrize(
        ("restored", "steps", "rank"),
        [
            (digest("own", 1, 9), [10, 11, 12], 1),  # rank 1 began with the buffers that it had before
            (digest("own", 0, 9), [11, 12], 1),  # the first repeated step came out the same
            (digest("own", 0, 9), [10, 11, 12], 0),  # rank 0 restored its own buffers
        ],
    )
    def test_fail_the_audit_if_the_restore_does_not_explain_them(
        self, restored: str, steps: Sequence[int], rank: int
    ) -> None:
        verdict, because = self.run(restored, steps, rank).found("repeated_steps_agree")
        assert (verdict, f"(step {steps[0]}) came out with another state of the buffers" in because) == ("fail", True)
