"""Whether the audit can be fooled about where a worker died: its supervisor saw in which window; and true stories."""

import pytest

from fake_live_runs import LOST_AT, WORLD, Survived, found, is_regroup
from fake_runs import digest
from holdfast.audit.verdicts import Finding, audit, worst
from holdfast.events import Detect, Event, Judged, Launch, Open, Regroup, Scale, Step, Strike, What


def dead(step: int | None, rank: int = 2, exit: int | None = -9) -> Detect:
    """A supervisor saw a worker that was killed in this window, or stuck in it if it had not ended."""
    kind, signal = ("hang", None) if exit is None else ("signal", "SIGKILL")
    return Detect(1, rank, rank, kind, "was killed by SIGKILL", exit=exit, signal=signal, step=step)


def seen(run: Survived, *said: What, by: str = "supervisor") -> Survived:
    """The run to its end, with what its supervisor saw."""
    told = (Open(2), Launch(1, WORLD), *said, Judged("completed", 1, ""))
    run.files[by] = [Event(1.0, by, what) for what in told]
    return run.ends()


def struck(run: Survived, point: str, step: int = LOST_AT, rank: int = 2) -> Survived:
    told = run.files.setdefault(f"injected-{rank}", [])
    told += [Event(1.0, f"injected-{rank}", what) for what in (Open(2), Strike(1, step, "kill", rank, point))]
    return run


def finished_alone() -> Survived:
    """Member 2 has all sums of the window that the others finish without it, and tells of it."""
    run, alone = Survived(2), Survived(2)
    alone.basis = tuple(range(WORLD))
    run.says(2, alone.share(2, LOST_AT, digest("alone") + digest("own")))
    return run


def slept(event: Event) -> Event:
    """What is told of a loss, told of a sleep."""
    what = event.what
    return event._replace(what=what._replace(lost=(), asleep=what.lost)) if isinstance(what, Regroup) else event


def agree(run: Survived, recovery: str = "forward") -> Finding:
    return found(audit(run.events, recovery), "supervisors_agree")


def passes(run: Survived, recovery: str = "forward") -> bool:
    findings = audit(run.events, recovery)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    return True


SAW = "supervisor saw rank 2 fail in step {} of attempt 1{}, and {}"
UNTOLD = "no regroup tells that the others went on without it"


class TestWhoDied:
    """It has no part in any sum after the window that it died in."""

    @pytest.mark.parametrize(
        ("how", "step"), [("redone", 5), ("redone", 6), ("redone", 7), ("complete", 6), ("complete", 7), ("before", 5)]
    )
    def test_is_lost_there_or_where_the_others_were(self, how: str, step: int) -> None:
        assert passes(seen(Survived(2, how=how), dead(step)))

    @pytest.mark.parametrize("how", ["redone", "complete", "before"])
    def test_is_not_lost_after_windows_that_it_can_have_had_no_part_in(self, how: str) -> None:
        because = "the others declare that it was lost in step 6, and that step 5 was summed with it"
        assert agree(seen(Survived(2, how=how), dead(4))).because == SAW.format(4, "", because)

    def test_cannot_be_in_all_sums_of_the_next_window(self) -> None:
        because = "the others declare that they kept all sums of step 6, with its gradients"
        assert agree(seen(Survived(2, how="complete"), dead(5))).because == SAW.format(5, "", because)

    def test_does_not_report_a_later_window(self) -> None:
        assert passes(seen(finished_alone(), dead(LOST_AT)))
        said = agree(seen(finished_alone(), dead(LOST_AT - 1))).because
        assert said == SAW.format(5, "", "rank-2 tells that it trained step 6")

    def test_was_not_lost_long_before(self) -> None:
        assert agree(seen(Survived(2), dead(9))).because == SAW.format(9, "", UNTOLD)

    def test_may_have_been_stuck_and_gone_on_before_it_was_killed(self) -> None:
        assert passes(seen(Survived(2), dead(4, exit=None)))

    def test_may_be_another_nodes(self) -> None:
        assert agree(seen(Survived(2), dead(4), by="supervisor-0")).verdict == "pass"

    def test_may_have_slept_and_been_woken_since_it_last_told_its_window(self) -> None:
        run = Survived(2, how="before")
        run.files = {who: [slept(event) for event in events] for who, events in run.files.items()}
        run.joins(2)
        run.trains(LOST_AT + 1, LOST_AT + 4)
        run.loses(LOST_AT + 4, [2])
        assert passes(seen(run, Scale(1, WORLD - 1, 1), dead(LOST_AT - 1)))


class TestADeathThatNobodyDeclares:
    """Every one that a supervisor saw has a loss of its own."""

    def again(self, *said: What) -> Survived:
        """Member 2 is lost, its place is taken, and that one trains to the end, as the others say."""
        return seen(Survived(2).joins(2), *said)

    def test_the_second_of_one_rank_is_seen(self) -> None:
        assert passes(self.again(dead(6)))
        assert agree(self.again(dead(6), dead(14))).because == SAW.format(14, "", UNTOLD)

    def test_the_first_of_one_rank_is_seen(self) -> None:
        run = Survived(2).joins(2)
        run.trains(LOST_AT + 1, 14)
        assert passes(seen(run.loses(14, [2]), dead(6), dead(14)))
        quiet = Survived()
        quiet.trains(LOST_AT + 1, 14)
        said = agree(seen(quiet.loses(14, [2]), dead(6), dead(14))).because
        assert said == SAW.format(
            6, "", "the others declare that it was lost in step 14, and that step 7 was summed with it"
        )

    def test_one_that_died_before_it_began_a_window_may_be_declared_or_not(self) -> None:
        assert passes(self.again(dead(6), dead(None)))
        run = Survived(2)
        joined = Regroup(1, 2, LOST_AT + 1, "forward", (0, 1, 2, 3))
        run.begins(2, LOST_AT + 1, 2, joined)
        for member in run.members:
            run.says(member, joined)
            run.says(member, Regroup(1, 3, LOST_AT + 1, "forward", run.members, (2,)))
        assert passes(seen(run, dead(6), dead(None)))

    def test_it_is_seen_also_where_the_attempt_fell_back_later(self) -> None:
        """All others were killed in step 15, which is declared by nobody; the loss in step 6 was survived."""
        for lost, verdict in ((2,), "pass"), ((), "fail"):
            run = Survived(*lost)
            run.trains(LOST_AT + 1, 15)
            told = (Open(2), Launch(1, WORLD), dead(6), dead(14, 1), dead(14, 0))
            run.files["supervisor"] = [Event(1.0, "supervisor", what) for what in told]
            assert agree(run).verdict == verdict

    def test_in_a_run_that_recovers_live_it_is_told_what_lacks(self) -> None:
        run = Survived()
        run.files = {who: [e for e in events if not is_regroup(who, e.what)] for who, events in run.files.items()}
        said = f"supervisor says 'completed', and saw rank 2 fail in attempt 1, and {UNTOLD}"
        assert agree(seen(run, dead(6))).because == said


class TestWhoWasStruckOnPurpose:
    """Before it had given its last gradients of a window it has no part in all sums of it."""

    early = pytest.mark.parametrize("point", ["forward", "backward=0", "backward=0.5"])
    late = pytest.mark.parametrize("point", ["backward=1", "optimizer", "save"])

    @early
    @pytest.mark.parametrize("how", ["redone", "before"])
    def test_is_lost_there(self, point: str, how: str) -> None:
        assert passes(seen(struck(Survived(2, how=how), point), dead(6)))

    @early
    def test_is_not_in_all_sums_of_its_window(self, point: str) -> None:
        said = agree(seen(struck(Survived(2, how="complete"), point), dead(6))).because
        because = "the others declare that they kept all sums of step 6, with its gradients"
        assert said == SAW.format(6, f" (kill at {point})", because)

    @early
    @pytest.mark.parametrize("how", ["redone", "complete", "before"])
    def test_is_not_lost_in_the_next_window(self, point: str, how: str) -> None:
        said = agree(seen(struck(Survived(2, how=how), point, 5), dead(5))).because
        because = "the others declare that it was lost in step 6, and that step 5 was summed with it"
        assert said == SAW.format(5, f" (kill at {point})", because)

    @late
    @pytest.mark.parametrize(("how", "step"), [("complete", 6), ("redone", 5), ("before", 5)])
    def test_later_it_may_be(self, point: str, how: str, step: int) -> None:
        assert passes(seen(struck(Survived(2, how=how), point, step), dead(step)))

    def test_at_a_boundary_it_died_after_the_window_before(self) -> None:
        assert passes(seen(struck(Survived(2, how="before"), "boundary"), dead(5)))

    @early
    def test_does_not_report_its_window(self, point: str) -> None:
        said = agree(seen(struck(finished_alone(), point), dead(6))).because
        assert said == SAW.format(6, f" (kill at {point})", "rank-2 tells that it trained step 6")

    def test_is_seen_to_die_as_often_as_it_was_struck(self) -> None:
        run = struck(struck(Survived(2).joins(2), "backward=0.5"), "optimizer", 14)
        assert agree(seen(run, dead(6))).because == (
            "supervisor says 'completed', and injected-2 tells that rank 2 was to end 2 times in attempt 1, and fewer "
            "failures of it were seen"
        )

    def test_may_be_struck_in_a_save_as_it_is_struck_in_its_training(self) -> None:
        assert passes(seen(struck(struck(Survived(2), "backward=0.5"), "save"), dead(6)))


def test_where_nothing_is_summed_others_may_be_further_than_one_that_died() -> None:
    run = Survived(2)
    run.files["rank-2"] = [e for e in run.files["rank-2"] if not (isinstance(e.what, Step) and e.what.step > 3)]
    assert agree(seen(run, dead(3))).verdict == "fail"
    idle = run.with_other(lambda _, what: isinstance(what, Step) and what.step in (4, 5), reduced=0, held=1)
    assert found(audit(idle, "forward"), "supervisors_agree").verdict == "pass"
