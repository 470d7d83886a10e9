"""How the ranks of a sharded run continue after a loss, by the collectives that each of them has completed."""

from holdfast.live.sharded.shard_plan import JOINS, ShardPlan, ShardReport, make_shard_plan

JOINING = ShardReport(step=JOINS)


def within(collectives: int, *, step: int = 5, catches_up: bool = False, optimizer_steps: int = 0) -> ShardReport:
    return ShardReport(
        step=step,
        begun=True,
        collectives=collectives,
        catches_up=catches_up,
        optimizer_steps=optimizer_steps,
        members=(0, 1, 2, 3),
    )


def plan(*reports: ShardReport) -> ShardPlan:
    made = make_shard_plan(dict(enumerate(reports)), 4)
    assert isinstance(made, ShardPlan), made
    return made


def reason(*reports: ShardReport) -> str:
    made = make_shard_plan(dict(enumerate(reports)), 4)
    assert isinstance(made, str)
    return made


def test_a_replacement_is_served_all_collectives_that_the_survivors_have_completed() -> None:
    made = plan(within(7), JOINING, within(7), within(7))
    assert (made.step, made.begun, made.lost, made.joining) == (5, True, (1,), (1,))
    assert (made.until, made.completed, made.repeating, made.giver) == (7, {1: 0}, (), 0)


def test_survivors_one_collective_ahead_repeat_it_with_the_others() -> None:
    made = plan(within(7), within(8), JOINING, within(8))
    assert (made.until, made.repeating) == (7, (1, 3))


def test_a_replacement_that_still_catches_up_is_served_the_rest() -> None:
    made = plan(within(7), JOINING, within(7), within(3, catches_up=True))
    assert (made.until, made.completed, made.giver) == (7, {1: 0, 3: 3}, 0)


def test_two_lost_ranks_that_are_no_neighbours_are_replaced_together() -> None:
    made = plan(JOINING, within(2), JOINING, within(2))
    assert (made.joining, made.lost, made.completed) == ((0, 2), (0, 2), {0: 0, 2: 0})


def test_neighbours_that_are_lost_together_need_a_restart() -> None:
    assert reason(JOINING, within(2), within(2), JOINING) == (
        "ranks 3 and 0 are lost, and with them both copies of a shard"
    )


def test_a_loss_after_an_optimizer_has_stepped_needs_a_restart() -> None:
    stepped = within(9, optimizer_steps=1)
    assert reason(stepped, JOINING, stepped, stepped) == "an optimizer has stepped in the interrupted step"


def test_survivors_in_two_steps_need_a_restart() -> None:
    assert reason(within(9), JOINING, within(0, step=6), within(0, step=6)) == "the survivors are in steps 5 and 6"


def test_survivors_two_collectives_apart_need_a_restart() -> None:
    assert "completed 4 and 6 collectives" in reason(within(4), JOINING, within(6), within(4))


def test_if_only_replacements_that_catch_up_are_left_the_run_restarts() -> None:
    made = make_shard_plan({0: within(1, catches_up=True), 1: JOINING, 2: within(1, catches_up=True)}, 3)
    assert made == "no rank that was in the interrupted step is left"


def test_a_missing_rank_needs_a_restart() -> None:
    assert make_shard_plan({0: within(1), 1: within(1)}, 4) == (
        "a model that is sharded over 4 ranks cannot continue with 2"
    )


def test_a_report_survives_its_conversion_to_json() -> None:
    report = within(3, catches_up=True)
    assert ShardReport.from_json({**report.to_json(), "members": [0, 1, 2, 3]}) == report
