"""Whether a worker that its supervisor saw die in a step is declared lost there by those that continued."""

import pytest

from fake_live_runs import LOST_AT, WORLD, FakeLiveRun, found, is_regroup
from fake_runs import digest
from holdfast.audit.verdicts import Finding, audit, worst
from holdfast.events import Detect, Event, Judged, Launch, Open, Regroup, Scale, Step, What
from holdfast.runs.histories import RunFacts


def dead(step: int | None, rank: int = 2, exit: int | None = -9) -> Detect:
    """A supervisor saw a worker that was killed in `step`; without an exit status it hangs there."""
    kind, signal = ("hang", None) if exit is None else ("signal", "SIGKILL")
    return Detect(1, rank, rank, kind, "was killed by SIGKILL", exit=exit, signal=signal, step=step)


def seen(run: FakeLiveRun, *events: What, by: str = "supervisor") -> FakeLiveRun:
    """The run to its end, with what its supervisor saw."""
    written = (Open(2), Launch(1, WORLD), *events, Judged("completed", 1, ""))
    run.files[by] = [Event(1.0, by, what) for what in written]
    return run.ends()


def finished_alone() -> FakeLiveRun:
    """Member 2 has all gradients of the step that the others finish without it, and reports it."""
    run, alone = FakeLiveRun(2), FakeLiveRun(2)
    alone.basis = tuple(range(WORLD))
    run.says(2, alone.share(2, LOST_AT, digest("alone") + digest("own")))
    return run


def put_to_sleep(event: Event) -> Event:
    """Turn a loss into a sleep."""
    what = event.what
    return event._replace(what=what._replace(lost=(), asleep=what.lost)) if isinstance(what, Regroup) else event


def losses(run: FakeLiveRun) -> Finding:
    return found(audit(run.events, RunFacts("forward")), "lost_workers_are_declared")


def passes(run: FakeLiveRun) -> bool:
    findings = audit(run.events, RunFacts("forward"))
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    return True


def undeclared(step: int) -> str:
    return f"rank 2 died in step {step} of attempt 1 and the others continued, but did not declare it lost there"


@pytest.mark.parametrize(
    ("how", "step"), [("redone", 5), ("redone", 6), ("redone", 7), ("complete", 6), ("complete", 7), ("before", 5)]
)
def test_a_dead_worker_is_lost_in_its_step_or_in_that_of_the_others(how: str, step: int) -> None:
    assert passes(seen(FakeLiveRun(2, how=how), dead(step)))


@pytest.mark.parametrize("how", ["redone", "complete", "before"])
def test_a_dead_worker_cannot_be_lost_after_steps_in_which_it_had_no_part(how: str) -> None:
    assert losses(seen(FakeLiveRun(2, how=how), dead(4))).because == undeclared(4)


def test_a_dead_worker_has_no_part_in_all_gradients_of_the_next_step() -> None:
    assert losses(seen(FakeLiveRun(2, how="complete"), dead(5))).because == undeclared(5)


def test_a_dead_worker_does_not_report_a_later_step() -> None:
    assert passes(seen(finished_alone(), dead(LOST_AT)))
    assert losses(seen(finished_alone(), dead(LOST_AT - 1))).because == undeclared(5)


def test_a_worker_that_was_lost_long_before_its_death_was_not_that_one() -> None:
    assert losses(seen(FakeLiveRun(2), dead(9))).because == undeclared(9)


def test_a_worker_that_hung_may_have_continued_before_it_was_killed() -> None:
    assert passes(seen(FakeLiveRun(2), dead(4, exit=None)))


def test_the_numbers_of_several_supervisors_are_not_compared() -> None:
    assert losses(seen(FakeLiveRun(2), dead(4), by="supervisor-0")).verdict == "pass"


def test_a_worker_that_slept_and_was_woken_may_die_in_a_later_step_than_it_noted() -> None:
    run = FakeLiveRun(2, how="before")
    run.files = {who: [put_to_sleep(event) for event in events] for who, events in run.files.items()}
    run.joins(2)
    run.trains(LOST_AT + 1, LOST_AT + 4)
    run.loses(LOST_AT + 4, [2])
    assert passes(seen(run, Scale(1, WORLD - 1, 1), dead(LOST_AT - 1)))


def test_every_death_of_one_rank_has_a_loss_of_its_own() -> None:
    assert passes(seen(FakeLiveRun(2).joins(2), dead(6)))
    assert losses(seen(FakeLiveRun(2).joins(2), dead(6), dead(14))).because == undeclared(14)
    run = FakeLiveRun(2).joins(2)
    run.trains(LOST_AT + 1, 14)
    assert passes(seen(run.loses(14, [2]), dead(6), dead(14)))
    quiet = FakeLiveRun()
    quiet.trains(LOST_AT + 1, 14)
    assert losses(seen(quiet.loses(14, [2]), dead(6), dead(14))).because == undeclared(6)


def test_a_process_that_died_before_it_began_a_step_may_be_declared_or_not() -> None:
    assert passes(seen(FakeLiveRun(2).joins(2), dead(6), dead(None)))
    run = FakeLiveRun(2)
    joined = Regroup(1, 2, LOST_AT + 1, "forward", (0, 1, 2, 3))
    run.begins(2, LOST_AT + 1, 2, joined)
    for member in run.members:
        run.says(member, joined)
        run.says(member, Regroup(1, 3, LOST_AT + 1, "forward", run.members, (2,)))
    assert passes(seen(run, dead(6), dead(None)))


@pytest.mark.parametrize(("lost", "verdict"), [((2,), "pass"), ((), "fail")])
def test_a_death_is_compared_in_an_attempt_that_failed_later_too(lost: tuple[int, ...], verdict: str) -> None:
    """All others were killed in step 15, which nobody declares; the loss in step 6 was survived."""
    run = FakeLiveRun(*lost)
    run.trains(LOST_AT + 1, 15)
    written = (Open(2), Launch(1, WORLD), dead(6), dead(14, 1), dead(14, 0))
    run.files["supervisor"] = [Event(1.0, "supervisor", what) for what in written]
    assert losses(run).verdict == verdict


def test_a_run_that_recovers_live_must_declare_a_death_even_if_it_declares_nothing() -> None:
    run = FakeLiveRun()
    run.files = {who: [e for e in events if not is_regroup(who, e.what)] for who, events in run.files.items()}
    assert losses(seen(run, dead(6))).because == undeclared(6)


def test_where_nothing_is_reduced_the_others_may_be_further_than_a_dead_worker() -> None:
    run = FakeLiveRun(2)
    run.files["rank-2"] = [e for e in run.files["rank-2"] if not (isinstance(e.what, Step) and e.what.step > 3)]
    assert losses(seen(run, dead(3))).verdict == "fail"
    idle = run.with_other(lambda _, what: isinstance(what, Step) and what.step in (4, 5), reduced=0, held=1)
    assert found(audit(idle, RunFacts("forward")), "lost_workers_are_declared").verdict == "pass"
