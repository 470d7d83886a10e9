"""The checks of a served run, in the order in which findings are shown."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from holdfast.audit.finding import Verdict
from holdfast.audit.served import ends, holdings, pushes, record, rounds, stale
from holdfast.audit.served.ledger import ServedLedger

Check: TypeAlias = Callable[[ServedLedger], tuple[Verdict, str]]
CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        record.history_is_readable,
        record.all_members_are_on_record,
        record.one_plan,
        ends.iterations_follow,
        ends.reached_the_end,
        holdings.every_block_has_one_owner,
        rounds.every_round_reaches_every_block,
        pushes.every_push_is_applied_once,
        stale.nobody_was_too_far_ahead,
        pushes.parts_change_hands_only_by_loss,
        holdings.lost_blocks_came_back,
        holdings.saves_were_chosen,
        holdings.restores_only_committed,
    )
}
