"""The checks of a served run, in the order in which findings are shown.

Whether a served run did all of its iterations, one after the other, and ended as its plan says.

Whether every block had one owner at every time, and what was lost came back, from the save it had to.

Whether the record of a served run is whole: every line is one that its writer can know, by everybody who took part.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from holdfast.finding import SHOWN, Verdict, counted
from holdfast.server.audit import applied_pushes, stale_rounds
from holdfast.server.audit.server_ledger import ServedLedger, ServerWriter


def iterations_follow(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Iterations follow each other without gaps, and none is done after the end."""
    replay = ledger.replay
    if wrong := replay.wrong["ends"]:
        return "fail", wrong[0]
    return ("pass" if replay.iterations else "unknown"), f"{counted(replay.iterations, 'iteration')}, each told once"


def reached_the_end(ledger: ServedLedger) -> tuple[Verdict, str]:
    """The loss came below the criterion, or all allowed iterations were done."""
    replay, plan = ledger.replay, ledger.plan
    if replay.done is None:
        return "unknown", f"the run is not done: {counted(replay.iterations, 'iteration')} on record"
    if replay.done.step != replay.iterations:
        return (
            "fail",
            f"the controller was done after {replay.done.step} iterations, and {replay.iterations} are on record",
        )
    if replay.is_converged:
        return (
            "pass",
            f"the loss {replay.loss:.6g} is below {plan.criterion:.6g} after {counted(replay.iterations, 'iteration')}",
        )
    if replay.iterations == plan.iterations:
        return (
            "pass",
            f"all {counted(plan.iterations, 'iteration')} that were allowed are done; the criterion is not reached",
        )
    return (
        "fail",
        f"the controller was done after {replay.iterations} of {plan.iterations} iterations, above the criterion",
    )


def every_block_has_one_owner(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Who holds which block follows from the first map, and from every loss, return and move since."""
    replay = ledger.replay
    if wrong := replay.wrong["owners"]:
        return "fail", _first(wrong)
    if not replay.tenures:
        return "unknown", "blocks were not dealt out yet"
    return "pass", f"{counted(ledger.plan.blocks, 'block')} by {counted(len(replay.tenures), 'map')}"


def lost_blocks_came_back(ledger: ServedLedger) -> tuple[Verdict, str]:
    """What a lost node held came back to others before the run went on: that alone, or with full recovery everything."""
    replay = ledger.replay
    if wrong := replay.wrong["losses"]:
        return "fail", _first(wrong)
    if replay.ownership.orphans and not replay.done:
        return "unknown", f"{counted(replay.ownership.orphans, 'block')} of lost nodes did not come back yet"
    lost = sum(len(each.blocks) for each in replay.losses)
    how = "all blocks came back each time" if ledger.plan.recovery == "full" else "they came back, and no others"
    return "pass", f"{counted(lost, 'block')} lost; {how}" if lost else "no block was lost"


def saves_were_chosen(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Nodes chose blocks when the policy says, and these were committed, but for those of nodes that were lost."""
    replay = ledger.replay
    ledger.require_nodes()
    if wrong := replay.wrong["saves"]:
        return "fail", _first(wrong)
    if replay.saves.unclear is not None:
        return "unknown", f"which blocks the save of iteration {replay.saves.unclear} has is not on record"
    return "pass", f"{counted(replay.saves.commits, 'save')} committed, as chosen by {ledger.plan.policy}"


def restores_only_committed(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Every block that came back came from the newest save of it that was committed, as controller and node both say."""
    replay = ledger.replay
    ledger.require_nodes()
    if wrong := replay.wrong["restores"]:
        return "fail", _first(wrong)
    if replay.restored and replay.saves.unclear is not None:
        return "unknown", "which save of a block was the newest is not on record"
    if replay.unsaved and ledger.plan.recovery == "fresh":
        saved, fresh = replay.restored - replay.unsaved, counted(replay.unsaved, "block")
        return "pass", f"{counted(saved, 'block')} restored, each from its newest save; {fresh} had none and began anew"
    return "pass", f"{counted(replay.restored, 'block')} restored, each from its newest save"


def _first(wrong: list[str]) -> str:
    return wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")


def history_is_readable(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Every event says what its kind must say, in the file of a writer who can know it."""
    if wrong := ledger.wrong:
        more = ["and more"] if len(wrong) > SHOWN else []
        return "fail", f"{counted(len(wrong), 'line')} cannot be right: {'; '.join([*wrong[:SHOWN], *more])}"
    torn = [f"{each.path.name} line {each.line}, {each.size} bytes" for each in ledger.torn]
    left = f"; killed writers left {counted(len(torn), 'torn line')}: {'; '.join(torn)}" if torn else ""
    return "pass", f"{counted(ledger.events, 'event')} of {counted(len(ledger.writers), 'writer')}{left}"


def all_members_are_on_record(ledger: ServedLedger) -> tuple[Verdict, str]:
    """There is a history of the controller, and of every node and worker that the run began with or that did anything."""
    plan, there = ledger.plan, set(ledger.writers)
    needed = {ServerWriter("node", n) for n in range(plan.nodes)} | {
        ServerWriter("worker", n) for n in range(plan.workers)
    }
    needed |= {ServerWriter("node", node) for tenure in ledger.replay.tenures for node in tenure.held}
    if absent := sorted(needed - there):
        names = ", ".join(f"{each.kind}-{each.number}" for each in absent[:SHOWN])
        return "unknown", f"there is no history of {names}: bring those of all machines together"
    ever = ledger.replay.members.ever
    strangers = [each for each in ledger.writers if each.kind != "controller" and each.number not in ever[each.kind]]
    for each in strangers:
        if len(ledger.told(each.kind, each.number)) > 1:  # more than that it opened its file
            return "fail", f"{each.kind}-{each.number} has a history, and never joined"
    return (
        "pass",
        f"the histories of the controller, {counted(len(ever['node']), 'node')} and {counted(len(ever['worker']), 'worker')}",
    )


def one_plan(ledger: ServedLedger) -> tuple[Verdict, str]:
    """All lives of the controller train the same workload in the same way."""
    first, *others = ledger.plans or [ledger.plan]
    for other in others:
        fields = [name for name in first._fields if name != "attempt"]
        if differing := [name for name in fields if getattr(first, name) != getattr(other, name)]:
            return "fail", f"life {other.attempt} of the controller has another plan: {', '.join(differing)} differ"
    return "pass", (
        f"{first.workload}, {counted(first.blocks, 'block')} on {counted(first.nodes, 'node')}, by "
        f"{counted(1 + len(others), 'life') if not others else f'{1 + len(others)} lives'} of the controller"
    )


Check: TypeAlias = Callable[[ServedLedger], tuple[Verdict, str]]
CHECKS: Mapping[str, Check] = {
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
