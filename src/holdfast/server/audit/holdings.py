"""Whether every block had one owner at every time, and what was lost came back, from the save it had to."""

from holdfast.finding import Verdict, counted
from holdfast.server.audit.server_ledger import ServedLedger


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
    if replay.orphans and not replay.done:
        return "unknown", f"{counted(replay.orphans, 'block')} of lost nodes did not come back yet"
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
    return "pass", f"{counted(replay.saved, 'save')} committed, as chosen by {ledger.plan.policy}"


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
