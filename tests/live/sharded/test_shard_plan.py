"""How the ranks of a sharded run continue after a loss, by the collectives that each of them has completed."""

from collections.abc import Mapping, Sequence

from holdfast.live.sharded.shard_plan import JOINS, ShardPlan, ShardReport, make_shard_plan

JOINING = ShardReport(step=JOINS)


NEXT = {rank: ((rank + 1) % 4,) for rank in range(4)}  # the ranks with a copy of each rank's shards
REPLICAS = {0: (2,), 1: (3,), 2: (0,), 3: (1,)}  # two replicas on two ranks each


def within(collectives: int, *, step: int = 5, optimizer_steps: int = 0, exchanges: bool = False) -> ShardReport:
    return ShardReport(
        step=step,
        begun=True,
        collectives=collectives,
        optimizer_steps=optimizer_steps,
        exchanges=exchanges,
        members=(0, 1, 2, 3),
    )


def plan(*reports: ShardReport, copies: Mapping[int, Sequence[int]] = NEXT) -> ShardPlan:
    made = make_shard_plan(dict(enumerate(reports)), copies)
    assert isinstance(made, ShardPlan), made
    return made


def reason(*reports: ShardReport, copies: Mapping[int, Sequence[int]] = NEXT) -> str:
    made = make_shard_plan(dict(enumerate(reports)), copies)
    assert isinstance(made, str)
    return made


def test_a_replacement_gets_its_shard_from_the_next_rank_and_all_other_state_from_any_survivor() -> None:
    made = plan(within(7), JOINING, within(7), within(8))
    assert (made.step, made.begun, made.lost, made.joining) == (5, True, (1,), (1,))
    assert (made.holders, made.giver, made.completed) == ({1: 2}, 0, {0: 7, 1: 0, 2: 7, 3: 8})


def test_with_hybrid_sharding_a_replacement_gets_its_shard_from_another_replica() -> None:
    assert plan(within(7), JOINING, within(7), within(9), copies=REPLICAS).holders == {1: 3}


def test_a_whole_replica_that_is_lost_gets_its_shards_from_the_other() -> None:
    assert plan(within(7), within(7), JOINING, JOINING, copies=REPLICAS).holders == {2: 0, 3: 1}


def test_all_replicas_of_a_shard_lost_together_need_a_restart() -> None:
    assert reason(within(2), JOINING, within(2), JOINING, copies=REPLICAS) == (
        "ranks 1 and 3 are lost, and with them all copies of a shard"
    )


def test_two_lost_ranks_that_are_no_neighbours_are_replaced_together() -> None:
    made = plan(JOINING, within(2), JOINING, within(2))
    assert (made.joining, made.lost, made.holders) == ((0, 2), (0, 2), {0: 1, 2: 3})


def test_neighbours_that_are_lost_together_need_a_restart() -> None:
    assert reason(JOINING, within(2), within(2), JOINING) == (
        "ranks 0 and 3 are lost, and with them all copies of a shard"
    )


def test_a_loss_after_an_optimizer_has_stepped_needs_a_restart() -> None:
    stepped = within(9, optimizer_steps=1)
    assert reason(stepped, JOINING, stepped, stepped) == "an optimizer has stepped in the interrupted step"


def test_survivors_in_two_steps_need_a_restart() -> None:
    assert reason(within(9), JOINING, within(0, step=6), within(0, step=6)) == "the survivors are in steps 5 and 6"


def test_a_survivor_in_the_last_exchange_of_a_step_that_another_rank_has_completed_finishes_the_step() -> None:
    made = plan(within(0, step=6), JOINING, within(9, exchanges=True), within(3, step=6))
    assert (made.step, made.late, made.giver, made.completed) == (6, (2,), 0, {0: 0, 1: 0, 2: 0, 3: 3})
    assert made.holders == {1: 2}  # with the state after the step


def test_a_survivor_in_the_exchange_before_the_first_of_two_optimizer_steps_needs_a_restart() -> None:
    between = within(10, optimizer_steps=1, exchanges=True)
    assert reason(within(9, exchanges=True), JOINING, between, between) == (
        "an optimizer has stepped in the interrupted step"
    )


def test_a_worker_that_would_look_for_copies_on_other_ranks_makes_the_run_restart() -> None:
    assert "another number of nodes" in reason(within(2), ShardReport(step=JOINS, apart=2), within(2), within(2))


def test_if_no_survivor_is_left_the_run_restarts() -> None:
    joining = dict.fromkeys(range(2), JOINING)
    assert make_shard_plan(joining, {0: (), 1: ()}) == "no rank that was in the interrupted step is left"


def test_a_missing_rank_needs_a_restart() -> None:
    assert make_shard_plan({0: within(1), 1: within(1)}, NEXT) == (
        "a model that is sharded over 4 ranks cannot continue with 2"
    )


def test_a_report_survives_its_conversion_to_json() -> None:
    report = within(3)
    assert ShardReport.from_json({**report.to_json(), "members": [0, 1, 2, 3]}) == report
