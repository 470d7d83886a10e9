"""The checks of a served run, in the order in which findings are shown."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from holdfast.finding import Verdict
from holdfast.server.audit import applied_rounds as rounds
from holdfast.server.audit import ends, holdings, pushes, record
from holdfast.server.audit import stale_rounds as stale
from holdfast.server.audit.server_ledger import ServedLedger

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
