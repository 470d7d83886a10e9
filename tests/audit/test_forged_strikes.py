"""Whether the audit can be fooled about failures that were struck on purpose, which are on record before they strike."""

import random

import pytest

from fake_runs import live
from fake_two_ranks import Told, by, failed, found
from holdfast.audit.verdicts import audit
from holdfast.events import Attempt, Done, Judged, Launch, Open, Restart, Step, Stopped, Strike


def killed(*strikes: Strike, who: str = "injected-1") -> Told:
    """Rank 1 was killed before step 12 of attempt 1, and the run was stopped by its script in attempt 2."""
    run = Told().trains(1, None, 12).saves(1, 10).trains(2, 10, 17).stops(2, 17)
    run.supervisor(Open(2), Launch(1, 2), failed(1, 12), Restart(2, 2), Judged("completed", 2, ""))
    run.events += by(who, Open(2), *strikes)
    return run


def lives(run: Told) -> tuple[str, str]:
    return run.found("every_life_is_an_attempt")


@pytest.mark.parametrize(
    "strike",
    [
        Strike(1, 12, "kill", 1),
        Strike(1, 12, "exit", 1),
        Strike(1, 13, "kill", 1),  # its last step may not be on record
        Strike(1, 10, "kill", 1, "save"),  # in the first save since
        Strike(1, 10, "kill", 1, "optimizer"),  # before the next step of one, in whichever window that is
        Strike(1, 3, "slow", 1),
        Strike(1, 3, "hang", 1),  # somebody may wake it
    ],
)
def test_a_failure_that_struck_as_it_is_told_passes(strike: Strike) -> None:
    run = killed(strike)
    assert lives(run)[0] == run.agree()[0] == "pass"


def test_a_failure_of_storage_passes() -> None:
    assert killed(Strike(1, 5, "enospc", 0), who="injected-storage").verdict() == "pass"


def test_a_rank_that_goes_on_after_it_was_killed_fails() -> None:
    assert lives(killed(Strike(1, 7, "kill", 1))) == (
        "fail",
        "injected-1 tells that rank 1 was to end before step 7 of attempt 1 (kill), and it trained to step 12",
    )


def test_a_rank_that_ends_in_order_though_it_was_killed_fails() -> None:
    assert lives(killed(Strike(2, 17, "kill", 1))) == (
        "fail",
        "injected-1 tells that rank 1 was to end before step 17 of attempt 2 (kill), and it was stopped at step 17",
    )


def test_a_failure_in_an_attempt_that_never_was_or_of_a_rank_that_never_was_fails() -> None:
    assert lives(killed(Strike(5, 12, "kill", 1))) == (
        "fail",
        "injected-1 tells of a failure in attempt 5, of which no rank tells",
    )
    assert lives(killed(Strike(1, 12, "kill", 2), who="injected-2")) == (
        "fail",
        "injected-2 tells of a failure of rank 2 in attempt 1, whose world has 2 ranks",
    )


def test_a_failure_in_an_attempt_that_only_rank_0_could_tell_of_is_not_known_without_its_file() -> None:
    run = killed(Strike(5, 12, "kill", 1))
    run.events = [each for each in run.events if each.who != "rank-0"]
    assert run.verdict() != "pass"


def test_a_failure_of_another_rank_than_that_of_its_file_fails() -> None:
    assert lives(killed(Strike(1, 12, "kill", 0))) == ("fail", "injected-1 tells of a failure of rank 0")


@pytest.mark.parametrize("who", ["supervisor", "somebody", "injected-x", "injected-01"])
def test_a_failure_that_no_injector_can_have_told_of_fails(who: str) -> None:
    run = Told().trains(1, None, 17).stops(1, 17)
    told = (Launch(1, 2),) if who == "supervisor" else ()
    run.events += by(who, Open(2), *told, Strike(1, 12, "kill", 1))
    assert lives(run)[0] == "fail"


@pytest.mark.parametrize("point", ["boundary", "forward", "backward=0.5", "optimizer", "save"])
def test_a_run_that_is_said_to_be_completed_though_a_worker_was_killed_in_it_fails(point: str) -> None:
    """Also where no rank says how it ended: a script may leave its loop."""
    run = Told().trains(1, None, 12).supervisor(Open(2), Launch(1, 2), Judged("completed", 1, ""))
    assert run.agree()[0] == "pass"
    run.events += by("injected-1", Open(2), Strike(1, 12, "kill", 1, point))
    assert run.agree() == (
        "fail",
        "supervisor says 'completed', and injected-1 tells that rank 1 was to end in attempt 1 (kill), of which no "
        "supervisor saw a failure",
    )


def test_a_kill_that_is_added_to_a_run_is_caught_wherever_a_rank_trained_on() -> None:
    caught = 0
    for seed in range(40):
        run = live(random.Random(seed))
        steps = [each for each in run.events if isinstance(each.what, Step)]
        ranks = {each.what.attempt: {e.who for e in steps if e.what.attempt == each.what.attempt} for each in steps}
        starts = [each for each in run.events if isinstance(each.what, Attempt)]
        for event in steps[:: max(1, len(steps) // 4)]:
            what = event.what
            alone = sum(each.who == event.who and each.what.attempt == what.attempt for each in starts) == 1
            if not alone or event.who not in ranks[what.attempt]:
                continue
            member = int(event.who.removeprefix("rank-"))
            forged = [*run.events, *by(f"injected-{member}", Open(2), Strike(what.attempt, what.step, "kill", member))]
            assert found(audit(forged), "every_life_is_an_attempt")[0] == "fail"
            caught += 1
    assert caught > 40


def test_every_end_in_order_contradicts_a_kill() -> None:
    for seed in range(40):
        run = live(random.Random(seed))
        ended = [each for each in run.events if isinstance(each.what, Done | Stopped)]
        if not ended:
            continue
        member, what = int(ended[-1].who.removeprefix("rank-")), ended[-1].what
        lived = [e for e in run.files[ended[-1].who] if isinstance(e.what, Attempt) and e.what.attempt == what.attempt]
        if len(lived) == 1:
            strike = Strike(what.attempt, what.step, "kill", member)
            forged = [*run.events, *by(f"injected-{member}", Open(2), strike)]
            assert found(audit(forged), "every_life_is_an_attempt")[0] == "fail"
