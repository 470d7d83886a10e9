"""Check runs with `--staleness`, in which nodes apply each push on arrival and a worker may be ahead of others."""

from collections.abc import Sequence
from typing import TypeAlias

from holdfast.events import Applied, Pushed
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.digest import Samples
from holdfast.server.audit.block_owners import adds_up, by_map
from holdfast.server.audit.server_ledger import ServedLedger, ServerWriter

MOST = 16  # applications of one push that may have been undone; more make too many cases
Applications: TypeAlias = Sequence[tuple[int, Applied]]


def nobody_was_too_far_ahead(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that no worker was more iterations ahead of another worker than the run's `staleness` allows."""
    plan, replay = ledger.plan, ledger.replay
    if not plan.staleness:
        return "pass", "workers wait for each other after every round"
    ledger.require_nodes()
    furthest = 0
    for writer in ledger.writers:
        if writer.kind == "node":
            ahead, because = _ahead(ledger.events_of(*writer), plan.staleness)
            furthest = max(furthest, ahead)
            if because:
                return "fail", f"node-{writer.number} {because}"
    last = max((number // plan.rounds for number in ledger.applied), default=0)
    if last >= plan.iterations or (replay.done and last >= replay.iterations + plan.staleness):
        return "fail", f"iteration {last} was applied, but the run ended after {replay.iterations}"
    return "pass", f"at most {counted(furthest, 'iteration')} ahead, of {plan.staleness} allowed"


def _ahead(lines: Sequence[object], staleness: int) -> tuple[int, str | None]:
    newest = furthest = 0
    for what in lines:
        if isinstance(what, Applied):
            newest = max(newest, what.iteration)
            furthest = max(furthest, newest - what.iteration)
            if furthest > staleness:
                return furthest, f"applied iteration {what.iteration} after iteration {newest}: {staleness} are allowed"
    return furthest, None


def applied_as_they_came(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that nodes applied the update of each worker separately, and only to blocks that the node held."""
    rounds, count = ledger.plan.rounds, 0
    finished = ledger.replay.iterations * rounds
    for number, by_node in sorted(ledger.applied.items()):
        if number >= finished and not ledger.replay.done:
            break  # the history of an interrupted run may lack the moves of blocks in its last iteration
        for node, events in by_node.items():
            for event in events:
                count += 1
                if because := _misplaced(ledger, node, event):
                    return "fail", f"iteration {number // rounds} round {number % rounds}: node-{node} {because}"
    if ledger.replay.dropped:
        return "fail", "pushes are declared dropped, which cannot happen with staleness"
    return ("pass" if count else "unknown"), f"{count} applied, each to blocks of its node"


def _misplaced(ledger: ServedLedger, node: int, what: Applied) -> str | None:
    if len(what.parts) != 1 or what.parts[0] >= ledger.plan.workers:
        return "applied it for more or less than one part of the input"
    held = by_map(ledger.replay.tenures, what.version).held.get(node, Samples())
    if what.blocks.count > held.count or (what.blocks.count == held.count and what.blocks != held):
        return f"applied it to {what.blocks.count} blocks by map {what.version}, by which it holds {held.count}"
    return None


def pushed_as_they_came(ledger: ServedLedger) -> tuple[Verdict, str]:
    """Check that each worker's update was applied once to each block, and again only after the block was restored."""
    replay, rounds, count = ledger.replay, ledger.plan.rounds, 0
    ledger.require_nodes()
    applied: dict[tuple[int, int], list[tuple[int, Applied]]] = {}
    for number, by_node in ledger.applied.items():
        for node, events in by_node.items():
            for event in events:
                applied.setdefault((number, event.parts[0] if event.parts else -1), []).append((node, event))
    for number in range(replay.iterations * rounds):
        for part in range(ledger.plan.workers):
            pushes = ledger.pushed.get((number, part), ())
            if because := _wrong(ledger, part, [push for _, push in pushes], applied.get((number, part), ())):
                return "fail", f"iteration {number // rounds} round {number % rounds}: {because}"
            count += 1
    return ("pass" if count else "unknown"), f"{count} {'push' if count == 1 else 'pushes'}, applied as they came"


def _wrong(ledger: ServedLedger, part: int, pushes: Sequence[Pushed], applied: Applications) -> str | None:
    if not pushes:
        if ServerWriter("worker", part) not in ledger.writers:
            raise CannotTell(f"there is no history of worker-{part}")
        return f"nothing was pushed from part {part}"
    blocks = pushes[0].blocks
    if any(push.blocks != blocks for push in pushes):
        return f"part {part} was pushed again for other blocks"
    stays: list[Samples] = []
    undone: list[Samples] = []
    lost = {loss.number for loss in ledger.replay.losses}
    for node, what in applied:  # with full recovery, a later restore undoes it; otherwise, the loss of its node
        went_back = any(version > what.version for version in ledger.replay.went_back)
        may_be_undone = went_back if ledger.plan.recovery == "full" else node in lost
        (undone if may_be_undone else stays).append(what.blocks)
    if len(undone) > MOST:
        raise CannotTell(f"the push from part {part} was applied and lost more than {MOST} times")
    if adds_up(blocks, stays, undone):
        return None
    reached = Samples.total([*stays, *undone]).count
    moved_since = any(ledger.replay.gave.get(node, -1) > what.version for node, what in applied)
    if reached > blocks.count and ledger.replay.losses and moved_since:
        raise CannotTell(
            f"the push from part {part} was applied to blocks of which some moved to a node that joined and some "
            "were lost; the history does not record which"
        )
    return f"the push from part {part} for {blocks.count} blocks was applied to {reached}, counting repetitions"
