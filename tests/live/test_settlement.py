"""How members go on after a loss, by where each of them stands."""

from holdfast.live.settlement import NOWHERE, MemberReport, RecoveryPlan, make_plan

ALL = (0, 1, 2)


def in_backward(*done: bool, step: int = 5, synced: int = 0) -> MemberReport:
    return MemberReport(step=step, begun=True, basis=ALL, members=ALL, buckets=done, synced=synced)


def found(stands: dict[int, MemberReport]) -> RecoveryPlan:
    how = make_plan(stands)
    assert isinstance(how, RecoveryPlan)
    return how


def test_a_sum_that_one_member_has_is_sent_and_one_that_no_member_has_is_summed_again() -> None:
    how = found({0: in_backward(True, True, False), 2: in_backward(True, False, False)})
    assert (how.step, how.lost, how.given) == (5, (1,), (0, 0, None))
    assert not how.is_complete


def test_a_sum_that_all_members_have_is_not_sent() -> None:
    assert found({0: in_backward(True, True, False), 2: in_backward(True, False, False)}).shared == {0}


def test_a_joining_worker_gets_every_sum() -> None:
    how = found({0: in_backward(True, False), 1: MemberReport(step=NOWHERE), 2: in_backward(True, False)})
    assert (how.joining, how.given, how.shared) == ((1,), (0, None), frozenset())


def test_a_worker_cannot_join_in_the_second_backward_of_a_step() -> None:
    second = MemberReport(step=5, begun=True, basis=ALL, members=ALL, passes=1, buckets=(False,))
    how = make_plan({0: second, 1: MemberReport(step=NOWHERE), 2: second})
    assert how == "a worker that joins cannot repeat the backward passes of this step that are complete"


def test_a_member_one_step_behind_takes_over_the_parameters_of_a_member_ahead() -> None:
    ahead = MemberReport(step=6, members=ALL, basis=ALL)
    how = found({0: in_backward(True, False), 2: ahead})
    assert (how.step, how.behind, how.giver, how.given) == (6, (0,), 2, ())


def test_a_worker_that_joins_gets_the_state_of_a_member_that_has_finished_the_step_before_itself() -> None:
    taken_over = MemberReport(
        step=6, members=ALL, basis=ALL, is_staged=True
    )  # in an earlier round, which was cut short
    ahead = MemberReport(step=6, begun=True, members=ALL, basis=ALL, buckets=(False,))
    how = found({0: taken_over, 1: MemberReport(step=NOWHERE), 2: ahead})
    assert (how.step, how.joining, how.giver) == (6, (1,), 2)
    how_without = make_plan({0: taken_over, 1: MemberReport(step=NOWHERE)})
    assert how_without == "the member that had finished step 5 is lost, and the others have only its parameters"


def test_a_sum_of_a_backward_that_not_all_members_have_begun_needs_a_restart() -> None:
    before = MemberReport(step=5, begun=True, basis=ALL, members=ALL)
    assert make_plan({0: in_backward(True, False), 2: before}) == "a sum is done that not all survivors have begun"


def test_members_that_divided_the_step_differently_need_a_restart() -> None:
    other = MemberReport(step=5, begun=True, basis=(0, 2), members=ALL, buckets=(False,))
    assert (
        make_plan({0: in_backward(False), 2: other})
        == "the survivors disagree about how this step's samples were divided"
    )
