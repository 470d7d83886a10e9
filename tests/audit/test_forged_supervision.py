"""Whether the audit can be fooled where a supervisor and the ranks of a run tell different stories; and true ones."""

import random
from collections.abc import Sequence

import pytest

from fake_runs import changed, digest, preempted
from fake_two_ranks import Told, failed, found
from holdfast.audit.verdicts import audit, audit_files, worst
from holdfast.events import (
    SECOND_SIGNAL,
    Commit,
    Judged,
    Launch,
    Open,
    Plan,
    Preempt,
    Preempted,
    Regroup,
    Restart,
    Step,
    Stopped,
)


class TestARunThatIsSaidToHaveBeenStoppedByItsScript:
    def test_of_which_the_supervisor_says_that_it_was_preempted_fails(self) -> None:
        run = Told().trains(1, None, 17).stops(1, 17)
        told = (Open(2), Launch(1, 2), Preempt(1), Judged("preempted", 1, "the workers saved and stopped when asked"))
        assert run.supervisor(*told).agree() == (
            "fail",
            "supervisor says 'preempted', and all ranks were stopped by their script at step 17 in attempt 1, of which "
            "supervisor saw no failure",
        )

    def test_and_was_killed_by_a_second_signal_on_its_way_out_passes(self) -> None:
        run = Told().trains(1, None, 17).stops(1, 17)
        because = f"{SECOND_SIGNAL}; the newest snapshot stands"
        assert run.supervisor(Open(2), Launch(1, 2), Preempt(1), Judged("preempted", 1, because)).agree()[0] == "pass"

    @pytest.mark.parametrize("word", ["script-error", "gave-up", "refused"])
    def test_in_a_window_in_which_it_failed_fails(self, word: str) -> None:
        """The supervisor saw a worker raise in window 17, and not after 16: that window was not trained."""
        run = Told().trains(1, None, 17).stops(1, 17)
        assert run.supervisor(Open(2), Launch(1, 2), failed(1, 17), Judged(word, 1, "")).agree() == (
            "fail",
            "supervisor saw rank 1 fail in step 17 of attempt 1, which all ranks ended in order at step 17",
        )

    def test_though_a_worker_failed_long_before_fails(self) -> None:
        run = Told().trains(1, None, 17).stops(1, 17)
        assert run.supervisor(Open(2), Launch(1, 2), failed(1, 9)).agree()[0] == "fail"

    @pytest.mark.parametrize(("step", "left"), [(16, False), (None, False), (16, True), (17, True)])
    def test_and_raised_after_its_loop_passes(self, step: int | None, left: bool) -> None:
        run = Told().trains(1, None, 17).stops(1, 17, left=left)
        assert (
            run.supervisor(Open(2), Launch(1, 2), failed(1, step), Judged("script-error", 1, "")).agree()[0] == "pass"
        )

    def test_and_was_asked_to_stop_before_its_extension_began_passes(self) -> None:
        run = Told().trains(1, None, 17).stops(1, 17)
        told = (Open(2), Launch(1, 2), Judged("completed", 1, "stopped by the script at step 17"))
        asked = (Open(2), Judged("preempted", 1, "asked to stop before the workers were started"))
        assert run.supervisor(*told, *asked).agree()[0] == "pass"


class TestAttemptsOfWhichNoRankTells:
    def test_and_that_are_said_to_be_completed_fail(self) -> None:
        run = Told().trains(1, None, 17).stops(1, 17)
        told = (Open(2), Launch(1, 2), Judged("completed", 1, ""), Open(2), Launch(2, 2), Judged("completed", 2, ""))
        assert run.supervisor(*told).agree() == (
            "fail",
            "supervisor says 'completed', and no rank tells of attempt 2",
        )

    def test_in_which_the_script_did_not_come_to_its_loop_are_unknown(self) -> None:
        run = Told().trains(1, None, 17).stops(1, 17)
        only = "all workers have finished; supervised only: restarted after failures, not checked"
        told = (Open(2), Launch(1, 2), Judged("completed", 1, ""), Open(2), Launch(2, 2), Judged("completed", 2, only))
        assert run.supervisor(*told).agree() == (
            "unknown",
            "no rank tells of attempt 2, which was supervised only",
        )

    def test_and_in_which_a_worker_was_seen_training_are_unknown(self) -> None:
        run = Told().trains(1, None, 12).saves(1, 10).trains(3, 10, 17).stops(3, 17)
        told = (Open(2), Launch(1, 2), failed(1, 12), Restart(2, 2), failed(2, 14), Restart(3, 2))
        assert run.supervisor(*told, Judged("completed", 3, "")).agree() == (
            "unknown",
            "supervisor saw rank 1 fail in step 14 of attempt 2, of which rank-1 tells nothing",
        )

    def test_and_that_failed_before_they_trained_pass(self) -> None:
        run = Told().trains(1, None, 12).saves(1, 10).trains(3, 10, 17).stops(3, 17)
        told = (Open(2), Launch(1, 2), failed(1, 12), Restart(2, 2), failed(2, None), Restart(3, 2))
        assert run.supervisor(*told, Judged("completed", 3, "")).agree()[0] == "pass"


class TestARankThatIsSaidToHaveFailed:
    def run(self, rank: int, recovery: str | None = "restart") -> tuple[str, str]:
        run = Told().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
        told = (Open(2), Launch(1, 2), failed(1, None, rank), Restart(2, 2), Judged("completed", 2, ""))
        return run.supervisor(*told).agree(recovery)

    @pytest.mark.parametrize("rank", [2, 9])
    def test_and_is_none_of_the_workers_fails(self, rank: int) -> None:
        assert self.run(rank) == (
            "fail",
            f"supervisor saw rank {rank} fail in attempt 1, in which it started 2 workers",
        )

    def test_passes_as_one_of_them_or_as_one_of_another_node(self) -> None:
        assert self.run(1)[0] == self.run(-1)[0] == "pass"

    def test_may_be_a_worker_in_reserve_where_a_run_recovers_live(self) -> None:
        assert self.run(2, "replay")[0] == self.run(2, None)[0] == "pass"

    def test_and_has_no_number_that_a_rank_can_have_fails(self) -> None:
        assert self.run(-2, None) == ("fail", "supervisor tells of a failure of rank -2, which nobody is")


class TestAttemptsThatNoSupervisorStarted:
    started = (Open(2), Launch(1, 2))

    def run(self) -> Told:
        return Told().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)

    def test_are_unknown_where_its_file_is_cut_off_after_a_start(self) -> None:
        assert self.run().supervisor(*self.started).agree() == (
            "unknown",
            "no supervisor tells that it started attempt 2: is a part of its history missing?",
        )

    def test_pass_where_it_was_killed_after_it_saw_a_failure_or_before_it_wrote_down_a_start(self) -> None:
        assert self.run().supervisor(*self.started, failed(1, 12)).agree()[0] == "pass"
        assert self.run().supervisor(*self.started, Open(2)).agree()[0] == "pass"

    def test_are_unknown_where_there_are_more_of_them_than_it_can_have_failed_to_write_down(self) -> None:
        run = Told().trains(1, None, 12).saves(1, 10).trains(2, 10, 12).trains(3, 10, 17).stops(3, 17)
        assert run.supervisor(*self.started, failed(1, 12)).agree()[0] == "unknown"

    def test_are_unknown_in_the_folder_of_a_supervised_run_without_its_file(self) -> None:
        """A run under torchrun has no such folder: there no supervisor tells of any attempt."""
        run = self.run()
        assert run.verdict() == "pass"
        findings = audit_files(((each.who, each) for each in run.events), argv=("train.py",))
        assert found(findings) == (
            "unknown",
            "run.json is that of a supervised run, and there is no history of its supervisor",
        )


class TestWhatTheScriptWasGiven:
    mine, other = ("--lr", "1"), ("--lr", "2")

    def test_differs_between_attempts_and_no_launch_says_so_fails(self) -> None:
        run = Told().trains(1, None, 12, self.mine).saves(1, 10).trains(2, 10, 17, self.other).stops(2, 17)
        told = (Open(2), Launch(1, 2, ("train.py", *self.mine)), failed(1, 12), Restart(2, 2))
        assert run.supervisor(*told, Judged("completed", 2, "")).agree() == (
            "fail",
            "rank-0 was given other arguments in attempt 2 than any supervisor launched the script with",
        )

    def test_is_that_of_another_launch_fails(self) -> None:
        run = Told().trains(1, None, 12, self.mine).saves(1, 10).trains(2, 10, 17, self.mine).stops(2, 17)
        told = (Open(2), Launch(1, 2, ("train.py", *self.mine)), failed(1, 12))
        again = (Open(2), Launch(2, 2, ("train.py", *self.other), changed=("--lr",)), Judged("completed", 2, ""))
        assert run.supervisor(*told, *again).agree() == (
            "fail",
            "rank-0 was not given in attempt 2 what supervisor launched the script with",
        )

    def test_may_change_by_declaration_and_is_named(self) -> None:
        run = Told().trains(1, None, 12, self.mine).saves(1, 10).trains(2, 10, 17, self.other).stops(2, 17)
        told = (Open(2), Launch(1, 2, ("train.py", *self.mine)), failed(1, 12))
        again = (Open(2), Launch(2, 2, ("train.py", *self.other), changed=("--lr",)), Judged("completed", 2, ""))
        assert run.supervisor(*told, *again).agree() == (
            "pass",
            "supervisor says 'completed'; --lr was changed in attempt 2, by declaration",
        )

    def test_is_not_compared_where_a_supervisor_was_killed_before_it_could_tell(self) -> None:
        run = Told().trains(1, None, 12, self.mine).saves(1, 10).trains(2, 10, 17, self.other).stops(2, 17)
        told = (Open(2), Launch(1, 2, ("train.py", *self.mine)), failed(1, 12), Open(2))
        assert run.supervisor(*told).agree()[0] == "pass"


class TestACommandThatIsNotTold:
    """It excuses nothing: a step that is trained again comes out the same, unless both tell that they were given others."""

    def run(self, attempt: int, *ranks: int) -> Told:
        """Steps 10 and 11 come out otherwise in attempt 2, and these ranks do not tell what they were given in one."""
        run = Told().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
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
    def test_is_taken_for_the_same(self, attempt: int, ranks: Sequence[int]) -> None:
        verdict, because = self.run(attempt, *ranks).found("replayed_steps_agree")
        assert (verdict, "(step 10) came out with another state in attempt 2 than in 1" in because) == ("fail", True)

    def test_is_none_of_two(self) -> None:
        run = Told().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
        run.events = changed(run.events, lambda each: isinstance(each.what, Plan), command=None)
        assert run.found("replayed_steps_agree") == ("pass", "2 of 2 replayed steps came out the same")

    def test_two_that_differ_by_declaration_excuse_it(self) -> None:
        run = Told().trains(1, None, 12, ("--lr", "1")).saves(1, 10).trains(2, 10, 17, ("--lr", "2")).stops(2, 17)
        verdict, because = run.found("replayed_steps_agree")
        assert (verdict, "or with other arguments" in because) == ("pass", True)


@pytest.mark.parametrize("seed", range(30))
def test_a_preemption_whose_snapshot_is_said_to_stop_is_caught(seed: int) -> None:
    """Where nobody was lost live: one that failed then may have done so at the very end."""
    events = preempted(random.Random(seed)).events
    last = next(each.what.step for each in events if isinstance(each.what, Preempted))
    forged = [
        each._replace(what=Stopped(each.what.attempt, each.what.step)) if isinstance(each.what, Preempted) else each
        for each in events
    ]
    if any(isinstance(each.what, Commit) and each.what.step == last for each in events):
        forged = changed(forged, lambda each: isinstance(each.what, Commit) and each.what.step == last, stops=True)
    if not any(isinstance(each.what, Regroup) for each in events):
        assert worst(audit(forged)) == "fail"
