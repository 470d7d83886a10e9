"""The audit of silent data corruption: equal digests pass, others fail unless the run has noticed and undone them."""

from fake_two_ranks import TwoRankRun
from holdfast.audit.verdicts import audit
from holdfast.events import Corruption, Witnessed

CHECK = "no_corruption_remains"


def corruption(
    agreed: int | None = 5, copies: tuple[str, ...] = (), digests: tuple[str, ...] = ("a", "b")
) -> Corruption:
    return Corruption(1, 12, agreed, (0, 1), None, "ranks 0 and 1 had different states", digests, copies)


def restarted(run: TwoRankRun, restored: int | None = 5) -> TwoRankRun:
    return run.trains(2, restored, 17).stops(2, 17)


def noticed(what: Corruption) -> TwoRankRun:
    run = TwoRankRun().trains(1, None, 14)
    run.saves(1, 5)
    run.says(0, what)
    return run


def verdict_of(run: TwoRankRun) -> str | None:
    """Return the verdict of the check; None if it is left out."""
    return next((finding.verdict for finding in audit(run.events) if finding.check == CHECK), None)


def test_the_check_is_left_out_if_no_states_were_compared() -> None:
    run = TwoRankRun().trains(1, None, 17).stops(1, 17)
    assert CHECK not in [finding.check for finding in audit(run.events)]


def test_the_check_is_unknown_if_the_run_compared_states_but_a_rank_has_no_record_of_it() -> None:
    run = TwoRankRun().trains(1, None, 17, witness_every=5)
    run.says(0, Witnessed(1, 5, "a"))
    verdict, because = run.stops(1, 17).found(CHECK)
    assert verdict == "unknown"
    assert because.startswith("rank-1 trained attempt 1 with --witness-every 5, but has no record of a comparison")


def test_a_record_is_missing_only_if_a_comparison_must_have_ended() -> None:
    for end, verdict in ((5, None), (6, "unknown")):  # step 5 begins after the comparison of step 0
        run = TwoRankRun().trains(1, None, end, witness_every=5)
        assert verdict_of(run) == verdict
        assert verdict_of(run.stops(1, end)) == "unknown"  # a run ends after its last comparison
    run = TwoRankRun().trains(1, 8, 10, witness_every=5)
    assert verdict_of(run) is None
    assert verdict_of(TwoRankRun().trains(1, 8, 11, witness_every=5)) == "unknown"


def test_a_comparison_that_found_a_corruption_needs_no_other_record() -> None:
    run = TwoRankRun().trains(1, None, 14, witness_every=5)
    run.saves(1, 5)
    run.says(0, corruption())
    run.trains(2, 5, 17, witness_every=5)
    for rank in range(2):
        run.says(rank, Witnessed(2, 5, "a"))
    assert run.stops(2, 17).found(CHECK)[0] == "pass"


def test_equal_digests_pass_and_others_fail() -> None:
    run = TwoRankRun().trains(1, None, 17)
    for rank in range(2):
        run.says(rank, Witnessed(1, 5, "a"), Witnessed(1, 10, "b"))
    assert run.stops(1, 17).found(CHECK) == ("pass", "all ranks agreed on the whole state before 2 steps")
    run = TwoRankRun().trains(1, None, 17)
    for rank in range(2):
        run.says(rank, Witnessed(1, 5, "ab"[rank]))
    verdict, because = run.stops(1, 17).found(CHECK)
    assert verdict == "fail"
    assert because.startswith("rank-0 and rank-1 had different states before")


def test_shards_are_compared_with_the_copies_of_the_next_rank() -> None:
    for copies, verdict in ((("b", "a"), "pass"), (("b", "c"), "fail")):
        run = TwoRankRun().trains(1, None, 17)
        for rank in range(2):
            run.says(rank, Witnessed(1, 5, "ab"[rank], copies[rank], rank))
        assert run.stops(1, 17).found(CHECK)[0] == verdict


def test_a_corruption_passes_if_the_run_restarts_from_before_it() -> None:
    verdict, because = restarted(noticed(corruption())).found(CHECK)
    assert verdict == "pass"
    assert "ranks 0 and 1 had different states before step 12 of attempt 1, and was undone" in because
    assert restarted(noticed(corruption(agreed=4))).found(CHECK)[0] == "fail"
    assert restarted(noticed(corruption(agreed=None)), None).found(CHECK)[0] == "pass"
    assert restarted(noticed(corruption(agreed=None))).found(CHECK)[0] == "fail"
    assert noticed(corruption()).found(CHECK)[0] == "unknown"


def test_the_repeated_steps_tell_which_of_two_copies_was_wrong() -> None:
    for again, wrong in (("a", "the copy on rank 1 was wrong"), ("z", "the shard of rank 0 was wrong")):
        run = noticed(corruption(copies=("b", "c"), digests=("a", "b")))
        run.trains(2, 5, 17)
        for rank in range(2):
            run.says(rank, Witnessed(2, 12, (again, "b")[rank], ("b", again)[rank], rank))
        assert wrong in run.stops(2, 17).found(CHECK)[1]


def test_states_that_a_flipped_bit_has_changed_are_not_compared_with_those_of_the_repetition() -> None:
    run = TwoRankRun().trains(1, None, 14)
    wrong = [event.what for event in run.events if event.kind == "step" and event.what.step >= 8]  # type: ignore[union-attr]
    changed = {id(what): what._replace(state="0" * 32) for what in wrong}  # type: ignore[union-attr]
    run.events = [event._replace(what=changed.get(id(event.what), event.what)) for event in run.events]
    run.saves(1, 5)
    run.says(0, corruption())
    assert restarted(run).found("repeated_steps_agree")[0] == "pass"
    trusted = [event for event in run.events if event.kind != "corruption"]
    run.events = trusted
    assert run.found("repeated_steps_agree")[0] == "fail"
