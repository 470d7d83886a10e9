"""Lossy runs: the samples that are missing are those that every survivor declares, and everything else was trained once."""

import json
from pathlib import Path

import pytest

from fake_histories import write_history
from fake_live_runs import LOST_AT, WORLD, FakeLiveRun, found, is_regroup
from fake_runs import PLAN, digest
from holdfast.audit.verdicts import audit, audit_run, worst
from holdfast.events import Commit, Detect, Event, Judged, Launch, Open, Recover, Regroup, Scale, Step
from holdfast.runs.histories import RunFacts


def test_a_run_that_lost_a_member_passes_and_counts_the_missing_samples() -> None:
    findings = audit(FakeLiveRun(2).ends().events, RunFacts("forward"))
    assert worst(findings) == "pass"
    lost = found(findings, "lost_workers_are_declared").because
    assert lost == "1: member 2 lost at step 6, 2 samples declared missing"
    assert "every sample exactly once but 2 declared missing" in found(findings, "every_sample_trained_once").because


@pytest.mark.parametrize("lost", [(1,), (0,), (0, 3), (1, 2, 3)])
@pytest.mark.parametrize("strategy", ["forward", "skip"])
@pytest.mark.parametrize("how", ["redone", "complete", "before"])
def test_survivors_account_for_any_member_lost_at_any_time(lost: tuple[int, ...], strategy: str, how: str) -> None:
    findings = audit(FakeLiveRun(*lost, strategy=strategy, how=how).ends().events)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    missing = 0 if how != "redone" else PLAN.batch if strategy == "skip" else 2 * len(lost)
    said = found(findings, "every_sample_trained_once").because
    assert (f"but {missing} declared missing" if missing else "none repeated, missing or extra") in said


def test_a_lossy_run_without_its_declaration_fails() -> None:
    run = FakeLiveRun(2).ends()
    assert worst(audit(run.without(is_regroup))) == "fail"
    quiet = run.with_other(is_regroup, missing=())
    assert found(audit(quiet), "lost_workers_are_declared").because == (
        "rank-0 declares 0 samples of step 6 missing in membership 1 of attempt 1, but the step lacks 2 samples: "
        "member 2 was lost in it"
    )
    others = run.with_other(is_regroup, missing=(81, 82))
    assert "missing in membership 1 of attempt 1, but the step lacks 2 samples" in (
        found(audit(others), "lost_workers_are_declared").because
    )
    skipped = FakeLiveRun(1, 2, strategy="skip").ends().with_other(is_regroup, missing=(81,))
    assert found(audit(skipped), "lost_workers_are_declared").because.endswith(
        "but the step lacks 8 samples: members 1, 2 were lost in it"
    )


def test_a_run_that_recovers_by_restart_has_no_live_recoveries(tmp_path: Path) -> None:
    run = FakeLiveRun(2).ends()
    assert "recovers by 'restart'" in found(audit(run.events, RunFacts("restart")), "lost_workers_are_declared").because
    write_history(tmp_path / "history", run.files)
    for recovery, verdict in (("restart", "fail"), ("forward", "pass"), ("skip", "fail")):
        (tmp_path / "run.json").write_text(json.dumps({"recovery": recovery}))
        assert worst(audit_run(tmp_path)) == verdict
    (tmp_path / "run.json").write_text("damaged")
    assert worst(audit_run(tmp_path)) == "pass"  # by what the history says alone


def test_only_the_last_two_steps_of_a_lost_member_may_be_unreported() -> None:
    run = FakeLiveRun(2).ends()
    for step, verdict in ((LOST_AT - 1, "pass"), (LOST_AT - 2, "pass"), (LOST_AT - 3, "fail")):
        cut = run.without(lambda who, what, at=step: who == "rank-2" and isinstance(what, Step) and what.step >= at)  # type: ignore[misc]
        assert worst(audit(cut)) == verdict
    survivor = run.without(lambda who, what: who == "rank-1" and isinstance(what, Step) and what.step == LOST_AT - 1)
    assert worst(audit(survivor)) == "fail"


def test_survivors_are_compared_with_each_other_after_rank_0_is_lost() -> None:
    run = FakeLiveRun(0).ends()
    apart = run.with_other(
        lambda who, what: who == "rank-2" and isinstance(what, Step) and what.step == LOST_AT + 3,
        state=digest("apart") + digest("own"),
    )
    assert "rank-2" in found(audit(apart), "repeated_steps_agree").because
    idle = run.with_other(
        lambda who, what: who == "rank-3" and isinstance(what, Step) and what.step == LOST_AT + 3, stepped=0
    )
    assert found(audit(idle), "every_step_was_trained").verdict == "fail"


def test_a_step_that_a_lost_member_finished_alone_does_not_count() -> None:
    run = FakeLiveRun(2)
    alone = FakeLiveRun(2)
    alone.basis = tuple(range(WORLD))
    run.says(2, alone.share(2, LOST_AT, digest("alone") + digest("own")))
    assert worst(audit(run.ends().events)) == "pass"
    run.says(2, alone.share(2, LOST_AT + 1, digest("shared", LOST_AT + 1) + digest("own")))
    assert "continues after it was lost" in found(audit(run.events), "lost_workers_are_declared").because


def test_a_skipped_step_leaves_the_state_unchanged() -> None:
    run = FakeLiveRun(2, strategy="skip").ends()
    moved = run.with_other(
        lambda who, what: isinstance(what, Step) and what.step == LOST_AT,
        state=digest("shared", LOST_AT) + digest("own"),
    )
    assert "declared skipped" in found(audit(moved), "lost_workers_are_declared").because


def test_a_member_that_joins_rolls_nothing_back_and_begins_with_what_the_others_have() -> None:
    run = FakeLiveRun(2).joins(2).ends()
    findings = audit(run.events)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    assert "member 2 joined at step 7" in found(findings, "lost_workers_are_declared").because
    other = run.with_other(
        lambda who, what: isinstance(what, Recover) and what.restored == LOST_AT + 1,
        fingerprint=digest("another") + digest("own"),
    )
    assert "not those after step 6" in found(audit(other), "lost_workers_are_declared").because
    uninvited = run.without(lambda who, what: isinstance(what, Regroup) and what.number == 2)
    assert "started attempt 1 after attempt 1" in found(audit(uninvited), "every_start_is_an_attempt").because


@pytest.mark.parametrize("restored", [None, 0])
def test_a_member_that_joins_before_the_first_step_begins_with_what_all_began_with(restored: int | None) -> None:
    run = FakeLiveRun()
    run.files = {who: [e for e in run.files[who] if not isinstance(e.what, Step | Regroup)] for who in run.files}
    run.reached = run.number = 0
    joined = Regroup(1, 1, 0, "replay", tuple(range(WORLD)), lost=(1,), redone=1)
    run.begins(1, restored, 1, joined)
    for member in (0, 2, 3):
        run.says(member, joined)
    findings = audit(run.ends().events)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]


def test_only_the_first_remaining_member_saves() -> None:
    for saver, verdict in ((1, "pass"), (2, "fail")):
        run = FakeLiveRun(0)
        run.says(saver, Commit(1, LOST_AT + 1, 4096, 0.5, state=digest("state")))
        assert worst(audit(run.ends().events)) == verdict


def test_a_member_may_declare_two_losses_of_one_step_at_once() -> None:
    run = FakeLiveRun(2)
    for who in run.files:
        run.files[who] = [e for e in run.files[who] if not (isinstance(e.what, Step) and e.what.step == LOST_AT)]
    run.basis = tuple(range(WORLD))
    mine, theirs = (tuple(PLAN.share(PLAN.position(LOST_AT), each, WORLD).tolist()) for each in (3, 2))
    run.files["rank-1"].pop()
    run.says(0, Regroup(1, 2, LOST_AT, "forward", (0, 1), (3,), mine, redone=1))
    run.says(1, Regroup(1, 2, LOST_AT, "forward", (0, 1), (2, 3), theirs + mine, redone=1))
    run.members = (0, 1)
    run.trains(LOST_AT, LOST_AT + 1)
    run.basis = run.members
    findings = audit(run.ends().events)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    assert "but 4 declared missing" in found(findings, "every_sample_trained_once").because


def test_a_joining_member_may_declare_changes_before_it_has_joined() -> None:
    run = FakeLiveRun(3)
    first, left = Regroup(1, 2, LOST_AT + 1, "forward", (0, 1, 2, 3)), (0, 1, 3)
    second = Regroup(1, 3, LOST_AT + 1, "forward", left, (2, 3))
    run.says(2, first)
    for member in (0, 1):
        run.says(member, first)
        run.says(member, second)
    run.members = run.basis = left
    run.begins(3, LOST_AT + 1, 3, first)
    recover = run.files["rank-3"].pop()
    run.says(3, second)
    run.files["rank-3"].append(recover)
    findings = audit(run.ends().events)
    assert worst(findings) == "pass", findings


@pytest.mark.parametrize(("lacks", "verdict"), [((3, 2), "pass"), ((2,), "fail"), ((3,), "fail"), ((), "fail")])
def test_a_step_lacks_gradients_that_were_kept_and_then_lost(lacks: tuple[int, ...], verdict: str) -> None:
    run = FakeLiveRun(3, how="complete")
    last = {who: events.pop() for who, events in run.files.items() if who != "rank-3"}
    del last["rank-2"]
    at = PLAN.position(LOST_AT)
    missing = tuple(int(each) for member in lacks for each in PLAN.share(at, member, WORLD))
    run.members = run.basis = (0, 1)
    for member in run.members:
        run.says(member, Regroup(1, 2, LOST_AT, "forward", (0, 1), (2,), missing, 0, 3))
        run.files[f"rank-{member}"].append(last[f"rank-{member}"])
    assert worst(audit(run.ends().events)) == verdict


def test_a_member_killed_while_it_joined_loses_no_samples() -> None:
    run = FakeLiveRun(2)
    joined = Regroup(1, 2, LOST_AT + 1, "forward", (0, 1, 2, 3))
    run.begins(2, LOST_AT + 1, 2, joined)
    run.files["rank-2"].pop()  # what it would begin with
    for member in run.members:
        run.says(member, joined)
        run.says(member, Regroup(1, 3, LOST_AT + 1, "forward", run.members, (2,)))
    findings = audit(run.ends().events)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]


def test_a_process_killed_before_it_joined_was_not_a_member() -> None:
    run = FakeLiveRun(2)
    run.begins(2, LOST_AT + 1, 2)
    run.files["rank-2"].pop()
    findings = audit(run.joins(2).ends().events)
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    assert "member 2 joined at step 7" in found(findings, "lost_workers_are_declared").because
    waiting = FakeLiveRun(2)
    waiting.begins(2, LOST_AT + 1, 2)
    waiting.files["rank-2"].pop()
    assert worst(audit(waiting.ends().events)) == "pass"


def asleep(*, wakes: bool = True) -> FakeLiveRun:
    """Member 2 falls asleep before step 6, and wakes before the next one but one."""
    run = FakeLiveRun(2, how="before")
    run.files = {
        who: [
            event._replace(what=event.what._replace(lost=(), asleep=(2,))) if isinstance(event.what, Regroup) else event
            for event in events
        ]
        for who, events in run.files.items()
    }
    told = [Open(2), Launch(1, WORLD), Scale(1, WORLD - 1, 1)]
    run.files["supervisor"] = [Event(1.0, "supervisor", what) for what in told]
    return run.joins(2) if wakes else run


@pytest.mark.parametrize("wakes", [True, False])
def test_a_suspended_member_loses_nothing(wakes: bool) -> None:
    findings = audit(asleep(wakes=wakes).ends().events, RunFacts("forward"))
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]
    said = found(findings, "lost_workers_are_declared").because
    assert "member 2 suspended at step 6" in said
    assert ("member 2 joined at step 7" in said) is wakes
    assert "none repeated, missing or extra" in found(findings, "every_sample_trained_once").because


def test_a_replacement_that_is_suspended_was_not_lost_again() -> None:
    run = FakeLiveRun(2).joins(2)
    run.members = run.basis = (0, 1, 3)
    for member in run.members:
        run.says(member, Regroup(1, run.number + 1, run.reached, "forward", run.members, asleep=(2,)))
    saw = Detect(1, 2, 2, "signal", "was killed by SIGKILL", -9, "SIGKILL", LOST_AT)
    told = [Open(2), Launch(1, WORLD), saw, Scale(1, WORLD - 1, run.number + 1), Judged("completed", 1, "all are done")]
    run.files["supervisor"] = [Event(1.0, "supervisor", what) for what in told]
    findings = audit(run.ends().events, RunFacts("forward"))
    assert worst(findings) == "pass", [each for each in findings if each.verdict != "pass"]


def test_a_suspended_member_reported_every_step_and_trains_no_more() -> None:
    run = asleep(wakes=False).ends()
    last = run.without(lambda who, what: who == "rank-2" and isinstance(what, Step) and what.step == LOST_AT - 1)
    assert worst(audit(last)) == "fail"
    run.basis = tuple(range(WORLD))
    run.says(2, run.share(2, LOST_AT, digest("shared", LOST_AT) + digest(2, LOST_AT)))
    assert worst(audit(run.events)) == "fail"


def test_no_member_is_suspended_within_a_step() -> None:
    run = FakeLiveRun(2).ends()
    assert worst(audit(run.with_other(is_regroup, lost=(), asleep=(2,)))) == "fail"
