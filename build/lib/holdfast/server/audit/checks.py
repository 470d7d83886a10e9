"""The audit checks of a run on the parameter server, in the order in which findings are shown."""

from collections.abc import Callable, Mapping

from holdfast.finding import SHOWN, Verdict, counted
from holdfast.server.audit import applied_pushes, stale_rounds
from holdfast.server.audit.server_ledger import ServedLedger, ServerWriter


def iterations_follow(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that no iteration is missing from the history, and that none is recorded after the end of the run."""
    replay = ledger.replay
    if wrong := replay.wrong["ends"]:
        return "fail", wrong[0]
    return ("pass" if replay.iterations else "unknown"), f"{counted(replay.iterations, 'iteration')} in order"


def reached_the_end(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that the run ended because the loss fell below the criterion, or after the last allowed iteration."""
    replay, plan = ledger.replay, ledger.plan
    if replay.done is None:
        return "unknown", f"the run is not done: {counted(replay.iterations, 'iteration')} recorded"
    ended = "the controller ended after"
    if replay.done.step != replay.iterations:
        return "fail", f"{ended} {replay.done.step} iterations, but {replay.iterations} are recorded"
    if replay.is_converged:
        below = f"the loss {replay.loss:.6g} is below {plan.criterion:.6g}"
        return "pass", f"{below} after {counted(replay.iterations, 'iteration')}"
    if replay.iterations == plan.iterations:
        return "pass", f"all {counted(plan.iterations, 'iteration')} allowed are done; the criterion is not reached"
    return "fail", f"{ended} {replay.iterations} of {plan.iterations} iterations, above the criterion"


def every_block_has_one_owner(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that every block always has exactly one owner, according to the recorded restores and moves of blocks."""
    replay = ledger.replay
    if wrong := replay.wrong["owners"]:
        return "fail", _first(wrong)
    if not replay.tenures:
        return "unknown", "no blocks have been dealt out yet"
    return "pass", f"{counted(ledger.plan.blocks, 'block')} by {counted(len(replay.tenures), 'map')}"


def lost_blocks_came_back(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that lost blocks (with full recovery, all blocks) were restored before training continued."""
    replay = ledger.replay
    if wrong := replay.wrong["losses"]:
        return "fail", _first(wrong)
    if replay.ownership.orphans and not replay.done:
        return "unknown", f"{counted(replay.ownership.orphans, 'block')} of lost nodes have not been restored yet"
    lost = sum(len(loss.blocks) for loss in replay.losses)
    how = "all blocks were restored" if ledger.plan.recovery == "full" else "only these were restored"
    return "pass", f"{counted(lost, 'block')} lost; {how}" if lost else "no block was lost"


def saves_were_chosen(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that nodes chose blocks for every due save, and saved the chosen blocks unless the node was lost."""
    replay = ledger.replay
    ledger.require_nodes()
    if wrong := replay.wrong["saves"]:
        return "fail", _first(wrong)
    if replay.saves.unclear is not None:
        return "unknown", f"the blocks of the save of iteration {replay.saves.unclear} are not recorded"
    return "pass", f"{counted(replay.saves.commits, 'save')} committed, as chosen by {ledger.plan.policy}"


def restores_only_committed(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that blocks were restored only from their newest committed saves."""
    replay = ledger.replay
    ledger.require_nodes()
    if wrong := replay.wrong["restores"]:
        return "fail", _first(wrong)
    if replay.restored and replay.saves.unclear is not None:
        return "unknown", "the newest save of each block is not recorded"
    if replay.unsaved and ledger.plan.recovery == "fresh":
        saved, fresh = replay.restored - replay.unsaved, counted(replay.unsaved, "block")
        newest = f"{counted(saved, 'block')} restored, each from its newest save"
        return "pass", f"{newest}; {fresh} had none and got new values"
    return "pass", f"{counted(replay.restored, 'block')} restored, each from its newest save"


def _first(wrong: list[str]) -> str:
    return wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")


def history_is_readable(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that every event has the required fields and was written by a process that may write such events."""
    if wrong := ledger.wrong:
        more = ["and more"] if len(wrong) > SHOWN else []
        return "fail", f"{counted(len(wrong), 'wrong line')}: {'; '.join([*wrong[:SHOWN], *more])}"
    torn = [f"{line.path.name} line {line.line}, {line.size} bytes" for line in ledger.torn]
    left = f"; killed processes left {counted(len(torn), 'incomplete line')}: {'; '.join(torn)}" if torn else ""
    return "pass", f"{counted(ledger.events, 'event')} of {counted(len(ledger.writers), 'writer')}{left}"


def all_members_are_on_record(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that there is a history file of the controller, and of every node and worker that took part in the run."""
    plan, present = ledger.plan, set(ledger.writers)
    nodes = {*range(plan.nodes), *(node for tenure in ledger.replay.tenures for node in tenure.held)}
    needed = {ServerWriter("node", n) for n in nodes} | {ServerWriter("worker", n) for n in range(plan.workers)}
    if absent := sorted(needed - present):
        names = ", ".join(f"{writer.kind}-{writer.number}" for writer in absent[:SHOWN])
        return "unknown", f"there is no history of {names}: collect the histories of all machines"
    ever = ledger.replay.members.ever
    for kind, number in ledger.writers:
        if kind != "controller" and number not in ever[kind] and len(ledger.events_of(kind, number)) > 1:
            return "fail", f"{kind}-{number} has a history, but never joined"
    members = f"{counted(len(ever['node']), 'node')} and {counted(len(ever['worker']), 'worker')}"
    return "pass", f"the histories of the controller, {members}"


def one_plan(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that all successive controllers of the run recorded the same workload and settings."""
    first, *others = ledger.plans or [ledger.plan]
    for other in others:
        fields = [name for name in first._fields if name != "attempt"]
        if differing := [name for name in fields if getattr(first, name) != getattr(other, name)]:
            return "fail", f"controller {other.attempt} has another plan: {', '.join(differing)} differ"
    return "pass", (
        f"{first.workload}, {counted(first.blocks, 'block')} on {counted(first.nodes, 'node')}, by "
        f"{counted(1 + len(others), 'controller')}"
    )


CHECKS: Mapping[str, Callable[[ServedLedger], tuple[Verdict, str]]] = {
    check.__name__: check
    for check in (
        history_is_readable,
        all_members_are_on_record,
        one_plan,
        iterations_follow,
        reached_the_end,
        every_block_has_one_owner,
        applied_pushes.every_round_reaches_every_block,
        applied_pushes.every_push_is_applied_once,
        stale_rounds.nobody_was_too_far_ahead,
        applied_pushes.parts_change_hands_only_by_loss,
        lost_blocks_came_back,
        saves_were_chosen,
        restores_only_committed,
    )
}
