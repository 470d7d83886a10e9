"""Whether repeated steps are compared though a rank does not say with which arguments its script ran."""

from collections.abc import Sequence

import pytest

from fake_runs import changed, digest
from fake_two_ranks import TwoRankRun
from holdfast.events import Plan, Step


class TestUnknownArguments:
    """Repeated steps come out the same, unless both attempts are known to have had other arguments."""

    def run(self, attempt: int, *ranks: int) -> TwoRankRun:
        """Steps 10 and 11 come out differently in attempt 2, and `ranks` do not record their arguments in `attempt`."""
        run = TwoRankRun().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
        again = changed(
            run.events,
            lambda each: isinstance(each.what, Step) and each.what.attempt == 2,
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
        run.events = changed(run.events, lambda each: isinstance(each.what, Plan), command=None)
        assert run.found("repeated_steps_agree") == ("pass", "2 of 2 repeated steps came out the same")

    def test_arguments_that_differ_excuse_a_difference(self) -> None:
        run = TwoRankRun().trains(1, None, 12, ("--lr", "1")).saves(1, 10).trains(2, 10, 17, ("--lr", "2")).stops(2, 17)
        verdict, because = run.found("repeated_steps_agree")
        assert (verdict, "or with other arguments" in because) == ("pass", True)
